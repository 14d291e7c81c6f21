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
def call_yield(_: Any, fn: Any) -> Typed:
    """Call int sched_yield(void) by its address."""

    def emit(b: Any, a: Any) -> None:
        b.call(b.inttoptr(a[0], ir.FunctionType(I32, []).as_pointer()), [])

    return typed(types.void(types.intp), emit)
