"""Kernels of norms, row sums and softmax: a chunk is a range of rows."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import float32, float64, types

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_ne,
    graph_kernel,
    inline,
    param_float,
    param_int,
    register_kernel,
    src_data,
    src_ne,
)
from pyggml.backends.cpu.kernels.rows import MAX, SUM, Row, dst_row, src_row
from pyggml.backends.cpu.kernels.simd import Typed, call_ir, intrinsic, load, store, typed

ZERO = float32(0)


@intrinsic
def root(_: Any, x: Any) -> Typed:
    """Square root of a float64; math.sqrt would call the C library."""
    double = ir.DoubleType()
    d = types.float64
    return typed(d(d), lambda b, a: call_ir(b, "llvm.sqrt.f64", double, [a[0]]))


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
        factor = float32(1.0 / root(float64(total) / n + eps))
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
        factor = float32(1.0 / root(float64(squares) / n + eps))
        scaled(d, d, 0, n, factor, ZERO, ZERO, ZERO)


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
