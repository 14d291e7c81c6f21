"""The table of fusions: which operations in which order become which step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyggml.backends.cpu.lower_attention import RopeNeighbours, rope_step
from pyggml.backends.cpu.lower_elementwise import glu_step, plain
from pyggml.backends.cpu.lower_rows import WRITTEN
from pyggml.backends.cpu.lowering import PlanContext, Step, Work, find_lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.ops import Op
from pyggml.params import NormParams
from pyggml.tensor import Tensor

# The step of a chain of nodes; None: not for these shapes.
LowerChain = Callable[[Sequence[Tensor], PlanContext], Step | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A chain of operations that one step computes."""

    ops: tuple[Op, ...]
    lower: LowerChain
    kept: int | None = None  # place of a node whose result is stored as well


# ---------------------------------------------------------------- pieces
def _in_line(t: Tensor) -> bool:
    """F32 rows at equal distances."""
    return plain(t) and t.nb[2] == t.ne[1] * t.nb[1] and t.nb[3] == t.ne[2] * t.nb[2]


def _weighted_norm(nodes: Sequence[Tensor]) -> tuple[Tensor | None, float] | None:
    """Weights and eps of RMS_NORM and MUL, of neither if there are no nodes; None: unsuitable."""
    if not nodes:
        return None, 0.0
    norm, mul = nodes
    weights = mul.src[1]
    assert isinstance(norm.params, NormParams) and weights is not None
    if not plain(weights) or weights.ne != (norm.ne[0], 1, 1, 1) or mul.ne != norm.ne:
        return None
    return weights, float(norm.params.eps)


def _with_columns(step: Step, node: Tensor, ctx: PlanContext) -> Step:
    """The step, which leaves the node's rows as columns for products, too."""
    wanted = ctx.wanted.get(node)
    if wanted is None:
        return step
    sources = (*step.sources, *[None] * (5 - len(step.sources)), Work(wanted.nbytes))
    params = (*step.params, *[0] * (4 - len(step.params)), *wanted.params)
    kernel = step.kernel + wanted.kernel.removeprefix("quantize")
    return replace(step, kernel=kernel, sources=sources, params=params)


# ---------------------------------------------------------------- chains
def _lower_norms(nodes: Sequence[Tensor], ctx: PlanContext) -> Step | None:
    """Norms before and after a sum."""
    ops = [node.op for node in nodes]
    at = ops.index(Op.ADD) if Op.ADD in ops else 0
    total = nodes[at] if ops[at] == Op.ADD else None
    first = _weighted_norm(nodes[:at])
    last = _weighted_norm(nodes[at + 1 :] if total is not None else nodes)
    x, dst = nodes[0].src[0], nodes[-1]
    addend = total.src[1] if total is not None else None
    operands = [t for t in (x, addend, total, dst) if t is not None]
    if first is None or last is None or x is None:
        return None
    if not all(_in_line(t) and t.ne == x.ne for t in operands):
        return None
    kept = None if total is dst else total
    sources = (x, first[0], addend, last[0], kept)
    chunks, row = row_chunks(ctx, dst.nrows, 5 * dst.ne[0]), 4 * dst.ne[0]
    step = Step("norms", chunks, dst, sources, (first[1], last[1]), scratch=row)
    return _with_columns(step, dst, ctx)


def _lower_rope(nodes: Sequence[Tensor], ctx: PlanContext) -> Step | None:
    """A norm of the heads before, the rows of a cache as the target."""
    at = [node.op for node in nodes].index(Op.ROPE)
    rope, dst, a = nodes[at], nodes[-1], nodes[0].src[0]
    norm = _weighted_norm(nodes[:at])
    if norm is None or not plain(rope, a) or find_lowering(rope) is None:
        return None
    if a is None or a.ne != rope.ne:
        return None
    together = RopeNeighbours("rope_f32", rope, a, None, *norm)
    if dst is not rope:
        rows, ids = dst.src[:2]
        assert rows is not None and ids is not None
        per_token = (rope.ne[0] * rope.ne[1], rope.ne[2] * rope.ne[3], 1, 1)
        if rows.ne != per_token or ids.ne != (rows.ne[1], 1, 1, 1):
            return None
        if dst.type not in WRITTEN or not dst.has_contiguous_rows:
            return None
        kernel = f"rope_set_rows_{dst.type.name.lower()}"
        together = replace(together, kernel=kernel, dst=dst, ids=ids)
    return rope_step(rope, ctx, together)


def _lower_glu(nodes: Sequence[Tensor], ctx: PlanContext) -> Step | None:
    """Gated activations that products take."""
    (node,) = nodes
    if node not in ctx.wanted or not plain(node, node.src[0]):
        return None
    return _with_columns(glu_step(node, ctx), node, ctx)


_NORM = (Op.RMS_NORM, Op.MUL)
# Longer chains first.
PATTERNS = (
    Pattern((*_NORM, Op.ADD, *_NORM), _lower_norms, kept=2),
    Pattern((Op.ADD, *_NORM), _lower_norms, kept=0),
    Pattern((*_NORM, Op.ROPE, Op.SET_ROWS), _lower_rope),
    Pattern((*_NORM, Op.ROPE), _lower_rope),
    Pattern((*_NORM, Op.ADD), _lower_norms),
    Pattern(_NORM, _lower_norms),
    Pattern((Op.ROPE, Op.SET_ROWS), _lower_rope),
    Pattern((Op.GLU,), _lower_glu),
)
