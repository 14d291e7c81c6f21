"""Activations to the int8 formats of panels.py, and to float32 tiles."""

from __future__ import annotations

from typing import Any

from numba import float32, int16, int32

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    graph_kernel,
    inline,
    param_int,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.route import n_positions, source_row
from pyggml.backends.cpu.kernels.simd import (
    convert,
    f32x8,
    i8x8,
    i32x8,
    load,
    prefetch,
    splat,
    store,
    zero,
)
from pyggml.backends.cpu.kernels.simd_ops import fabs, reduce_add, reduce_max, round_even, vmax
from pyggml.backends.cpu.panels import Q8_BYTES, Q8_HALVES_BYTES, Q8K_BYTES


@inline
def largest32(x: int) -> Any:
    """The largest magnitude of 32 floats."""
    a = vmax(fabs(load(f32x8, x)), fabs(load(f32x8, x + 32)))
    b = vmax(fabs(load(f32x8, x + 64)), fabs(load(f32x8, x + 96)))
    return reduce_max(vmax(a, b))


@inline
def inverse_scale(largest: Any) -> Any:
    return float32(127.0) / largest if largest > 0 else float32(0)


@inline
def quantize8(x: int, inverse: Any) -> Any:
    """8 floats to integers in i32."""
    return convert(i32x8, round_even(load(f32x8, x) * splat(f32x8, inverse)))


@inline
def quantize_q8_block(x: int, out: int, zero_point: int) -> None:
    largest = largest32(x)
    inverse, d = inverse_scale(largest), largest * float32(1.0 / 127.0)
    q0, q1 = quantize8(x, inverse), quantize8(x + 32, inverse)
    q2, q3 = quantize8(x + 64, inverse), quantize8(x + 96, inverse)
    total = reduce_add((q0 + q1) + (q2 + q3))
    store(out, d)
    if zero_point == 0:
        store(out + 4, d * float32(total))
    else:
        store(out + 4, int32(-zero_point * total))
    store(out + 8, convert(i8x8, q0))
    store(out + 16, convert(i8x8, q1))
    store(out + 24, convert(i8x8, q2))
    store(out + 32, convert(i8x8, q3))


@inline
def quantize_q8_halves_block(x: int, out: int, zero_point: int) -> None:
    largest = largest32(x)
    inverse = inverse_scale(largest)
    store(out, largest * float32(1.0 / 127.0))
    for i in range(2):
        q0, q1 = quantize8(x + 64 * i, inverse), quantize8(x + 64 * i + 32, inverse)
        store(out + 4 + 4 * i, int32(-zero_point * reduce_add(q0 + q1)))
        store(out + 16 + 16 * i, convert(i8x8, q0))
        store(out + 24 + 16 * i, convert(i8x8, q1))


@inline
def quantize_q8_k_block(x: int, out: int, _: int) -> None:
    largest = float32(0)
    for i in range(8):
        largest = max(largest, largest32(x + 128 * i))
    inverse = inverse_scale(largest)
    store(out, largest * float32(1.0 / 127.0))
    for i in range(16):
        q0, q1 = quantize8(x + 64 * i, inverse), quantize8(x + 64 * i + 32, inverse)
        store(out + 64 + 16 * i, convert(i8x8, q0))
        store(out + 72 + 16 * i, convert(i8x8, q1))
        store(out + 16 + 2 * swapped(i), int16(reduce_add(q0 + q1)))
    for i in range(8):
        a = load(int16, out + 16 + 2 * swapped(2 * i))
        b = load(int16, out + 16 + 2 * swapped(2 * i + 1))
        store(out + 48 + 2 * swapped(i), int16(a + b))


@inline
def swapped(i: int) -> int:
    """Place of sum i: of each four neighbours the middle two change places."""
    return (i & -4) + (i & 1) * 2 + (i >> 1 & 1)


@inline
def zero_block(out: int, nbytes: int) -> None:
    for i in range(0, nbytes, 8):
        store(out + i, zero(i8x8))


@inline
def row_address(node: int, row: int) -> Any:
    """Address of row `row` of source 0, counted over dimensions 1 to 3."""
    ne1, ne2 = src_ne(node, 0, 1), src_ne(node, 0, 2)
    i1, i2, i3 = row % ne1, row // ne1 % ne2, row // ne1 // ne2
    offset = i1 * src_nb(node, 0, 1) + i2 * src_nb(node, 0, 2) + i3 * src_nb(node, 0, 3)
    return src_data(node, 0) + offset


@inline
def padded_columns(route: int, n_columns: int, group: int) -> Any:
    """Columns of a plane and its padding to whole groups; of all experts if they are routed."""
    if route != 0:
        return n_positions(route)
    return (n_columns + group - 1) // group * group


@inline
def column_source(
    node: int,
    route: int,
    i: int,
    end: int,
    n_columns: int,
    padded: int,
    n_used: int,
    per_token: int,
) -> Any:
    """Address of the row of source 0 that column i of all planes takes; 0: it is padding.

    Asks for the row of the next column before `end` if they are routed: such rows are far from
    each other, and the hardware does not foresee the next.
    """
    z, c = i // padded, i % padded
    row = z * n_columns + c if c < n_columns else -1
    if route != 0:
        row = source_row(route, i, n_used, per_token)
        if i + 1 < end:
            after = source_row(route, i + 1, n_used, per_token)
            ahead = row_address(node, max(after, 0))
            for line in range(0, 4 * src_ne(node, 0, 0), 64):
                prefetch(ahead + line)
    return row_address(node, row) if row >= 0 else 0


def column_quantizer(quantize_block: Any, values: int, nbytes: int) -> Any:
    """Inline (plane, column, x, n, group, blocks, zero point): n values at x, and zeros up to the
    padding of weights; x = 0: only zeros."""

    @inline
    def quantize_column(
        plane: int, c: int, x: int, n: int, group: int, blocks: int, zero_point: int
    ) -> None:
        out = plane + (c // group * blocks * group + c % group) * nbytes
        used = n // values if x != 0 else 0
        for b in range(used):
            quantize_block(x + 4 * values * b, out + b * group * nbytes, zero_point)
        for b in range(used, blocks):
            zero_block(out + b * group * nbytes, nbytes)

    return quantize_column


def _rows_quantizer(quantize_column: Any) -> Any:
    """Inline kernel body; params: columns per plane, planes, group, blocks per column with
    padding, bytes per plane, zero point, and for routed columns: rows per token of source 0, and
    of the result. Source 1, if there is one, tells which row each column takes (route.py)."""

    @inline
    def quantize_rows(node: int, chunk: int, n_chunks: int) -> None:
        n_columns, planes, group = param_int(node, 0), param_int(node, 1), param_int(node, 2)
        blocks, plane_bytes = param_int(node, 3), param_int(node, 4)
        zero_point, route = param_int(node, 5), src_data(node, 1)
        n = src_ne(node, 0, 0)
        n_used, per_token = param_int(node, 6), param_int(node, 7)
        padded = padded_columns(route, n_columns, group)
        start = chunk_start(padded * planes, chunk, n_chunks)
        end = chunk_start(padded * planes, chunk + 1, n_chunks)
        for i in range(start, end):
            x = column_source(node, route, i, end, n_columns, padded, n_used, per_token)
            plane = dst_data(node) + i // padded * plane_bytes
            quantize_column(plane, i % padded, x, n, group, blocks, zero_point)

    return quantize_rows


_q8_column = column_quantizer(quantize_q8_block, 32, Q8_BYTES)
_q8_halves_column = column_quantizer(quantize_q8_halves_block, 32, Q8_HALVES_BYTES)
_q8_k_column = column_quantizer(quantize_q8_k_block, 256, Q8K_BYTES)
_quantize_q8_rows = _rows_quantizer(_q8_column)
_quantize_q8_halves_rows = _rows_quantizer(_q8_halves_column)
_quantize_q8_k_rows = _rows_quantizer(_q8_k_column)


@graph_kernel
def quantize_q8(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F32 rows to q8."""
    _quantize_q8_rows(node, chunk, n_chunks)


@graph_kernel
def quantize_q8_halves(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F32 rows to q8 with a sum of each half."""
    _quantize_q8_halves_rows(node, chunk, n_chunks)


@graph_kernel
def quantize_q8_k(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F32 rows to q8_K."""
    _quantize_q8_k_rows(node, chunk, n_chunks)


# ---------------------------------------------------------------- after another operation
def _row_quantizer(quantize_column: Any) -> Any:
    """Inline (node, i, rows, x, n): column i of source 5; the last row adds the group's padding.

    Params 4 to 7: group, blocks per column, zero point, columns with padding.
    """

    @inline
    def quantize_row(node: int, i: int, rows: int, x: int, n: int) -> None:
        plane, group, blocks = src_data(node, 5), param_int(node, 4), param_int(node, 5)
        end = param_int(node, 7) if i == rows - 1 else i + 1
        for c in range(i, end):
            source = x if c == i else 0
            quantize_column(plane, c, source, n, group, blocks, param_int(node, 6))

    return quantize_row


@inline
def _no_columns(node: int, i: int, rows: int, x: int, n: int) -> None:
    """The row as it is will do."""


# What follows the computation of a row, by the suffix of the kernel's name.
ROW_QUANTIZERS = {
    "": _no_columns,
    "_q8": _row_quantizer(_q8_column),
    "_q8_halves": _row_quantizer(_q8_halves_column),
    "_q8_k": _row_quantizer(_q8_k_column),
}


@graph_kernel
def gather_columns(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """Quantized columns, brought into the order of a route (source 1) and its groups.

    Params: columns of the result and of source 0 per token, group, blocks per column, bytes of one.
    """
    n_used, per_token, group = param_int(node, 0), param_int(node, 1), param_int(node, 2)
    blocks, nbytes, route = param_int(node, 3), param_int(node, 4), src_data(node, 1)
    n, step = n_positions(route), group * nbytes
    for i in range(chunk_start(n, chunk, n_chunks), chunk_start(n, chunk + 1, n_chunks)):
        out = dst_data(node) + i // group * blocks * step + i % group * nbytes
        row = source_row(route, i, n_used, per_token)
        source = src_data(node, 0) + row * blocks * nbytes
        for b in range(blocks):
            if row < 0:
                zero_block(out + b * step, nbytes)
            else:
                copy_block(out + b * step, source + b * nbytes, nbytes)


@inline
def copy_block(out: int, source: int, nbytes: int) -> None:
    for i in range(0, nbytes, 8):
        store(out + i, load(i8x8, source + i))
