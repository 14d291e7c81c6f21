"""Which columns go to which expert: MUL_MAT_ID sorts them so that each expert sees its own.

A route is int64 words: number of experts in use, number of positions, then three words per expert
in use (its number, its first position, how many columns it has), then one word per position:
token * n_used + slot, or -1 for padding. Positions of an expert start at a multiple of `group`.
"""

from __future__ import annotations

from typing import Any

from numba import int32, int64

from pyggml.backends.cpu.kernels.access import (
    dst_data,
    graph_kernel,
    inline,
    param_int,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.faults import report_id
from pyggml.backends.cpu.kernels.simd import load, store
from pyggml.backends.cpu.panels import ROUTE_EXPERT_BYTES, ROUTE_HEAD_BYTES


@inline
def n_active(route: int) -> Any:
    """Number of experts in use."""
    return load(int64, route)


@inline
def n_positions(route: int) -> Any:
    """Number of columns, padding included."""
    return load(int64, route + 8)


@inline
def active_expert(route: int, i: int) -> Any:
    """Number, first position and number of columns of the i-th expert in use."""
    p = route + ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * i
    return load(int64, p), load(int64, p + 8), load(int64, p + 16)


@inline
def slot_at(route: int, position: int) -> Any:
    """token * n_used + slot of a position; -1: padding."""
    slots = route + ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * n_active(route)
    return load(int64, slots + 8 * position)


@inline
def source_row(route: int, position: int, n_used: int, rows_per_token: int) -> Any:
    """The row of activations that a position takes; -1: padding."""
    slot = slot_at(route, position)
    if slot < 0:
        return slot
    return slot // n_used * rows_per_token + slot % n_used % rows_per_token


@graph_kernel
def route_experts(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """Sources: ids [n_used, n_tokens] and, if only marked experts take part, a mark for each;
    params: number of experts, group, offset of working memory for a word per expert.

    An id of -1 takes part in nothing. Other ids outside the experts are reported.
    """
    route, n_experts, group = dst_data(node), param_int(node, 0), param_int(node, 1)
    n_used, n_tokens = src_ne(node, 0, 0), src_ne(node, 0, 1)
    words = route + param_int(node, 2)  # per expert: how many columns, then the next position
    for e in range(n_experts):
        store(words + 8 * e, int64(0))
    for t in range(n_tokens):
        for s in range(n_used):
            e = expert_id(node, t, s)
            if e < -1 or e >= n_experts:
                report_id(node, e)
            elif takes_part(node, e):
                store(words + 8 * e, load(int64, words + 8 * e) + 1)
    active, position = 0, 0
    for e in range(n_experts):
        count = load(int64, words + 8 * e)
        if count > 0:
            record = route + ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * active
            store(record, int64(e))
            store(record + 8, int64(position))
            store(record + 16, count)
            store(words + 8 * e, int64(position))
            active += 1
            position += (count + group - 1) // group * group
    store(route, int64(active))
    store(route + 8, int64(position))
    slots = route + ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * active
    for p in range(position):
        store(slots + 8 * p, int64(-1))
    for t in range(n_tokens):
        for s in range(n_used):
            e = expert_id(node, t, s)
            if e < n_experts and takes_part(node, e):
                p = load(int64, words + 8 * e)
                store(slots + 8 * p, int64(t * n_used + s))
                store(words + 8 * e, p + 1)


@inline
def takes_part(node: int, e: int) -> Any:
    """Whether an expert, or -1 and less, has columns here."""
    if e < 0:
        return False
    marks = src_data(node, 1)
    return marks == 0 or load(int32, marks + e * src_nb(node, 1, 0)) != 0


@inline
def expert_id(node: int, t: int, s: int) -> Any:
    return load(int32, src_data(node, 0) + t * src_nb(node, 0, 1) + s * src_nb(node, 0, 0))
