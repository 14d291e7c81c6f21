"""MUL_MAT_ID and MUL_MAT_ID_COLD: sort the columns by expert, then multiply expert by expert.

So the weights of an expert in use are read once, however many columns it has, and the threads
share the rows of all experts in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.lower_matmul import (
    BLOCK_BYTES,
    F32,
    FLOATS,
    Columns,
    Steps,
    blocks_per_column,
    packed_row,
    quantized_columns,
    rows_at_once,
    wanted,
    widened,
)
from pyggml.backends.cpu.lower_rows import copy_step
from pyggml.backends.cpu.lowering import PlanContext, Step, WantedColumns, Work, lowering
from pyggml.backends.cpu.panels import (
    FLOAT_GROUP,
    FLOAT_ROWS,
    FLOAT_SUMS,
    GROUP,
    LAYOUTS,
    LISTED_BYTES,
    ROUTE_EXPERT_BYTES,
    ROUTE_HEAD_BYTES,
    ROWS,
    ActivationFormat,
    PanelLayout,
)
from pyggml.dtypes import GGMLType
from pyggml.ops import INTO, Op
from pyggml.tensor import Tensor

# Columns per expert, on average, from which on they are computed in groups.
GROUPED_FROM = 2
# Chunks per thread: many where experts can have very different numbers of columns.
CHUNKS, GROUPED_CHUNKS = 16, 64


def _operands(node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, x, ids = node.src[:3]
    assert weights is not None and x is not None and ids is not None
    return weights, x, ids


def _usual(node: Tensor) -> bool:
    weights, x, ids = _operands(node)
    return (
        node.type == F32
        and node.has_contiguous_rows
        and x.type in (F32, GGMLType.F16)
        and x.has_contiguous_rows
        and weights.has_contiguous_rows
        and ids.type == GGMLType.I32
    )


def supports_quantized_experts(node: Tensor) -> bool:
    """Weights with a panel layout, in panels or as rows."""
    weights = _operands(node)[0]
    known = weights.type in LAYOUTS and weights.ne[0] % weights.type.block_size == 0
    return known and _usual(node)


def supports_float_experts(node: Tensor) -> bool:
    """F32, F16 and BF16 weights."""
    return _operands(node)[0].type in FLOATS and _usual(node)


def _chunks(ctx: PlanContext, node: Tensor, n_items: int, grouped: bool) -> int:
    """How many chunks to cut the rows of all experts in use into."""
    weights, _, ids = _operands(node)
    if ids.ne[1] == 1:  # each has one column
        return ctx.chunks(n_items, nbytes=weights.nb[2] * ids.ne[0])
    return ctx.chunks(n_items, per_thread=GROUPED_CHUNKS if grouped else CHUNKS)


def _positions(n_columns: int, n_experts: int, group: int) -> int:
    """Most positions that a route can have: every expert in use may need padding."""
    return n_columns + (group - 1) * min(n_experts, n_columns)


def _route(ctx: PlanContext, node: Tensor, group: int) -> Steps:
    """Which columns go to which expert; shared by products of the same ids and marks."""
    weights, _, ids = _operands(node)
    cold = node.src[3] if node.op == Op.MUL_MAT_ID_COLD else None
    n_experts = weights.ne[2]
    key = ("route", n_experts, group, cold)
    route = ctx.quantized(ids, key)
    if route is not None and (cold is None or ctx.quantized(cold, route) is route):
        return route
    n_positions = _positions(ids.ne[0] * ids.ne[1], n_experts, group)
    counters = ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * n_experts + 8 * n_positions
    route = ctx.work(counters + 8 * n_experts)
    yield Step("route_experts", 1, route, (ids, cold), (n_experts, group, counters))
    ctx.keep_quantized(ids, key, route)
    if cold is not None:  # whoever writes to it makes the route useless, too
        ctx.keep_quantized(cold, route, route)
    return route


def _continued(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Copy the tensor to continue, unless the result has taken over its memory."""
    for into in node.src[INTO[node.op] :]:
        assert into is not None
        # a plan that is only asked for its kernels has no addresses
        if into.data is None or into.data != node.data:
            yield copy_step(ctx, node, into)


@dataclass(frozen=True, slots=True)
class _Columns:
    """How the columns of a node's activations are quantized."""

    n_used: int
    per_token: int  # columns; several slots of a token share one if there are fewer than n_used
    positions: int  # most that the route can have
    group: int
    blocks: int  # per column
    form: ActivationFormat

    @property
    def at_once(self) -> int:
        """Columns whose activations fit BLOCK_BYTES; a multiple of the group."""
        nbytes = max(1, GROUP * self.blocks * self.form.nbytes)
        return max(1, BLOCK_BYTES // nbytes) * GROUP

    @property
    def shared(self) -> bool:
        return self.per_token < self.n_used

    def single(self, x: Tensor) -> Columns:
        """All columns of the activations, one after the other."""
        return Columns(x.ne[1] * x.ne[2], 1, 1, self.blocks, self.form.nbytes)


def _columns(node: Tensor, panel: PanelLayout) -> _Columns:
    weights, x, ids = _operands(node)
    k, _, n_experts = weights.ne[:3]
    n_used, n = ids.ne[0], ids.ne[0] * ids.ne[1]
    group = GROUP if n >= GROUPED_FROM * n_experts else 1
    positions, blocks = _positions(n, n_experts, group), blocks_per_column(panel, k)
    return _Columns(n_used, x.ne[1], positions, group, blocks, panel.activations)


def _quantized(ctx: PlanContext, x: Tensor, route: Work, columns: _Columns) -> Steps:
    """Each column once: where it is if no groups are wanted, else in the order of the experts that
    take it."""
    c = columns
    if c.group == 1:
        return (yield from quantized_columns(ctx, x, c.form, c.single(x)))
    key = (c.form, route)
    work = ctx.quantized(x, key)
    if work is not None:
        return work
    chunks, nbytes = ctx.chunks(c.positions), c.positions * c.blocks * c.form.nbytes
    if c.shared:
        source: Tensor | Work = yield from quantized_columns(ctx, x, c.form, c.single(x))
        kernel = "gather_columns"
        params: tuple[int, ...] = (c.n_used, c.per_token, c.group, c.blocks, c.form.nbytes)
    else:
        source = yield from widened(ctx, x)
        kernel = c.form.kernel
        params = (x.ne[1] * x.ne[2], 1, c.group, c.blocks, 0, c.form.zero, c.n_used, c.per_token)
    work = ctx.work(nbytes)
    yield Step(kernel, chunks, work, (source, route), params)
    ctx.keep_quantized(x, key, work)
    return work


def wanted_expert_columns(node: Tensor) -> WantedColumns | None:
    """What a quantized product with few columns per expert wants of them."""
    weights, x, _ = _operands(node)
    if weights.type not in LAYOUTS or x.type != F32 or not supports_quantized_experts(node):
        return None
    columns = _columns(node, LAYOUTS[weights.type])
    if columns.group != 1:
        return None
    return wanted(columns.single(x), columns.form)


@lowering(Op.MUL_MAT_ID_COLD, supports_quantized_experts)
@lowering(Op.MUL_MAT_ID, supports_quantized_experts)
def lower_quantized_experts(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Route, quantize the activations, unless that was done already, and multiply."""
    weights, x, ids = _operands(node)
    panel = LAYOUTS[weights.type]
    k, rows, n_experts = weights.ne[:3]
    columns = _columns(node, panel)
    yield from _continued(node, ctx)
    route = yield from _route(ctx, node, columns.group)
    work = yield from _quantized(ctx, x, route, columns)
    repacked, n = is_repacked(weights), ids.ne[0] * ids.ne[1]
    params = (
        rows,
        columns.n_used,
        panel.units(k),
        columns.group,
        panel.matrix_bytes(k, rows) if repacked else weights.nb[2],
        columns.blocks * columns.form.nbytes,
        k // weights.type.block_size,
        0 if repacked else 1,
        columns.per_token if columns.group == 1 else 0,
        columns.at_once if repacked else n,  # pack each panel once
    )
    n_items = -(-rows // ROWS) * min(n_experts, n)
    yield Step(
        f"mul_mat_id_{weights.type.name.lower()}",
        _chunks(ctx, node, n_items, columns.group != 1),
        node,
        (weights, work, route),
        params,
        scratch=GROUP * 4 * ROWS + panel.panel_bytes(k) + LISTED_BYTES * n,
    )


def _packed(
    ctx: PlanContext, x: Tensor, source: Tensor | Work, route: Work, n_used: int, positions: int
) -> Steps:
    """Columns in groups, in the order of the experts that take them."""
    key = ("packed", route)
    work = ctx.quantized(x, key)
    if work is None:
        work = ctx.work(positions * packed_row(x.ne[0]))
        params = (0, 1, 0, n_used, x.ne[1])
        yield Step("pack_columns", ctx.chunks(positions), work, (source, route), params)
        ctx.keep_quantized(x, key, work)
    return work


@lowering(Op.MUL_MAT_ID_COLD, supports_float_experts)
@lowering(Op.MUL_MAT_ID, supports_float_experts)
def lower_float_experts(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Few columns per expert are read where they are, many are packed into groups first."""
    weights, x, ids = _operands(node)
    k, rows, n_experts = weights.ne[:3]
    n_used, n = ids.ne[0], ids.ne[0] * ids.ne[1]
    group = FLOAT_GROUP if n >= GROUPED_FROM * n_experts else 1
    yield from _continued(node, ctx)
    route = yield from _route(ctx, node, group)
    source: Tensor | Work = yield from widened(ctx, x)
    packed: Work | None = None
    if group != 1:
        positions = _positions(n, n_experts, group)
        packed = yield from _packed(ctx, x, source, route, n_used, positions)
    column_bytes = 0 if packed is None else packed_row(k)
    n_items = -(-rows // 8) * min(n_experts, n)
    yield Step(
        f"mul_mat_id_{weights.type.name.lower()}",
        _chunks(ctx, node, n_items, packed is not None),
        node,
        (weights, source, route, packed),
        (rows, n_used, k, x.ne[1], column_bytes, rows_at_once(weights)),
        scratch=FLOAT_SUMS + 4 * FLOAT_ROWS * FLOAT_GROUP + LISTED_BYTES * n,
    )
