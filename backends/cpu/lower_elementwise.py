"""Lowerings of functions of single elements: F32, contiguous rows, any strides between them."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.backends.cpu.lowering import PlanContext, Step, lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.dtypes import GGMLType
from pyggml.ops import GluOp, Op, UnaryOp
from pyggml.params import ClampParams, FillParams, GluParams, ScaleParams, UnaryParams
from pyggml.tensor import Tensor

# What a function costs, in additions.
TRANSCENDENTAL = 8
_CHEAP = (UnaryOp.ABS, UnaryOp.SGN, UnaryOp.NEG, UnaryOp.STEP, UnaryOp.RELU)


def plain(*tensors: Tensor | None) -> bool:
    """F32 with contiguous rows."""
    return all(
        t is not None and t.type == GGMLType.F32 and (t.nb[0] == 4 or t.ne[0] == 1) for t in tensors
    )


def _plain_node(node: Tensor) -> bool:
    return plain(node, node.src[0])


# ---------------------------------------------------------------- two operands
BINARY = {Op.ADD: "add", Op.SUB: "sub", Op.MUL: "mul", Op.DIV: "div"}


def _plain_binary(node: Tensor) -> bool:
    return plain(node, *node.src[:2])


def _lower_binary(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    a, b = node.src[:2]
    yield Step(BINARY[node.op], row_chunks(ctx, node.nrows, node.ne[0]), node, (a, b))


for _op in BINARY:
    lowering(_op, _plain_binary)(_lower_binary)


# ---------------------------------------------------------------- one operand
def _map(
    kernel: str, node: Tensor, ctx: PlanContext, params: tuple[float, ...] = (), cost: int = 1
) -> Step:
    chunks = row_chunks(ctx, node.nrows, cost * node.ne[0])
    return Step(kernel, chunks, node, (node.src[0],), params)


@lowering(Op.SCALE, _plain_node)
def lower_scale(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, ScaleParams)
    yield _map("scale", node, ctx, (float(node.params.scale), float(node.params.bias)))


@lowering(Op.CLAMP, _plain_node)
def lower_clamp(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, ClampParams)
    yield _map("clamp", node, ctx, (float(node.params.low), float(node.params.high)))


@lowering(Op.FILL, plain)
def lower_fill(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, FillParams)
    yield _map("fill", node, ctx, (float(node.params.value),))


@lowering(Op.SQR, _plain_node)
def lower_sqr(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    yield _map("sqr", node, ctx)


@lowering(Op.SQRT, _plain_node)
def lower_sqrt(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    yield _map("sqrt", node, ctx)


@lowering(Op.UNARY, _plain_node)
def lower_unary(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, UnaryParams)
    op = node.params.op
    constants = tuple(map(float, node.params.xielu)) if op == UnaryOp.XIELU else ()
    cost = 1 if op in _CHEAP else TRANSCENDENTAL
    yield _map(f"unary_{op.name.lower()}", node, ctx, constants, cost)


# ---------------------------------------------------------------- gated activations
@lowering(Op.GLU, _plain_node)
def lower_glu(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    yield glu_step(node, ctx)


def glu_step(node: Tensor, ctx: PlanContext) -> Step:
    """Gate and up are two tensors, or the halves of one tensor's rows."""
    params = node.params
    assert isinstance(params, GluParams)
    gate, up = node.src[0], node.src[1] if len(node.src) > 1 else None
    half = 4 * node.ne[0]
    offsets = (0, 0) if up is not None else (half, 0) if params.swapped else (0, half)
    cost = 1 if params.op == GluOp.REGLU else TRANSCENDENTAL
    return Step(
        f"glu_{params.op.name.lower()}",
        row_chunks(ctx, node.nrows, cost * node.ne[0]),
        node,
        (gate, gate if up is None else up),
        (float(params.alpha), float(params.limit), *offsets),
    )
