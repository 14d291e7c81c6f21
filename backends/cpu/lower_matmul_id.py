"""MUL_MAT_ID: sort the columns by expert, then multiply expert by expert."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.lower_matmul import F32, FLOATS, Steps, blocks_per_column, widened
from pyggml.backends.cpu.lowering import PlanContext, Step, Work, lowering
from pyggml.backends.cpu.panels import (
    GROUP,
    LAYOUTS,
    ROUTE_EXPERT_BYTES,
    ROUTE_HEAD_BYTES,
    ROWS,
)
from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.tensor import Tensor

# Columns per expert, on average, from which on they are computed in groups.
GROUPED_FROM = 2


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


def _positions(n_columns: int, n_experts: int, group: int) -> int:
    """Most positions that a route can have: every expert in use may need padding."""
    return n_columns + (group - 1) * min(n_experts, n_columns)


def _route(ctx: PlanContext, ids: Tensor, n_experts: int, group: int) -> Steps:
    key = ("route", n_experts, group)
    route = ctx.quantized(ids, key)
    if route is None:
        n_positions = _positions(ids.ne[0] * ids.ne[1], n_experts, group)
        counters = ROUTE_HEAD_BYTES + ROUTE_EXPERT_BYTES * n_experts + 8 * n_positions
        route = ctx.work(counters + 8 * n_experts)
        yield Step("route_experts", 1, route, (ids,), (n_experts, group, counters))
        ctx.keep_quantized(ids, key, route)
    return route


@lowering(Op.MUL_MAT_ID, supports_quantized_experts)
def lower_quantized_experts(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Activations are quantized in the order of the experts that take them."""
    weights, x, ids = _operands(node)
    panel = LAYOUTS[weights.type]
    k, rows, n_experts = weights.ne[:3]
    n_used, n_columns = ids.ne[0], ids.ne[0] * ids.ne[1]
    group = GROUP if n_columns >= GROUPED_FROM * n_experts else 1
    route = yield from _route(ctx, ids, n_experts, group)
    form, blocks = panel.activations, blocks_per_column(panel, k)
    n_positions = _positions(n_columns, n_experts, group)
    key = (form, route)
    work = ctx.quantized(x, key)
    if work is None:
        source = yield from widened(ctx, x)
        work = ctx.work(n_positions * blocks * form.nbytes)
        params = (n_columns, 1, group, blocks, 0, form.zero, n_used, x.ne[1])
        yield Step(form.kernel, ctx.chunks(n_positions), work, (source, route), params)
        ctx.keep_quantized(x, key, work)
    repacked = is_repacked(weights)
    params = (
        rows,
        n_used,
        panel.units(k),
        group,
        panel.matrix_bytes(k, rows) if repacked else weights.nb[2],
        blocks * form.nbytes,
        k // weights.type.block_size,
        0 if repacked else 1,
    )
    n_items = -(-rows // ROWS) * min(n_experts, n_columns)
    yield Step(
        f"mul_mat_id_{weights.type.name.lower()}",
        ctx.chunks(n_items, per_thread=16),
        node,
        (weights, work, route),
        params,
        scratch=GROUP * 64 + panel.panel_bytes(k),
    )


@lowering(Op.MUL_MAT_ID, supports_float_experts)
def lower_float_experts(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Columns are read where they are, one by one."""
    weights, x, ids = _operands(node)
    k, rows, n_experts = weights.ne[:3]
    route = yield from _route(ctx, ids, n_experts, 1)
    source: Tensor | Work = yield from widened(ctx, x)
    n_items = -(-rows // 8) * min(n_experts, ids.ne[0] * ids.ne[1])
    yield Step(
        f"mul_mat_id_{weights.type.name.lower()}",
        ctx.chunks(n_items, per_thread=16),
        node,
        (weights, source, route),
        (rows, ids.ne[0], k, x.ne[1]),
    )
