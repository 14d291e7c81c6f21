"""What every graph kernel starts with: registering it, and reading its node descriptor.

The readers are intrinsics, so they cost no compile time; their index must be a literal.
`ne` and `nb` are int64, addresses plain integers. See node.py for the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import njit, types

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.kernels.simd import (
    F32,
    I64,
    Typed,
    intrinsic,
    literal_intrinsic,
    load_ir,
    typed,
)

Chunk = Callable[[int, int, int, int], None]
Entry = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function to be compiled, and its C signature."""

    function: Callable[..., Any]
    signature: Any


# Everything compiled kernels are made from, by name; registering compiles nothing.
KERNELS: dict[str, Kernel] = {}


def _register(fn: Callable[..., Any], signature: Any, name: str) -> None:
    assert name not in KERNELS, f"two kernels are called {name}"
    KERNELS[name] = Kernel(fn, signature)


def graph_kernel(fn: Chunk) -> Chunk:
    """Register fn(node, ith, chunk, n_chunks) as a kernel that steps may name."""
    register_kernel(fn.__name__, fn)
    return fn


def register_kernel(name: str, fn: Chunk) -> None:
    """The same for a function made by a function."""
    i = types.int32
    _register(fn, types.void(types.intp, i, i, i), name)


def entry_point(fn: Entry) -> Entry:
    """Register fn(address, number) -> int64, which Python calls through ctypes."""
    _register(fn, types.int64(types.intp, types.int64), fn.__name__)
    return fn


def inline(fn: Callable[..., Any]) -> Any:
    """A helper that is always inlined into the kernels that call it."""
    return njit(forceinline=True, nogil=True, error_model="numpy")(fn)


# ---------------------------------------------------------------- descriptor readers
def _word(b: Any, node: Any, index: int) -> Any:
    return load_ir(b, b.add(node, ir.Constant(I64, 8 * index)), I64, 8)


def _word_at(base: int, *literals: tuple[Any, int]) -> Callable[[Any, Any], Any]:
    """Emit a load of word base + sum(literal * stride)."""
    index = base + sum(literal.literal_value * stride for literal, stride in literals)
    return lambda b, a: _word(b, a[0], index)


@intrinsic
def dst_data(_: Any, node: Any) -> Typed:
    """Address of the destination."""
    return typed(types.intp(types.intp), _word_at(layout.DST))


@literal_intrinsic
def dst_ne(_: Any, node: Any, i: Any) -> Typed:
    """ne[i] of the destination."""
    return typed(types.int64(types.intp, i), _word_at(layout.DST + 1, (i, 1)))


@literal_intrinsic
def dst_nb(_: Any, node: Any, i: Any) -> Typed:
    """nb[i] of the destination, bytes."""
    return typed(types.int64(types.intp, i), _word_at(layout.DST + 5, (i, 1)))


@literal_intrinsic
def src_data(_: Any, node: Any, s: Any) -> Typed:
    """Address of source s; 0 if absent."""
    emit = _word_at(layout.SRC, (s, layout.OPERAND_WORDS))
    return typed(types.intp(types.intp, s), emit)


@literal_intrinsic
def src_ne(_: Any, node: Any, s: Any, i: Any) -> Typed:
    """ne[i] of source s."""
    emit = _word_at(layout.SRC + 1, (s, layout.OPERAND_WORDS), (i, 1))
    return typed(types.int64(types.intp, s, i), emit)


@literal_intrinsic
def src_nb(_: Any, node: Any, s: Any, i: Any) -> Typed:
    """nb[i] of source s, bytes."""
    emit = _word_at(layout.SRC + 5, (s, layout.OPERAND_WORDS), (i, 1))
    return typed(types.int64(types.intp, s, i), emit)


@literal_intrinsic
def param_int(_: Any, node: Any, i: Any) -> Typed:
    """Integer parameter i."""
    return typed(types.int64(types.intp, i), _word_at(layout.PARAMS, (i, 1)))


@literal_intrinsic
def param_float(_: Any, node: Any, i: Any) -> Typed:
    """Float parameter i (stored as a float64), as float32."""
    word = _word_at(layout.PARAMS, (i, 1))

    def emit(b: Any, a: Any) -> Any:
        return b.fptrunc(b.bitcast(word(b, a), ir.DoubleType()), F32)

    return typed(types.float32(types.intp, i), emit)


@intrinsic
def scratch(_: Any, node: Any, ith: Any) -> Typed:
    """Address of thread ith's scratch memory; 64-byte aligned."""

    def emit(b: Any, a: Any) -> Any:
        offset = b.mul(b.sext(a[1], I64), _word(b, a[0], layout.SCRATCH_STRIDE))
        return b.add(_word(b, a[0], layout.SCRATCH), offset)

    return typed(types.intp(types.intp, types.int32), emit)


@inline
def chunk_start(n_items: int, chunk: int, n_chunks: int) -> int:
    """First of n_items that belongs to a chunk; chunk_start(n, chunk + 1, n_chunks) ends it."""
    return n_items * chunk // n_chunks
