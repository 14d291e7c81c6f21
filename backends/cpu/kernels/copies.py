"""Kernels that copy: any strides, other types, repeated sources."""

from __future__ import annotations

from typing import Any

from numba import float32, uint16, uint32

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_nb,
    dst_ne,
    inline,
    register_kernel,
    scratch,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.block_writers import WRITERS
from pyggml.backends.cpu.kernels.blocks import BLOCKS
from pyggml.backends.cpu.kernels.rows import STORED, Row, dst_row, src_row
from pyggml.backends.cpu.kernels.simd import load, store
from pyggml.backends.cpu.kernels.stored_rows import row_reader, row_writer

ZERO = float32(0)
# Elements that pass through scratch memory at a time, if a row has gaps.
PIECE = 1024
SCRATCH = 2 * 4 * PIECE


def _strided(size: int) -> tuple[Any, Any]:
    """Helpers that collect elements with gaps between them, and spread them."""
    bits = uint16 if size == 2 else uint32

    @inline
    def collect(target: int, source: int, step: int, n: int) -> None:
        for i in range(n):
            store(target + size * i, load(bits, source + step * i))

    @inline
    def spread(target: int, step: int, source: int, n: int) -> None:
        for i in range(n):
            store(target + step * i, load(bits, source + size * i))

    return collect, spread


def _copy_kernel(name: str, source: str, target: str) -> None:
    """dst = src, converted; a source with fewer elements in a dimension repeats there."""
    convert = Row(lambda x, c: x[0], sources=(source,), target=target, unroll=4).operation()
    source_size, target_size = STORED[source].size, STORED[target].size
    collect, _ = _strided(source_size)
    _, spread = _strided(target_size)

    @inline
    def copy_with_gaps(tmp: int, d: int, d_step: int, x: int, x_step: int, n: int) -> None:
        for j in range(0, n, PIECE):
            m = min(PIECE, n - j)
            collect(tmp, x + x_step * j, x_step, m)
            convert(tmp + 4 * PIECE, tmp, 0, m, ZERO, ZERO, ZERO, ZERO)
            spread(d + d_step * j, d_step, tmp + 4 * PIECE, m)

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        part, tmp = src_ne(node, 0, 0), scratch(node, ith)
        d_step, x_step = dst_nb(node, 0), src_nb(node, 0, 0)
        packed = (d_step == target_size and x_step == source_size) or part == 1
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            d, x = dst_row(node, i), src_row(node, 0, i)
            for j in range(0, n, part):
                if packed:
                    convert(d + d_step * j, x, 0, part, ZERO, ZERO, ZERO, ZERO)
                else:
                    copy_with_gaps(tmp, d + d_step * j, d_step, x, x_step, part)

    register_kernel(name, kernel)


_copy_kernel("copy_4", "f32", "f32")
_copy_kernel("copy_2", "raw2", "raw2")
for _source, _target in (
    *(("f32", "f16"), ("f32", "bf16"), ("f32", "i32"), ("f16", "f32"), ("f16", "bf16")),
    *(("bf16", "f32"), ("bf16", "f16"), ("i32", "f32")),
):
    _copy_kernel(f"copy_{_source}_{_target}", _source, _target)


# ---------------------------------------------------------------- quantized rows
def _row_kernel(name: str, convert_row: Any) -> None:
    """Rows of one shape, quantized on one side."""

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            convert_row(dst_row(node, i), src_row(node, 0, i), n)

    register_kernel(name, kernel)


for _name in BLOCKS:
    _row_kernel(f"copy_{_name}_f32", row_reader(_name))
for _name in WRITERS:
    _row_kernel(f"copy_f32_{_name}", row_writer(_name))
