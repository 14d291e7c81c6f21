"""Kernels of norms, row sums and softmax: a chunk is a range of rows."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import float32, float64, types

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    dst_nb,
    dst_ne,
    graph_kernel,
    inline,
    param_float,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.quantize import ROW_QUANTIZERS
from pyggml.backends.cpu.kernels.rows import MAX, SUM, Row, dst_row, src_row
from pyggml.backends.cpu.kernels.simd import Typed, call_ir, intrinsic, load, store, typed

ZERO = float32(0)


@intrinsic
def root(_: Any, x: Any) -> Typed:
    """Square root of a float64; math.sqrt would call the C library."""
    double = ir.DoubleType()
    d = types.float64
    return typed(d(d), lambda b, a: call_ir(b, "llvm.sqrt.f64", double, [a[0]]))


@inline
def rms_factor(squares: Any, n: int, eps: Any) -> Any:
    """What a row is multiplied by, from the sum of its squares."""
    return float32(1.0 / root(float64(squares) / n + eps))


sum_of = Row(lambda x, c: x[0], target=None, fold=SUM).operation()
sum_of_squares = Row(lambda x, c: x[0] * x[0], target=None, fold=SUM).operation()
scaled = Row(lambda x, c: x[0] * c[0], unroll=4).operation()


def _centre(x: Any, c: Any) -> Any:
    centred = x[0] - c[0]
    return centred, centred * centred


# stores x - mean and adds the squares
centred = Row(_centre, fold=SUM).operation()


@graph_kernel
def sum_rows(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """dst[0] = sum of the row"""
    n, rows = src_ne(node, 0, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        total = sum_of(0, src_row(node, 0, i), 0, n, ZERO, ZERO, ZERO, ZERO)
        store(dst_row(node, i), total)


@graph_kernel
def rms_norm(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """x / sqrt(mean(x**2) + eps). Parameter: eps."""
    n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    eps = float64(param_float(node, 0))
    for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        x = src_row(node, 0, i)
        total = sum_of_squares(0, x, 0, n, ZERO, ZERO, ZERO, ZERO)
        factor = rms_factor(total, n, eps)
        scaled(dst_row(node, i), x, 0, n, factor, ZERO, ZERO, ZERO)


@graph_kernel
def l2_norm(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """x / max(sqrt(sum x**2), eps). Parameter: eps."""
    n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    eps = float64(param_float(node, 0))
    for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        x = src_row(node, 0, i)
        total = sum_of_squares(0, x, 0, n, ZERO, ZERO, ZERO, ZERO)
        factor = float32(1.0 / max(root(float64(total)), eps))
        scaled(dst_row(node, i), x, 0, n, factor, ZERO, ZERO, ZERO)


@graph_kernel
def norm(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """(x - mean) / sqrt(variance + eps). Parameter: eps."""
    n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    eps = float64(param_float(node, 0))
    for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        x, d = src_row(node, 0, i), dst_row(node, i)
        total = sum_of(0, x, 0, n, ZERO, ZERO, ZERO, ZERO)
        mean = float32(float64(total) / n)
        squares = centred(d, x, 0, n, mean, ZERO, ZERO, ZERO)
        factor = rms_factor(squares, n, eps)
        scaled(d, d, 0, n, factor, ZERO, ZERO, ZERO)


# ---------------------------------------------------------------- norms with their neighbours
normed = Row(lambda x, c: x[0] * c[0] * x[1], sources=("f32", "f32"), unroll=4).operation()


def _add(x: Any, c: Any) -> Any:
    total = x[0] + x[1]
    return total, total * total


# stores the sum and adds its squares as sum_of_squares does
added = Row(_add, sources=("f32", "f32"), fold=SUM).operation()


def _norms_kernel(name: str, quantize_row: Any) -> None:
    """RMS norm and weights, sum, RMS norm and weights: any of the three, a row at a time.

    Sources, 0 if absent: x, first weights, addend, last weights, where to keep the sum (in dst if
    nothing follows it), columns for products. Parameters: both eps; 4 to 7: see quantize.py.
    Each row is read before anything is written to its place. Scratch: a row.
    """

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        first, addend, last = src_data(node, 1), src_data(node, 2), src_data(node, 3)
        sums, row = src_data(node, 4), scratch(node, ith)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            x, d = src_data(node, 0) + i * src_nb(node, 0, 1), dst_data(node) + i * dst_nb(node, 1)
            squares = ZERO
            if first != 0 or addend == 0:
                squares = sum_of_squares(0, x, 0, n, ZERO, ZERO, ZERO, ZERO)
            if first != 0:
                factor = rms_factor(squares, n, float64(param_float(node, 0)))
                normed(row, x, first, n, factor, ZERO, ZERO, ZERO)
                x = row
            if addend != 0:
                b = addend + i * src_nb(node, 2, 1)
                s = d if sums == 0 else sums + i * src_nb(node, 4, 1)
                squares = added(s, x, b, n, ZERO, ZERO, ZERO, ZERO)
                x = s
            if last != 0:
                factor = rms_factor(squares, n, float64(param_float(node, 1)))
                normed(d, x, last, n, factor, ZERO, ZERO, ZERO)
            quantize_row(node, i, rows, d, n)

    register_kernel(name, kernel)


for _suffix, _quantize_row in ROW_QUANTIZERS.items():
    _norms_kernel(f"norms{_suffix}", _quantize_row)


# ---------------------------------------------------------------- softmax
exponentials = Row(lambda x, c: f.exp(x[0] - c[0]), fold=SUM, unroll=1).operation()


@inline
def alibi_slope(head: int, n_low: int, m0: float, m1: float) -> float:
    """Factor of the mask for a head: m0**(h + 1), beyond n_low m1**(2 (h - n_low) + 1)."""
    base = m0 if head < n_low else m1
    power = head + 1 if head < n_low else 2 * (head - n_low) + 1
    slope = 1.0
    for _ in range(power):
        slope *= base
    return slope


def _soft_max_kernel(name: str, mask: str | None) -> None:
    """softmax(a * scale + slope * mask), sinks in the denominator.

    Parameters: scale, m0, m1, heads that use m0 (0: all slopes are 1). Sources: a, mask, sinks.
    """
    if mask is None:
        scores = Row(lambda x, c: x[0] * c[0], fold=MAX).operation()
    else:
        scores = Row(
            lambda x, c: x[0] * c[0] + x[1] * c[1], sources=("f32", mask), fold=MAX
        ).operation()

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        scale, m0, m1 = param_float(node, 0), param_float(node, 1), param_float(node, 2)
        n_low, sinks = param_int(node, 3), src_data(node, 2)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            d, x, m = dst_row(node, i), src_row(node, 0, i), src_row(node, 1, i)
            head = i // dst_ne(node, 1) % dst_ne(node, 2)
            slope = float32(1)
            if n_low != 0:
                slope = float32(alibi_slope(head, n_low, float64(m0), float64(m1)))
            top = scores(d, x, m, n, scale, slope, ZERO, ZERO)
            sink = float32(0)
            if sinks != 0:
                sink = load(float32, sinks + 4 * head)
                top = max(top, sink)
            total = float64(exponentials(d, d, 0, n, top, ZERO, ZERO, ZERO))
            if sinks != 0:
                total += math.exp(float64(sink) - float64(top))
            scaled(d, d, 0, n, float32(1.0 / total), ZERO, ZERO, ZERO)

    register_kernel(name, kernel)


_soft_max_kernel("soft_max", None)
_soft_max_kernel("soft_max_f32", "f32")
_soft_max_kernel("soft_max_f16", "f16")
