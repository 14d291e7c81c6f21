"""Lowerings of rotary positions and attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyggml.backends.cpu.attention import BLOCK, HEAD, KINDS, SEGMENT
from pyggml.backends.cpu.lower_rows import alibi_params
from pyggml.backends.cpu.lowering import PlanContext, Step, lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.dtypes import GGMLType
from pyggml.formulas import rope_magnitude, rope_ramp, rope_theta_scale
from pyggml.ops import Op, RopeMode
from pyggml.params import FlashAttnParams, RopeParams
from pyggml.tensor import Tensor

T = GGMLType

# ---------------------------------------------------------------- rope
# Modes as kernels/rope.py numbers them: how a pair finds its position.
POSITIONS = {RopeMode.MROPE: 1, RopeMode.IMROPE: 2, RopeMode.VISION: 3}


def _rope(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    rows = a.has_contiguous_rows and node.has_contiguous_rows
    return node.type in (T.F32, T.F16) and a.type == node.type and rows


def rope_gap(params: RopeParams) -> tuple[int, int]:
    """Pairs, and the distance between the two channels of a pair."""
    if params.mode == RopeMode.VISION:
        return params.n_dims, params.n_dims
    half = params.n_dims // 2
    return half, 1 if params.mode == RopeMode.NORMAL else half


@lowering(Op.ROPE, _rope)
def lower_rope(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    yield rope_step(node, ctx, RopeNeighbours(f"rope_{node.type.name.lower()}", node, node.src[0]))


@dataclass(frozen=True, slots=True)
class RopeNeighbours:
    """What is computed together with a ROPE."""

    kernel: str
    dst: Tensor
    a: Tensor | None
    ids: Tensor | None = None  # rows of dst that take the tokens
    weights: Tensor | None = None  # of a norm of the heads of a
    eps: float = 0.0


def rope_step(node: Tensor, ctx: PlanContext, fused: RopeNeighbours) -> Step:
    """The step of a ROPE node and its neighbours."""
    params = node.params
    assert isinstance(params, RopeParams)
    n_pairs, gap = rope_gap(params)
    floats = (
        rope_theta_scale(params),
        float(params.freq_scale),
        float(params.ext_factor),
        *rope_ramp(params),
        rope_magnitude(params),
    )
    mode = POSITIONS.get(params.mode, 0)
    ints = (n_pairs, mode, *params.sections, gap, params.n_offs)
    _, positions, factors = (*node.src, None)[:3]
    chunks = row_chunks(ctx, node.ne[2] * node.ne[3], node.ne[0] * (2 * node.ne[1] + 16))
    sources = (fused.a, positions, factors, fused.ids, fused.weights)
    id_bytes = fused.ids.type.type_size if fused.ids is not None else 0
    scratch = 8 * n_pairs + 4 * node.ne[0] * (1 + node.ne[1])
    numbers = (*floats, *ints, id_bytes, fused.eps)
    return Step(fused.kernel, chunks, fused.dst, sources, numbers, scratch)


# ---------------------------------------------------------------- attention
LANES = 16  # output rows are padded to whole vectors of any CPU
TILE_ROWS = 96
TILE_BYTES = 384 << 10  # what a tile may take of the second-level cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """How attention is cut: rows that pass over the keys together, and segments of keys."""

    queries: int  # per tile
    heads: int  # per tile, of those that share keys
    count: int
    segments: int
    is_split: bool  # whether segments are chunks of their own
    record: int  # bytes
    scratch: int  # bytes


def plan_tiles(node: Tensor, n_threads: int) -> Tiles:
    """Large tiles for many queries; for few, enough pieces for all threads."""
    q, k, v = node.src[:3]
    assert q is not None and k is not None and v is not None
    dk, n_batch, n_head, n_seq = q.ne
    group, n_kv = n_head // k.ne[2], k.ne[1]
    padded = -(-v.ne[0] // LANES) * LANES
    record = HEAD + 4 * padded
    row_bytes = 4 * (dk + BLOCK) + 2 * record
    block_bytes = 4 * BLOCK * (dk + padded)
    most = max(4, min(TILE_ROWS, (TILE_BYTES - block_bytes) // row_bytes))
    heads = min(group, most)
    queries = min(n_batch, max(1, most // heads))
    segments = -(-n_kv // SEGMENT)

    def count(heads: int, queries: int) -> int:
        return k.ne[2] * -(-group // heads) * n_seq * -(-n_batch // queries)

    is_split = segments > 1 and count(heads, queries) < 2 * n_threads
    pieces = count(heads, queries) * (segments if is_split else 1)
    while pieces < n_threads and heads > 1:  # rows are independent: any cut gives the same bits
        heads = -(-heads // 2)
        pieces = count(heads, queries) * (segments if is_split else 1)
    staged = 4 * BLOCK * dk  # keys of other types become float32 rows first
    scratch = block_bytes + row_bytes * heads * queries + staged
    tiles = count(heads, queries)
    return Tiles(queries, heads, tiles, segments, is_split, record, scratch)


def _flash(node: Tensor) -> bool:
    q, k, v = node.src[:3]
    assert q is not None and k is not None and v is not None
    return (
        q.type == node.type == T.F32
        and {k.type, v.type} <= set(KINDS)
        and k.ne[0] % 8 == v.ne[0] % 8 == 0
        and all(t.has_contiguous_rows for t in (q, k, v, node))
    )


@lowering(Op.FLASH_ATTN_EXT, _flash)
def lower_flash(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    params = node.params
    assert isinstance(params, FlashAttnParams)
    q, k, v, mask, sinks = (*node.src, None, None)[:5]
    assert k is not None and v is not None
    tiles = plan_tiles(node, ctx.n_threads)
    m0, m1, n_low = alibi_params(node.ne[1], params.max_bias)
    cap = float(params.logit_softcap)
    scale = params.scale / cap if cap else params.scale
    split = int(tiles.is_split)
    numbers = (
        *(float(scale), m0, m1, cap, n_low),
        *(tiles.queries, tiles.heads, tiles.segments, split, tiles.record),
        *(KINDS.index(k.type), KINDS.index(v.type)),
        *(k.type.row_size(k.ne[0]), v.type.row_size(v.ne[0])),
    )
    direct = k.type == v.type and k.type in (T.F32, T.F16)
    kernel = f"attention_{k.type.name.lower()}" if direct else "attention_any"
    if not tiles.is_split:
        yield Step(kernel, tiles.count, node, (q, k, v, mask, sinks), numbers, tiles.scratch)
        return
    pieces = tiles.count * tiles.segments
    records = ctx.work(pieces * tiles.queries * tiles.heads * tiles.record)
    yield Step(kernel, pieces, records, (q, k, v, mask, sinks), numbers, tiles.scratch)
    sources = (q, k, records, mask, sinks)
    yield Step("attention_merge", tiles.count, node, sources, numbers, tiles.record)
