"""Kernels that read or write rows by index."""

from __future__ import annotations

from typing import Any

from numba import float32, int32, int64, uint16, uint32

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    dst_nb,
    dst_ne,
    graph_kernel,
    inline,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.block_writers import WRITERS
from pyggml.backends.cpu.kernels.blocks import BLOCKS
from pyggml.backends.cpu.kernels.faults import report_id
from pyggml.backends.cpu.kernels.rows import STORED, Row, dst_row, src_row
from pyggml.backends.cpu.kernels.simd import load, store
from pyggml.backends.cpu.kernels.stored_rows import row_reader, row_writer

ZERO, NAN = float32(0), float32(float("nan"))
# Elements that set_elements converts at a time.
PIECE = 1024
PLAIN = ("f32", "f16", "bf16")


@inline
def index_at(node: int, s: Any, i: int, p: int, q: int) -> Any:
    """Index [i, p, q] of source 1, whose elements have s bytes."""
    address = src_data(node, 1)
    address += i * src_nb(node, 1, 0) + p * src_nb(node, 1, 1) + q * src_nb(node, 1, 2)
    return load_index(address, s)


@inline
def load_index(address: int, size: Any) -> Any:
    """An integer of 4 or 8 bytes."""
    if size == 8:
        return load(int64, address)
    return int64(load(int32, address))


# ---------------------------------------------------------------- get_rows
def _get_rows_kernel(name: str, read_row: Any) -> None:
    """dst[:, i, p, q] = a[:, ids[i, p, q], p, q]; read_row(target, row, n).

    A row that does not exist is reported and becomes NaN.
    """
    fill = Row(lambda x, c: c[0], sources=()).operation()

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, ne1, ne2 = dst_ne(node, 0), dst_ne(node, 1), dst_ne(node, 2)
        rows = ne1 * ne2 * dst_ne(node, 3)
        for r in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            i, p, q = r % ne1, r // ne1 % ne2, r // (ne1 * ne2)
            k = index_at(node, 4, i, p, q)
            row = src_data(node, 0) + k * src_nb(node, 0, 1)
            row += p * src_nb(node, 0, 2) + q * src_nb(node, 0, 3)
            if 0 <= k < src_ne(node, 0, 1):
                read_row(dst_row(node, r), row, n)
            else:
                report_id(node, k)
                fill(dst_row(node, r), 0, 0, n, NAN, ZERO, ZERO, ZERO)

    register_kernel(name, kernel)


for _name in (*PLAIN, *BLOCKS):
    _get_rows_kernel(f"get_rows_{_name}", row_reader(_name))


@graph_kernel
def add_id(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """dst[:, j, t] = a[:, j, t] + b[:, ids[j, t]]; an id of -1 adds nothing. Sources: a, ids, b."""
    n, ne1 = dst_ne(node, 0), dst_ne(node, 1)
    rows = ne1 * dst_ne(node, 2)
    for r in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        k = index_at(node, 4, r % ne1, r // ne1, 0)
        if 0 <= k < src_ne(node, 2, 1):
            row = src_data(node, 2) + k * src_nb(node, 2, 1)
            add_rows(dst_row(node, r), src_row(node, 0, r), row, n, ZERO, ZERO, ZERO, ZERO)
        else:
            if k != -1:
                report_id(node, k)
            copy_row(dst_row(node, r), src_row(node, 0, r), 0, n, ZERO, ZERO, ZERO, ZERO)


copy_row = Row(lambda x, c: x[0], unroll=2).operation()
add_rows = Row(lambda x, c: x[0] + x[1], sources=("f32", "f32"), unroll=2).operation()


# ---------------------------------------------------------------- set_rows
def _set_rows_kernel(name: str, write_row: Any) -> None:
    """a[:, ids[i, p, q], p, q] = b[:, i, p, q]; rows that do not exist are reported.

    Sources: b, ids. Parameter: bytes of an id.
    """

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, ne1, ne2 = src_ne(node, 0, 0), src_ne(node, 0, 1), src_ne(node, 0, 2)
        rows, size = ne1 * ne2 * src_ne(node, 0, 3), param_int(node, 0)
        for r in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            i, p, q = r % ne1, r // ne1 % ne2, r // (ne1 * ne2)
            k = index_at(node, size, i, p % src_ne(node, 1, 1), q % src_ne(node, 1, 2))
            row = src_data(node, 0) + i * src_nb(node, 0, 1)
            row += p * src_nb(node, 0, 2) + q * src_nb(node, 0, 3)
            target = dst_data(node) + k * dst_nb(node, 1)
            target += p * dst_nb(node, 2) + q * dst_nb(node, 3)
            if 0 <= k < dst_ne(node, 1):
                write_row(target, row, n)
            else:
                report_id(node, k)

    register_kernel(name, kernel)


def _set_elements_kernel(name: str, stored: str) -> None:
    """The same for rows of one element (a transposed V cache), b packed and two-dimensional."""
    convert = Row(lambda x, c: x[0], target=stored, unroll=4).operation()
    size = STORED[stored].size
    bits = uint16 if size == 2 else uint32

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        count, limit, step = src_ne(node, 0, 1), dst_ne(node, 1), dst_nb(node, 1)
        start, end = chunk_start(count, chunk, n_chunks), chunk_start(count, chunk + 1, n_chunks)
        converted, target, index_size = scratch(node, ith), dst_data(node), param_int(node, 0)
        for first in range(start, end, PIECE):
            n = min(PIECE, end - first)
            convert(converted, src_data(node, 0) + 4 * first, 0, n, ZERO, ZERO, ZERO, ZERO)
            for i in range(n):
                k = index_at(node, index_size, first + i, 0, 0)
                if 0 <= k < limit:
                    store(target + k * step, load(bits, converted + size * i))
                else:
                    report_id(node, k)

    register_kernel(name, kernel)


for _name in PLAIN:
    _set_elements_kernel(f"set_elements_{_name}", _name)
for _name in (*PLAIN, *WRITERS):
    _set_rows_kernel(f"set_rows_{_name}", row_writer(_name))
