"""Atomic memory operations and what threads need around them, as Numba intrinsics."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from pyggml.backends.cpu.kernels.simd import I32, I64, IS_X86, Typed, call_ir, intrinsic, typed

_IS_ARM64 = llvm.get_process_triple().startswith(("aarch64", "arm64"))


def _int64_pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_add(_: Any, addr: Any, value: Any) -> Typed:
    """Fetch-and-add on an int64, sequentially consistent; the old value."""

    def emit(b: Any, a: Any) -> Any:
        return b.atomic_rmw("add", _int64_pointer(b, a[0]), a[1], "seq_cst")

    return typed(types.int64(types.intp, types.int64), emit)


@intrinsic
def atomic_swap(_: Any, addr: Any, value: Any) -> Typed:
    """Exchange an int64, sequentially consistent; the old value."""

    def emit(b: Any, a: Any) -> Any:
        return b.atomic_rmw("xchg", _int64_pointer(b, a[0]), a[1], "seq_cst")

    return typed(types.int64(types.intp, types.int64), emit)


@intrinsic
def compare_swap(_: Any, addr: Any, old: Any, new: Any) -> Typed:
    """True if the int64 was `old` and is now `new`."""

    def emit(b: Any, a: Any) -> Any:
        pair = b.cmpxchg(_int64_pointer(b, a[0]), a[1], a[2], "acq_rel", "acquire")
        return b.extract_value(pair, 1)

    i = types.int64
    return typed(types.boolean(types.intp, i, i), emit)


@intrinsic
def atomic_load(_: Any, addr: Any) -> Typed:
    """Load-acquire of an int64."""

    def emit(b: Any, a: Any) -> Any:
        return b.load_atomic(_int64_pointer(b, a[0]), "acquire", 8)

    return typed(types.int64(types.intp), emit)


@intrinsic
def atomic_store(_: Any, addr: Any, value: Any) -> Typed:
    """Store-release of an int64."""

    def emit(b: Any, a: Any) -> None:
        b.store_atomic(a[1], _int64_pointer(b, a[0]), "release", 8)

    return typed(types.void(types.intp, types.int64), emit)


@intrinsic
def cpu_pause(_: Any) -> Typed:
    """Hint that this is a spin-wait loop."""

    def emit(b: Any, a: Any) -> None:
        if IS_X86:
            call_ir(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif _IS_ARM64:
            call_ir(b, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])

    return typed(types.void(), emit)


@intrinsic
def call_kernel(_: Any, fn: Any, node: Any, ith: Any, chunk: Any, n_chunks: Any) -> Typed:
    """Call a graph kernel by its address: void(intp, int32, int32, int32)."""
    fnty = ir.FunctionType(ir.VoidType(), [I64, I32, I32, I32])

    def emit(b: Any, a: Any) -> None:
        b.call(b.inttoptr(a[0], fnty.as_pointer()), list(a[1:]))

    i = types.int32
    return typed(types.void(types.intp, types.intp, i, i, i), emit)


@intrinsic
def call_function(_: Any, fn: Any, x: Any, y: Any) -> Typed:
    """Call int fn(intp, int32) by its address; a function of fewer arguments ignores the rest."""
    fnty = ir.FunctionType(I32, [I64, I32])

    def emit(b: Any, a: Any) -> Any:
        return b.call(b.inttoptr(a[0], fnty.as_pointer()), list(a[1:]))

    return typed(types.int32(types.intp, types.intp, types.int32), emit)
