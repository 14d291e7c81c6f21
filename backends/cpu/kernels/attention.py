"""Attention: keys in blocks from position 0, softmax as they come (flash attention).

A tile is some queries of the heads that share keys and values; its rows pass over the blocks
together. Keys are grouped in segments of fixed length: each gives a record (maximum, sum, output)
per row, and the records are merged in order. So segments may be computed by different threads,
and blocks without a visible key may be left out, without changing a bit of the result.

Parameters of both kernels: scale, m0, m1, softcap; heads that use m0 (0: all slopes are 1),
queries per tile, heads per tile, segments, whether a chunk is one segment of a tile, bytes per
record, types of keys and values (places in KINDS), bytes of their rows.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float32, float64, int64, uint16

from pyggml.backends.cpu.attention import BLOCK, HEAD, SEGMENT
from pyggml.backends.cpu.kernels.access import (
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
from pyggml.backends.cpu.kernels.attention_tiles import (
    MAXIMUM,
    NOTHING,
    ROWS,
    TOTAL,
    output_operation,
    probabilities_of_block,
    scores_of_block,
    transpose_keys,
)
from pyggml.backends.cpu.kernels.norms import alibi_slope
from pyggml.backends.cpu.kernels.rows import LANES, STORED, Row, apart, stay_apart
from pyggml.backends.cpu.kernels.simd import LINE, load, prefetch, store
from pyggml.backends.cpu.kernels.stored_rows import read_any_row, row_reader

ZERO, ONE = float32(0), float32(1)
N_HEADS_M0, QUERIES, HEADS, SEGMENTS, IS_SPLIT, RECORD, K_KIND, V_KIND = 4, 5, 6, 7, 8, 9, 10, 11
K_BYTES, V_BYTES = 12, 13

copy_row = Row(lambda x, c: x[0], unroll=4).operation()
fill_row = Row(lambda x, c: c[0], sources=(), unroll=4).operation()
scale_row = Row(lambda x, c: x[0] * c[0], unroll=4).operation()
add_staged = output_operation(STORED["f32"])
merge_rows = Row(lambda x, c: x[0] * c[0] + x[1] * c[1], sources=("f32", "f32")).operation()


# ---------------------------------------------------------------- tiles
@inline
def tile_of(node: int, tile: int) -> tuple[int, int, int, int, int, int]:
    """First query, queries, first head, heads, head of keys and sequence of a tile.

    Later queries come first: with a causal mask they take longest.
    """
    per_queries, per_heads = param_int(node, QUERIES), param_int(node, HEADS)
    n_batch, n_head_kv = src_ne(node, 0, 1), src_ne(node, 1, 2)
    group = src_ne(node, 0, 2) // n_head_kv
    parts = (group + per_heads - 1) // per_heads
    head_kv = tile % n_head_kv
    part = tile // n_head_kv % parts
    rest = tile // (n_head_kv * parts)
    sequence = rest % src_ne(node, 0, 3)
    n_tiles = (n_batch + per_queries - 1) // per_queries
    query = (n_tiles - 1 - rest // src_ne(node, 0, 3)) * per_queries
    n_queries = min(per_queries, n_batch - query)
    head = head_kv * group + part * per_heads
    n_heads = min(per_heads, (head_kv + 1) * group - head)
    return query, n_queries, head, n_heads, head_kv, sequence


@inline
def clear_records(records: int, step: int, n_rows: int, n_channels: int) -> None:
    for r in range(n_rows):
        record = records + step * r
        store(record + MAXIMUM, float32(NOTHING))
        store(record + TOTAL, ZERO)
        fill_row(record + HEAD, 0, 0, n_channels, ZERO, ZERO, ZERO, ZERO)


@inline
def merge_record(into: int, record: int, n_channels: int) -> None:
    """Add the keys of a later segment. A record without keys changes nothing."""
    old, new = load(float32, into + MAXIMUM), load(float32, record + MAXIMUM)
    top = max(old, new)
    keep = float32(math.exp(float64(old) - float64(top)))
    take = float32(math.exp(float64(new) - float64(top)))
    total = load(float32, into + TOTAL) * keep + load(float32, record + TOTAL) * take
    store(into + MAXIMUM, top)
    store(into + TOTAL, total)
    merge_rows(into + HEAD, into + HEAD, record + HEAD, n_channels, keep, take, ZERO, ZERO)


@inline
def finish_record(node: int, record: int, query: int, head: int, sequence: int) -> None:
    """Divide by the sum, in which a sink takes part, and write the result's row."""
    top, total = load(float32, record + MAXIMUM), load(float32, record + TOTAL)
    factor, sinks = ONE, src_data(node, 4)
    if sinks != 0:
        sink = load(float32, sinks + 4 * head)
        new = max(top, sink)
        factor = float32(math.exp(float64(top) - float64(new)))
        total = total * factor + float32(math.exp(float64(sink) - float64(new)))
    factor = factor / total if total > ZERO else ZERO
    target = dst_data(node) + head * dst_nb(node, 1) + query * dst_nb(node, 2)
    target += sequence * dst_nb(node, 3)
    scale_row(target, record + HEAD, 0, dst_ne(node, 0), factor, ZERO, ZERO, ZERO)


# ---------------------------------------------------------------- the mask
@inline
def mask_row(node: int, query: int, head: int, sequence: int) -> Any:
    """Address of a query's mask; 0: there is none."""
    mask = src_data(node, 3)
    if mask != 0:
        mask += query * src_nb(node, 3, 1) + head % src_ne(node, 3, 2) * src_nb(node, 3, 2)
        mask += sequence % src_ne(node, 3, 3) * src_nb(node, 3, 3)
    return mask


@apart
def sees_block(node: int, tile: Any, first: int, n_keys: int) -> bool:
    """Whether a query of the tile sees a key of a block; the last queries are asked first."""
    stay_apart()
    query, n_queries, head, n_heads, _, sequence = tile
    if src_data(node, 3) == 0:
        return True
    # masks of their own for the heads are rare: one for all is asked once
    own = n_heads if src_ne(node, 3, 2) > 1 else 1
    for h in range(own):
        for t in range(n_queries - 1, -1, -1):
            row = mask_row(node, query + t, head + h, sequence) + 2 * first
            for i in range(n_keys):
                if load(uint16, row + 2 * i) != uint16(0xFC00):  # minus infinity
                    return True
    return False


# ---------------------------------------------------------------- keys and values
@inline
def padded(n: int) -> int:
    """Channels rounded up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@inline
def ask_for(row: int, nbytes: int) -> None:
    """Fetch a row of the next block: rows of one head are apart, which no hardware follows."""
    for line in range(0, nbytes, LINE):
        prefetch(row + line)


def _plain_loader(stored: str) -> Any:
    """Keys and, unless they are used in their place, values of one plain type."""
    load_keys, read_row = transpose_keys(STORED[stored]), row_reader(stored)

    @apart
    def load_pair(node: int, places: Any, k: int, v: int, n_keys: int, in_place: bool) -> None:
        stay_apart()
        _, _, keys, values, _, _, _ = places
        dk, dv = src_ne(node, 1, 0), src_ne(node, 2, 0)
        step = src_nb(node, 2, 1)
        load_keys(keys, k, src_nb(node, 1, 1), dk, n_keys, 0)
        if not in_place:
            for i in range(n_keys):
                ask_for(v + (BLOCK + i) * step, dv * src_nb(node, 2, 0))
                read_row(values + 4 * padded(dv) * i, v + i * step, dv)

    return load_pair


def _any_loader() -> Any:
    """Keys and values of any two types."""
    load_keys = transpose_keys(STORED["f32"])

    @apart
    def load_pair(node: int, places: Any, k: int, v: int, n_keys: int, in_place: bool) -> None:
        stay_apart()
        _, _, keys, values, _, _, staged = places
        dk, dv = src_ne(node, 1, 0), src_ne(node, 2, 0)
        k_kind, v_kind = param_int(node, K_KIND), param_int(node, V_KIND)
        k_bytes, v_bytes = param_int(node, K_BYTES), param_int(node, V_BYTES)
        for i in range(n_keys):
            k_row, v_row = k + i * src_nb(node, 1, 1), v + i * src_nb(node, 2, 1)
            ask_for(k_row + BLOCK * src_nb(node, 1, 1), k_bytes)
            ask_for(v_row + BLOCK * src_nb(node, 2, 1), v_bytes)
            read_any_row(k_kind, staged + 4 * dk * i, k_row, dk)
            read_any_row(v_kind, values + 4 * padded(dv) * i, v_row, dv)
        load_keys(keys, staged, 4 * dk, dk, n_keys, 0)

    return load_pair


@inline
def block_addresses(node: int, tile: Any, first: int) -> tuple[int, int]:
    """Where the block's keys and values lie."""
    _, _, _, _, head, sequence = tile
    k = src_data(node, 1) + first * src_nb(node, 1, 1) + head * src_nb(node, 1, 2)
    k += sequence // (src_ne(node, 0, 3) // src_ne(node, 1, 3)) * src_nb(node, 1, 3)
    v = src_data(node, 2) + first * src_nb(node, 2, 1) + head * src_nb(node, 2, 2)
    v += sequence // (src_ne(node, 0, 3) // src_ne(node, 2, 3)) * src_nb(node, 2, 3)
    return k, v


# ---------------------------------------------------------------- the kernels
@inline
def places_of(node: int, ith: int) -> tuple[int, int, int, int, int, int, int]:
    """Scratch: queries, scores, keys, values, records of a segment, merged records, key rows."""
    rows = param_int(node, QUERIES) * param_int(node, HEADS)
    dk, step = src_ne(node, 1, 0), param_int(node, RECORD)
    queries = scratch(node, ith)
    scores = queries + 4 * dk * rows
    keys = scores + 4 * BLOCK * rows
    values = keys + 4 * BLOCK * dk
    records = values + 4 * BLOCK * padded(src_ne(node, 2, 0))
    merged = records + step * rows
    return queries, scores, keys, values, records, merged, merged + step * rows


@inline
def copy_queries(node: int, tile: Any, queries: int) -> None:
    """Rows in the order query, head."""
    query, n_queries, head, n_heads, _, sequence = tile
    dk = src_ne(node, 0, 0)
    for r in range(n_queries * n_heads):
        x = src_data(node, 0) + (query + r // n_heads) * src_nb(node, 0, 1)
        x += (head + r % n_heads) * src_nb(node, 0, 2) + sequence * src_nb(node, 0, 3)
        copy_row(queries + 4 * dk * r, x, 0, dk, ZERO, ZERO, ZERO, ZERO)


@apart
def weigh_block(node: int, tile: Any, places: Any, records: int, first: int, n_keys: int) -> None:
    """Scores and probabilities of a tile's rows for a block whose keys are in their place."""
    stay_apart()
    query, n_queries, head, n_heads, _, sequence = tile
    queries, scores, keys, values, _, _, _ = places
    n_rows, step, n_low = n_queries * n_heads, param_int(node, RECORD), param_int(node, N_HEADS_M0)
    scores_of_block(scores, queries, keys, src_ne(node, 1, 0), n_rows, 0)
    for r in range(n_rows):
        h = head + r % n_heads
        mask = mask_row(node, query + r // n_heads, h, sequence)
        if mask != 0:
            mask += 2 * first
        slope = ONE
        if n_low != 0:
            m0, m1 = float64(param_float(node, 1)), float64(param_float(node, 2))
            slope = float32(alibi_slope(h, n_low, m0, m1))
        row, scale, cap = scores + 4 * BLOCK * r, param_float(node, 0), param_float(node, 3)
        probabilities_of_block(records + step * r, row, mask, n_keys, scale, slope, cap)


def _output_adder(add_in_place: Any) -> Any:
    """Function: the outputs of a block are added to the records of a tile's rows.

    A few rows take the values from where they are (`add_in_place`): to bring them into another
    form would cost more than their use. The sums are the same.
    """
    add_stored = add_staged if add_in_place is None else add_in_place

    @apart
    def add_outputs(
        node: int, tile: Any, places: Any, records: int, v: int, n_keys: int, in_place: bool
    ) -> None:
        stay_apart()
        _, scores, _, values, _, _, _ = places
        step, width = param_int(node, RECORD), padded(src_ne(node, 2, 0))
        sizes = 256 * n_keys + tile[1] * tile[3]
        if in_place:
            add_stored(records, step, scores, v, width, sizes + (src_nb(node, 2, 1) << 32))
        else:
            add_staged(records, step, scores, values, width, sizes + (4 * width << 32))

    return add_outputs


def _attention_kernel(name: str, load_pair: Any, add_in_place: Any) -> None:
    """Sources: q, k, v, mask, sinks. dst: the result, or the records of all segments."""
    add_outputs, can_stay = _output_adder(add_in_place), add_in_place is not None

    @inline
    def attend_segment(node: int, tile: Any, places: Any, records: int, segment: int) -> None:
        """The records of one segment."""
        n_rows, width = tile[1] * tile[3], padded(src_ne(node, 2, 0))
        clear_records(records, param_int(node, RECORD), n_rows, width)
        end = min((segment + 1) * SEGMENT, src_ne(node, 1, 1))
        in_place = can_stay and n_rows <= ROWS and src_ne(node, 2, 0) == width
        for first in range(segment * SEGMENT, end, BLOCK):
            n_keys = min(BLOCK, end - first)
            if sees_block(node, tile, first, n_keys):
                k, v = block_addresses(node, tile, first)
                load_pair(node, places, k, v, n_keys, in_place)
                weigh_block(node, tile, places, records, first, n_keys)
                add_outputs(node, tile, places, records, v, n_keys, in_place)

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        width, step = padded(src_ne(node, 2, 0)), param_int(node, RECORD)
        n_segments, is_split = param_int(node, SEGMENTS), param_int(node, IS_SPLIT) != 0
        tile = tile_of(node, chunk // n_segments if is_split else int64(chunk))
        query, n_queries, head, n_heads, _, sequence = tile
        n_rows = n_queries * n_heads
        places = places_of(node, ith)
        queries, _, _, _, records, merged, _ = places
        copy_queries(node, tile, queries)
        start, end = 0, n_segments
        if is_split:
            start = chunk % n_segments
            end = start + 1
            records = dst_data(node) + (
                int64(chunk) * param_int(node, QUERIES) * param_int(node, HEADS) * step
            )
        else:
            clear_records(merged, step, n_rows, width)
        for segment in range(start, end):
            attend_segment(node, tile, places, records, segment)
            if not is_split:
                for r in range(n_rows):
                    merge_record(merged + step * r, records + step * r, width)
        if not is_split:
            for r in range(n_rows):
                finish_record(
                    node, merged + step * r, query + r // n_heads, head + r % n_heads, sequence
                )

    register_kernel(name, kernel)


for _name in ("f32", "f16"):
    _add = output_operation(STORED[_name], in_place=True)
    _attention_kernel(f"attention_{_name}", _plain_loader(_name), _add)
_attention_kernel("attention_any", _any_loader(), None)


@graph_kernel
def attention_merge(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """The result from the records of all segments; a chunk is a tile.

    Sources: q, k, the records (a piece of plan memory), mask (unused), sinks.
    """
    step, n_segments = param_int(node, RECORD), param_int(node, SEGMENTS)
    most_rows = param_int(node, QUERIES) * param_int(node, HEADS)
    width = (step - HEAD) // 4
    query, n_queries, head, n_heads, _, sequence = tile_of(node, int64(chunk))
    merged = scratch(node, ith)
    for r in range(n_queries * n_heads):
        clear_records(merged, step, 1, width)
        for segment in range(n_segments):
            index = (int64(chunk) * n_segments + segment) * most_rows + r
            merge_record(merged, src_data(node, 2) + index * step, width)
        finish_record(node, merged, query + r // n_heads, head + r % n_heads, sequence)
