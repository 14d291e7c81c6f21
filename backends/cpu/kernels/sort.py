"""Kernels that sort: stable merge sort of indices, so equal values keep their order."""

from __future__ import annotations

from typing import Any

from numba import boolean, float32, int32

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_ne,
    graph_kernel,
    inline,
    param_int,
    scratch,
    src_ne,
)
from pyggml.backends.cpu.kernels.rows import dst_row, src_row
from pyggml.backends.cpu.kernels.simd import load, store


@inline
def goes_first(x: int, i: int, k: int, descending: bool) -> Any:
    """Whether element k has to stand before element i, which comes earlier in the row."""
    a, b = load(float32, x + 4 * i), load(float32, x + 4 * k)
    return a < b if descending else b < a


@inline
def merge(x: int, source: int, target: int, low: int, mid: int, high: int, down: bool) -> None:
    """Merge the sorted index ranges [low, mid) and [mid, high)."""
    i, k = low, mid
    for o in range(low, high):
        second = i >= mid
        if not second and k < high:
            second = goes_first(
                x, load(int32, source + 4 * i), load(int32, source + 4 * k), boolean(down)
            )
        if second:
            store(target + 4 * o, load(int32, source + 4 * k))
            k += 1
        else:
            store(target + 4 * o, load(int32, source + 4 * i))
            i += 1


@graph_kernel
def argsort(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """The first indices of each sorted row. Parameter: 1 if the largest come first.

    Scratch: two rows of indices.
    """
    n, keep = src_ne(node, 0, 0), dst_ne(node, 0)
    rows = dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    down = param_int(node, 0) != 0
    for r in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        x, source = src_row(node, 0, r), scratch(node, ith)
        target = source + 4 * n
        for i in range(n):
            store(source + 4 * i, int32(i))
        width = 1
        while width < n:
            for low in range(0, n, 2 * width):
                mid, high = min(low + width, n), min(low + 2 * width, n)
                merge(x, source, target, low, mid, high, down)
            source, target = target, source
            width *= 2
        for i in range(keep):
            store(dst_row(node, r) + 4 * i, load(int32, source + 4 * i))
