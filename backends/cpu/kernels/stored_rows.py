"""Rows of any stored type to and from float32, as single operations for Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pyggml.backends.cpu.attention import KINDS
from pyggml.backends.cpu.kernels.block_writers import WRITERS
from pyggml.backends.cpu.kernels.blocks import BLOCKS
from pyggml.backends.cpu.kernels.emit import at
from pyggml.backends.cpu.kernels.rows import STORED, Row, steps
from pyggml.backends.cpu.kernels.simd import F32, I64, Typed, intrinsic, typed


def _convert(b: Any, row: Row, target: Any, source: Any, n: Any) -> None:
    zero = ir.Constant(F32, 0.0)
    row.loop(b, [target, source, source, n, zero, zero, zero, zero])


def _read(b: Any, name: str, target: Any, row: Any, n: Any) -> None:
    """n values of a row to float32."""
    if name in STORED:
        _convert(b, Row(lambda x, c: x[0], sources=(name,), unroll=4), target, row, n)
        return
    block = BLOCKS[name]
    with steps(b, ir.Constant(I64, 0), n, block.values) as i:
        index = b.sdiv(i, ir.Constant(I64, block.values))
        address = b.add(row, b.mul(index, ir.Constant(I64, block.nbytes)))
        to = b.add(target, b.mul(i, ir.Constant(I64, 4)))
        for k, v in enumerate(block.dequantize(b, address)):
            v.store(at(b, to, 64 * k))


def _write(b: Any, name: str, target: Any, row: Any, n: Any) -> None:
    """n float32 values to a row of another type."""
    if name in STORED:
        _convert(b, Row(lambda x, c: x[0], target=name, unroll=4), target, row, n)
        return
    block = BLOCKS[name]
    with steps(b, ir.Constant(I64, 0), n, block.values) as i:
        index = b.sdiv(i, ir.Constant(I64, block.values))
        address = b.add(target, b.mul(index, ir.Constant(I64, block.nbytes)))
        WRITERS[name](b, address, b.add(row, b.mul(i, ir.Constant(I64, 4))))


_SIGNATURE = types.void(types.intp, types.intp, types.intp)


def row_reader(name: str) -> Any:
    """Operation (target, row, n): n values of a stored row as float32."""

    def read_row(_: Any, target: Any, row: Any, n: Any) -> Typed:
        return typed(_SIGNATURE, lambda b, a: _read(b, name, *a))

    return intrinsic(read_row)


def row_writer(name: str) -> Any:
    """Operation (target, row, n): n float32 values, stored as another type."""

    def write_row(_: Any, target: Any, row: Any, n: Any) -> Typed:
        return typed(_SIGNATURE, lambda b, a: _write(b, name, *a))

    return intrinsic(write_row)


@intrinsic
def read_any_row(_: Any, kind: Any, target: Any, row: Any, n: Any) -> Typed:
    """n values of a row as float32; kind is a place in KINDS."""

    def emit(b: Any, a: Any) -> None:
        for i, kind in enumerate(KINDS):
            with b.if_then(b.icmp_signed("==", a[0], ir.Constant(I64, i))):
                _read(b, kind.name.lower(), *a[1:])

    i = types.intp
    return typed(types.void(i, i, i, i), emit)
