"""What the machine can do at most: reading memory, float multiply-adds, int8 dot products.

Only measurements call these kernels; `compile_all` leaves them out. Params: what a chunk has to
do (bytes, or arithmetic operations), and bytes from the data of one chunk to the next. Each chunk
stores what it has found at dst + 64 * chunk, so that nothing is optimized away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Any

from pyggml.backends.cpu.kernels.access import (
    dst_data,
    param_int,
    register_kernel,
    src_data,
)
from pyggml.backends.cpu.kernels.emit import (
    Emit,
    V,
    add_pairs,
    at,
    dot_accumulate,
    load_vector,
    multiply_pairs,
    tile_load,
    tile_operation,
    tile_store,
)
from pyggml.backends.cpu.kernels.simd import HAS_AVX512, HAS_VNNI, LINE, Vec

LANES = 16 if HAS_AVX512 else 8
# independent chains: more than latency times the units that work at once
CHAINS = 24 if HAS_AVX512 else 12
STREAMS = 4  # that a chunk reads at once


def _read(b: Any, acc: list[V], args: Sequence[Any]) -> list[V]:
    """A cache line of each stream; args: address, bytes between streams."""
    address, step = args[:2]
    result = []
    per_stream = len(acc) // STREAMS
    for i, total in enumerate(acc):
        if i and i % per_stream == 0:
            address = b.add(address, step)
        line = load_vector(b, Vec("i32", LANES), at(b, address, i % per_stream * 4 * LANES))
        result.append((total.cast("i32") ^ line).cast("f32"))
    return result


def _fma(b: Any, acc: list[V], args: Sequence[Any]) -> list[V]:
    """A multiply-add per chain; args: address of the factor."""
    factor = load_vector(b, Vec("f32", LANES), args[0])
    return [v.fma(factor, factor) for v in acc]


def _dot(b: Any, acc: list[V], args: Sequence[Any]) -> list[V]:
    """4 * LANES products per chain; args: address of the bytes."""
    bytes_ = load_vector(b, Vec("i8", 4 * LANES), args[0])
    unsigned = bytes_.cast("u8")
    if HAS_VNNI:
        return [dot_accumulate(v.cast("i32"), unsigned, bytes_).cast("f32") for v in acc]
    result = []
    for v in acc:
        # products of the accumulator itself: equal ones would be computed once
        pairs = multiply_pairs(v.cast("u8"), bytes_)
        total = v.cast("i32") + add_pairs(pairs, pairs.constant(1))
        result.append(total.cast("f32"))
    return result


def _mixed(acc: list[V]) -> list[V]:
    """All accumulators in one."""
    return [reduce(xor, (v.cast("i32") for v in acc)).cast("f32")]


def _define(name: str, chains: int, emit: Emit, unit: int, advance: int) -> None:
    """Register a kernel whose steps do `unit` of a chunk's work and go on by `advance` bytes."""
    start = tile_load(LANES, chains)  # chains that start alike would be computed once
    step, finish = tile_operation(LANES, chains, emit), tile_store(LANES, chains, _mixed)

    def probe(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        work, address = param_int(node, 0), src_data(node, 0) + chunk * param_int(node, 1)
        acc = start(address)
        for _ in range(work // unit):
            acc = step(acc, address, work // STREAMS, 0, 0, 0, 0)
            address += advance
        finish(acc, dst_data(node) + LINE * chunk, 0, LANES, 1)

    register_kernel(name, probe)


_define("probe_read", STREAMS * LINE // (4 * LANES), _read, STREAMS * LINE, LINE)
_define("probe_fma", CHAINS, _fma, 2 * LANES * CHAINS, 0)
_define("probe_dot", CHAINS, _dot, 8 * LANES * CHAINS, 0)
