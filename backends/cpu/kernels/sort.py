"""Kernels that sort rows: always a permutation, and equal values keep their order.

Short rows (experts of a router) are ranked: the place of a value is the number of values that go
before it. Long ones are merge sorted. Both compare the same integer keys, so NaN has a place too.
"""

from __future__ import annotations

from typing import Any, cast

from llvmlite import ir
from numba import int32, types
from numba.core import cgutils

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_ne,
    graph_kernel,
    inline,
    param_int,
    scratch,
    src_ne,
)
from pyggml.backends.cpu.kernels.functions import const
from pyggml.backends.cpu.kernels.rows import (
    LANES,
    STORED,
    dst_row,
    element,
    for_lanes,
    src_row,
    steps,
)
from pyggml.backends.cpu.kernels.simd import (
    I32,
    I64,
    Typed,
    intrinsic,
    load,
    splat_ir,
    store,
    typed,
)

RANKED = 512  # longest row that is ranked
INTS = ir.VectorType(I32, LANES)


def _keys(b: Any, args: Any) -> None:
    """Operation (keys, row, n, flip): i32 that order like the floats; flip = -1 reverses them.

    The row of keys is filled up to whole vectors with the key that goes last.
    """
    keys, row, n, flip = args
    flips = splat_ir(b, INTS, b.trunc(flip, I32))

    def step(i: Any, rest: Any) -> None:
        x = STORED["f32"].load(b, element(b, row, i, 4), LANES, rest)
        bits = (x + const(x, 0.0)).cast("i32")  # -0 becomes 0
        magnitude = b.lshr((bits >> 31).value, ir.Constant(INTS, [1] * LANES))
        ordered = b.xor(b.xor(bits.value, magnitude), flips)
        if rest is not None:
            lanes = ir.Constant(INTS, list(range(LANES)))
            inside = b.icmp_signed("<", lanes, splat_ir(b, INTS, rest))
            ordered = b.select(inside, ordered, ir.Constant(INTS, [2**31 - 1] * LANES))
        address = b.inttoptr(element(b, keys, i, 4), INTS.as_pointer())
        b.store(ordered, address, align=4)

    for_lanes(b, n, step)


@intrinsic
def make_keys(_: Any, keys: Any, row: Any, n: Any, flip: Any) -> Typed:
    i = types.intp
    return typed(types.void(i, i, i, i), _keys)


def _rank(b: Any, args: Any) -> Any:
    """Operation (keys, n, i): how many keys go before key i."""
    keys, n, i = args
    zero = ir.Constant(INTS, None)
    own = b.load(b.inttoptr(element(b, keys, i, 4), I32.as_pointer()), align=4)
    own, index = splat_ir(b, INTS, own), splat_ir(b, INTS, b.trunc(i, I32))
    count = cast(Any, cgutils).alloca_once_value(b, zero)
    with steps(b, ir.Constant(I64, 0), n, LANES) as j:
        others = b.load(b.inttoptr(element(b, keys, j, 4), INTS.as_pointer()), align=4)
        lanes = ir.Constant(INTS, list(range(LANES)))
        is_earlier = b.icmp_signed("<", b.add(lanes, splat_ir(b, INTS, b.trunc(j, I32))), index)
        smaller = b.icmp_signed("<", others, own)
        equal = b.and_(b.icmp_signed("==", others, own), is_earlier)
        b.store(b.sub(b.load(count), b.sext(b.or_(smaller, equal), INTS)), count)
    total = ir.Constant(I32, 0)
    counts = b.load(count)
    for lane in range(LANES):
        total = b.add(total, b.extract_element(counts, ir.Constant(I32, lane)))
    return b.sext(total, I64)


@intrinsic
def rank_of(_: Any, keys: Any, n: Any, i: Any) -> Typed:
    t = types.intp
    return typed(types.int64(t, t, t), _rank)


@inline
def merge(keys: int, source: int, target: int, low: int, mid: int, high: int) -> None:
    """Merge the sorted index ranges [low, mid) and [mid, high)."""
    i, k = low, mid
    for o in range(low, high):
        second = i >= mid
        if not second and k < high:
            a, b = load(int32, source + 4 * i), load(int32, source + 4 * k)
            second = load(int32, keys + 4 * b) < load(int32, keys + 4 * a)
        if second:
            store(target + 4 * o, load(int32, source + 4 * k))
            k += 1
        else:
            store(target + 4 * o, load(int32, source + 4 * i))
            i += 1


@inline
def merge_sort(keys: int, source: int, target: int, n: int) -> int:
    """Sort indices; where the result is: one of the two rows of memory."""
    for i in range(n):
        store(source + 4 * i, int32(i))
    width = 1
    while width < n:
        for low in range(0, n, 2 * width):
            merge(keys, source, target, low, min(low + width, n), min(low + 2 * width, n))
        source, target = target, source
        width *= 2
    return source


@graph_kernel
def argsort(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """The first indices of each sorted row. Parameter: 1 if the largest come first.

    Scratch: the keys (rounded up to whole vectors), and for long rows two rows of indices.
    """
    n, keep = src_ne(node, 0, 0), dst_ne(node, 0)
    rows = dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
    keys = scratch(node, ith)
    indices = keys + 4 * ((n + LANES - 1) // LANES * LANES)
    for r in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
        target = dst_row(node, r)
        make_keys(keys, src_row(node, 0, r), n, -param_int(node, 0))
        if n <= RANKED:
            for i in range(n):
                rank = rank_of(keys, n, i)
                if rank < keep:
                    store(target + 4 * rank, int32(i))
        else:
            found = merge_sort(keys, indices, indices + 4 * n, n)
            for i in range(keep):
                store(target + 4 * i, load(int32, found + 4 * i))
