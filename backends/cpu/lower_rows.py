"""Lowerings of operations on rows: norms, gather, scatter, copies, sorting."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.backends.cpu.lower_elementwise import TRANSCENDENTAL, plain
from pyggml.backends.cpu.lowering import PlanContext, Step, lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.dtypes import GGMLType
from pyggml.formulas import alibi_slopes
from pyggml.ops import Op
from pyggml.params import ConcatParams, NormParams, SoftMaxParams, SortParams
from pyggml.tensor import Shape, Tensor, dense_strides

T = GGMLType


def _plain_node(node: Tensor) -> bool:
    return plain(node, node.src[0])


# ---------------------------------------------------------------- norms and sums
NORMS = {Op.NORM: "norm", Op.RMS_NORM: "rms_norm", Op.L2_NORM: "l2_norm"}


def _lower_norm(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, NormParams)
    chunks = row_chunks(ctx, node.nrows, 2 * node.ne[0])
    yield Step(NORMS[node.op], chunks, node, (node.src[0],), (float(node.params.eps),))


for _op in NORMS:
    lowering(_op, _plain_node)(_lower_norm)


@lowering(Op.SUM_ROWS, _plain_node)
def lower_sum_rows(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    a = node.src[0]
    assert a is not None
    yield Step("sum_rows", row_chunks(ctx, node.nrows, a.ne[0]), node, (a,))


# ---------------------------------------------------------------- softmax
def alibi_params(n_head: int, max_bias: float) -> tuple[float, float, int]:
    """m0, m1 and how many heads use m0; 0 heads: no slopes."""
    if max_bias <= 0:
        return 1.0, 1.0, 0
    n_low = 1 << (n_head.bit_length() - 1)
    # the first slope is m0 itself; the first beyond n_low is m1
    slopes = alibi_slopes(n_low + 1, max_bias)
    return slopes[0], slopes[n_low], n_low


def _soft_max(node: Tensor) -> bool:
    mask = node.src[1] if len(node.src) > 1 else None
    return _plain_node(node) and (mask is None or mask.type in (T.F32, T.F16))


@lowering(Op.SOFT_MAX, _soft_max)
def lower_soft_max(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    params = node.params
    assert isinstance(params, SoftMaxParams)
    a, mask, sinks = (*node.src, None, None)[:3]
    suffix = "" if mask is None else f"_{mask.type.name.lower()}"
    chunks = row_chunks(ctx, node.nrows, TRANSCENDENTAL * node.ne[0])
    numbers = (float(params.scale), *alibi_params(node.ne[2], params.max_bias))
    yield Step(f"soft_max{suffix}", chunks, node, (a, mask, sinks), numbers)


# ---------------------------------------------------------------- gather and scatter
PLAIN_ROWS = {T.F32: "f32", T.F16: "f16", T.BF16: "bf16", T.I32: "f32"}  # I32 as bits
BLOCK_ROWS = (
    *(T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL),
    *(T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS),
    *(T.Q1_0, T.Q2_0, T.TQ1_0, T.TQ2_0, T.MXFP4, T.NVFP4),
    *(T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S),
)


def _get_rows(node: Tensor) -> bool:
    a, ids = node.src[:2]
    assert a is not None and ids is not None
    known = a.type in PLAIN_ROWS or a.type in BLOCK_ROWS
    return known and ids.type == T.I32 and a.has_contiguous_rows and node.has_contiguous_rows


@lowering(Op.GET_ROWS, _get_rows)
def lower_get_rows(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    a, ids = node.src[:2]
    assert a is not None
    kind = PLAIN_ROWS.get(a.type) or a.type.name.lower()
    yield Step(f"get_rows_{kind}", row_chunks(ctx, node.nrows, node.ne[0]), node, (a, ids))


def _add_id(node: Tensor) -> bool:
    ids = node.src[2]
    return plain(node, *node.src[:2]) and ids is not None and ids.type == T.I32


@lowering(Op.ADD_ID, _add_id)
def lower_add_id(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    a, b, ids = node.src[:3]
    yield Step("add_id", row_chunks(ctx, node.nrows, node.ne[0]), node, (a, ids, b))


# Types that the backend can quantize to while it computes.
BLOCK_WRITES = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL)
WRITTEN = (T.F32, T.F16, T.BF16, *BLOCK_WRITES)


def _set_rows(node: Tensor) -> bool:
    return plain(node.src[0]) and node.type in WRITTEN and node.has_contiguous_rows


@lowering(Op.SET_ROWS, _set_rows)
def lower_set_rows(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    b, ids = node.src[:2]
    assert b is not None and ids is not None
    kind, params = node.type.name.lower(), (ids.type.type_size,)
    single = b.ne[0] == 1 and b.ne[2] == b.ne[3] == 1 and b.nb[1] == 4
    if single:
        chunks = row_chunks(ctx, b.ne[1], 2)
        yield Step(f"set_elements_{kind}", chunks, node, (b, ids), params, scratch=4096)
    else:
        chunks = row_chunks(ctx, b.nrows, 2 * b.ne[0])
        yield Step(f"set_rows_{kind}", chunks, node, (b, ids), params)


# ---------------------------------------------------------------- copies
NAMES = {T.F32: "f32", T.F16: "f16", T.BF16: "bf16", T.I32: "i32"}
# collect.. and spread.. pieces of rows with gaps (kernels/copies.py)
COPY_SCRATCH = 2 * 4 * 1024


def window(
    t: Tensor, ne: Shape, nb: Shape, offset: int = 0, type: GGMLType | None = None
) -> Tensor:
    """A tensor's memory seen with another shape; only for a plan's operands."""
    w = Tensor(type or t.type, ne, nb)
    # a plan that is only asked for its kernels has no addresses
    w.data = None if t.data is None else t.data + offset
    return w


def copy_kernel(source: GGMLType, target: GGMLType) -> str | None:
    """Name of the kernel that converts elements; None: there is none."""
    if source == target:
        return f"copy_{source.type_size}" if source in NAMES else None
    quantized_source = source in BLOCK_ROWS and target == T.F32
    if quantized_source or (source == T.F32 and target in BLOCK_WRITES):
        return f"copy_{source.name.lower()}_{target.name.lower()}"
    if source not in NAMES or target not in NAMES:
        return None
    if T.I32 in (source, target) and T.F32 not in (source, target):
        return None
    return f"copy_{NAMES[source]}_{NAMES[target]}"


def _movable(t: Tensor) -> bool:
    """Quantized rows whose bytes can be moved in pairs."""
    return t.type.is_quantized and t.has_contiguous_rows and t.type.type_size % 2 == 0


def _copy(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    if a.type == node.type and _movable(a) and _movable(node):
        return a.ne == node.ne
    if a.type.is_quantized or node.type.is_quantized:
        rows = a.ne == node.ne and a.has_contiguous_rows and node.has_contiguous_rows
        return rows and copy_kernel(a.type, node.type) is not None
    same_order = a.ne == node.ne or a.is_contiguous or node.is_contiguous
    return same_order and copy_kernel(a.type, node.type) is not None


def copy_step(ctx: PlanContext, target: Tensor, source: Tensor) -> Step:
    kernel = copy_kernel(source.type, target.type)
    assert kernel is not None
    chunks = row_chunks(ctx, target.nrows, target.ne[0])
    return Step(kernel, chunks, target, (source,), scratch=COPY_SCRATCH)


def _pairs(t: Tensor) -> Tensor:
    """Quantized rows as rows of two-byte elements."""
    return window(t, (t.type.row_size(t.ne[0]) // 2, *t.ne[1:]), (2, *t.nb[1:]), type=T.F16)


def _lower_copy(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Elements in logical order; one of two different shapes must be packed."""
    a, target = node.src[0], node
    assert a is not None
    if a.type == target.type and a.type.is_quantized:
        a, target = _pairs(a), _pairs(target)
    elif a.ne != target.ne and target.is_contiguous:
        target = window(target, a.ne, dense_strides(target.type, a.ne))
    elif a.ne != target.ne:
        a = window(a, target.ne, dense_strides(a.type, target.ne))
    yield copy_step(ctx, target, a)


for _op in (Op.CPY, Op.CONT, Op.DUP):
    lowering(_op, _copy)(_lower_copy)


def _same_kind(node: Tensor) -> bool:
    return node.type in NAMES


@lowering(Op.REPEAT, _same_kind)
def lower_repeat(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    a = node.src[0]
    assert a is not None
    yield copy_step(ctx, node, a)


@lowering(Op.CONCAT, _same_kind)
def lower_concat(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """Two copies into windows of the result."""
    assert isinstance(node.params, ConcatParams)
    dim, offset = node.params.dim, 0
    for part in node.src[:2]:
        assert part is not None
        if not part.is_empty:
            yield copy_step(ctx, window(node, part.ne, node.nb, offset), part)
        offset += part.ne[dim] * node.nb[dim]


# ---------------------------------------------------------------- sorting
def _sortable(node: Tensor) -> bool:
    return plain(node.src[0]) and node.has_contiguous_rows


def _lower_sort(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    """TOP_K is a sort that keeps the first few."""
    a = node.src[0]
    assert a is not None
    descending = not isinstance(node.params, SortParams) or node.params.descending
    cost = 4 * a.ne[0] * a.ne[0].bit_length()
    chunks = row_chunks(ctx, node.nrows, cost)
    yield Step("argsort", chunks, node, (a,), (int(descending),), scratch=12 * a.ne[0] + 64)


for _op in (Op.ARGSORT, Op.TOP_K):
    lowering(_op, _sortable)(_lower_sort)
