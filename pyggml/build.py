"""Graph-building functions, the vocabulary of model code: they describe, and allocate nothing.

Names, shapes and operand order are ggml's. Shapes in comments are in ggml's order.
"""

from pyggml import params as p
from pyggml.dtypes import GGMLType
from pyggml.ops import INTO, GluOp, Op, Precision, RopeMode, UnaryOp
from pyggml.tensor import Shape, Tensor, dense_strides, padded

F32 = GGMLType.F32
I32 = GGMLType.I32


class ShapeError(ValueError):
    """Operands whose shapes or types an operation cannot combine."""


def _check(ok: bool, op: Op, *tensors: Tensor | None) -> None:
    if not ok:
        shapes = ", ".join(repr(t) for t in tensors if t is not None)
        raise ShapeError(f"{op.name} cannot combine {shapes}")


def _view_of(a: Tensor, ne: Shape, nb: Shape, op: Op, src: tuple[Tensor | None, ...]) -> Tensor:
    """A result that lives in a's memory; a view of a view is collapsed to its root."""
    t = Tensor(a.type, ne, nb, op=op, src=src)
    t.view_src = a.view_src or a
    t.view_offs = a.view_offs
    if t.view_src.data is not None:
        t.data = t.view_src.data + t.view_offs
    return t


# ---------------------------------------------------------------- element-wise
def _binary(op: Op, a: Tensor, b: Tensor) -> Tensor:
    _check(b.can_repeat_to(a), op, a, b)
    return Tensor(a.type, a.ne, op=op, src=(a, b))


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, b tiled to a's shape."""
    return _binary(Op.ADD, a, b)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b, b tiled to a's shape."""
    return _binary(Op.SUB, a, b)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b, b tiled to a's shape."""
    return _binary(Op.MUL, a, b)


def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b, b tiled to a's shape."""
    return _binary(Op.DIV, a, b)


def scale(a: Tensor, s: float, bias: float = 0.0) -> Tensor:
    """a * s + bias."""
    return Tensor(a.type, a.ne, op=Op.SCALE, src=(a,), params=p.ScaleParams(s, bias))


def clamp(a: Tensor, low: float, high: float) -> Tensor:
    """a limited to [low, high]."""
    return Tensor(a.type, a.ne, op=Op.CLAMP, src=(a,), params=p.ClampParams(low, high))


def sqr(a: Tensor) -> Tensor:
    """a * a."""
    return Tensor(a.type, a.ne, op=Op.SQR, src=(a,))


def sqrt(a: Tensor) -> Tensor:
    """Square root."""
    return Tensor(a.type, a.ne, op=Op.SQRT, src=(a,))


def fill(a: Tensor, value: float) -> Tensor:
    """A tensor like a with one value everywhere."""
    return Tensor(a.type, a.ne, op=Op.FILL, src=(a,), params=p.FillParams(value))


def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a[:, j, t] + b[:, ids[j, t]]: a [n, n_used, n_tokens], b [n, n_expert]; -1 adds nothing."""
    ok = a.ne[0] == b.ne[0] and a.ne[1:3] == ids.ne[:2] and ids.type == I32 and b.ne[2] == 1
    _check(ok, Op.ADD_ID, a, b, ids)
    return Tensor(a.type, a.ne, op=Op.ADD_ID, src=(a, b, ids))


def sum_rows(a: Tensor) -> Tensor:
    """Sum over dimension 0: [1, ne1, ne2, ne3]."""
    return Tensor(a.type, (1, *a.ne[1:]), op=Op.SUM_ROWS, src=(a,))


def unary(a: Tensor, op: UnaryOp) -> Tensor:
    """An activation or other function of one argument."""
    _check(a.has_contiguous_rows, Op.UNARY, a)
    return Tensor(a.type, a.ne, op=Op.UNARY, src=(a,), params=p.UnaryParams(op))


def silu(a: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return unary(a, UnaryOp.SILU)


def gelu(a: Tensor) -> Tensor:
    """GELU, tanh form."""
    return unary(a, UnaryOp.GELU)


def relu(a: Tensor) -> Tensor:
    """max(x, 0)."""
    return unary(a, UnaryOp.RELU)


def softplus(a: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return unary(a, UnaryOp.SOFTPLUS)


def tanh(a: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return unary(a, UnaryOp.TANH)


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return unary(a, UnaryOp.SIGMOID)


def glu(a: Tensor, op: GluOp, *, swapped: bool = False) -> Tensor:
    """Gated activation of one tensor whose rows hold gate and multiplier: [ne0 / 2, ...]."""
    _check(a.is_contiguous_n(1) and a.ne[0] % 2 == 0, Op.GLU, a)
    ne = (a.ne[0] // 2, *a.ne[1:])
    return Tensor(a.type, ne, op=Op.GLU, src=(a,), params=p.GluParams(op, swapped))


def glu_split(
    gate: Tensor, up: Tensor, op: GluOp, *, alpha: float = 0.0, limit: float = 0.0
) -> Tensor:
    """activation(gate) * up."""
    _check(gate.is_contiguous_n(1) and gate.ne == up.ne and gate.type == up.type, Op.GLU, gate, up)
    params = p.GluParams(op, alpha=alpha, limit=limit)
    return Tensor(gate.type, gate.ne, op=Op.GLU, src=(gate, up), params=params)


# ---------------------------------------------------------------- norms
def norm(a: Tensor, eps: float) -> Tensor:
    """Rows to zero mean and unit variance."""
    return Tensor(a.type, a.ne, op=Op.NORM, src=(a,), params=p.NormParams(eps))


def rms_norm(a: Tensor, eps: float) -> Tensor:
    """Rows to unit root-mean-square."""
    return Tensor(a.type, a.ne, op=Op.RMS_NORM, src=(a,), params=p.NormParams(eps))


def l2_norm(a: Tensor, eps: float) -> Tensor:
    """Rows to unit length."""
    return Tensor(a.type, a.ne, op=Op.L2_NORM, src=(a,), params=p.NormParams(eps))


# ---------------------------------------------------------------- products
def mul_mat(a: Tensor, b: Tensor, precision: Precision = Precision.DEFAULT) -> Tensor:
    """[k, n, A2, A3] x [k, m, B2, B3] -> [n, m, B2, B3]; consecutive b heads share one a head."""
    ok = a.ne[0] == b.ne[0] and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0
    _check(ok and not a.is_transposed, Op.MUL_MAT, a, b)
    ne = (a.ne[1], *b.ne[1:])
    return Tensor(F32, ne, op=Op.MUL_MAT, src=(a, b), params=p.MulMatParams(precision))


def mul_mat_id(weights: Tensor, b: Tensor, ids: Tensor, *, into: Tensor | None = None) -> Tensor:
    """[k, n, n_expert] x [k, n_b, n_tokens], ids [n_used, n_tokens] -> [n, n_used, n_tokens].

    Row [:, e, t] is of expert ids[e, t] and column b[:, e % n_b, t]. An id of -1 leaves its row
    as it is: as `into` (F32, shaped like the result) has it, or as the memory was. The result
    takes over the memory of `into` if nobody else needs it, and begins as a copy otherwise.
    """
    return _experts(Op.MUL_MAT_ID, weights, b, ids, (into,) if into is not None else ())


def mul_mat_id_cold(
    weights: Tensor, b: Tensor, ids: Tensor, cold: Tensor, *, into: Tensor | None = None
) -> Tensor:
    """mul_mat_id of those experts only whose number in `cold` (I32 [n_expert]) is not 0.

    The rows of all others are left as they are: written `into` a mul_mat_id in whose ids the cold
    experts are -1, they complete it.
    """
    ok = cold.type == I32 and cold.ne == (weights.ne[2], 1, 1, 1)
    _check(ok, Op.MUL_MAT_ID_COLD, weights, cold)
    rest = (cold,) if into is None else (cold, into)
    return _experts(Op.MUL_MAT_ID_COLD, weights, b, ids, rest)


def _experts(op: Op, weights: Tensor, b: Tensor, ids: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
    """A product with chosen experts; `rest`: the sources after the ids."""
    ok = (
        weights.ne[0] == b.ne[0]
        and weights.ne[3] == b.ne[3] == ids.ne[2] == ids.ne[3] == 1
        and ids.ne[1] == b.ne[2]
        and b.ne[1] > 0
        and ids.ne[0] % b.ne[1] == 0
        and ids.type == I32
    )
    _check(ok, op, weights, b, ids)
    ne = (weights.ne[1], ids.ne[0], b.ne[2], 1)
    t = Tensor(F32, ne, op=op, src=(weights, b, ids, *rest), params=p.MulMatParams())
    for into in t.src[INTO[op] :]:
        _check(into is not None and into.type == F32 and into.ne == ne, op, t, into)
    return t


# ---------------------------------------------------------------- gather, scatter, copy
def get_rows(a: Tensor, ids: Tensor) -> Tensor:
    """Rows a[:, ids], dequantized to F32 (I32 stays I32): [ne0, n, i1, i2]."""
    ok = a.ne[2] == ids.ne[1] and a.ne[3] == ids.ne[2] and ids.ne[3] == 1 and ids.type == I32
    _check(ok, Op.GET_ROWS, a, ids)
    ne = (a.ne[0], *ids.ne[:3])
    return Tensor(I32 if a.type == I32 else F32, ne, op=Op.GET_ROWS, src=(a, ids))


def set_rows(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Write the rows of b to a[:, ids], converting to a's type; the result is a."""
    ok = (
        a.ne[0] == b.ne[0]
        and a.ne[2] == b.ne[2]
        and a.ne[3] == b.ne[3]
        and b.ne[1] == ids.ne[0]
        and b.ne[2] % max(1, ids.ne[1]) == 0  # of no tokens there are no rows
        and b.ne[3] % max(1, ids.ne[2]) == 0
        and ids.ne[3] == 1
        and ids.type in (GGMLType.I64, I32)
        and b.type in (F32, GGMLType.F16)
        and a.has_contiguous_rows
        and b.has_contiguous_rows
    )
    _check(ok, Op.SET_ROWS, a, b, ids)
    return _view_of(a, a.ne, a.nb, Op.SET_ROWS, (b, ids, a))


def cpy(a: Tensor, b: Tensor) -> Tensor:
    """Write a's elements, converted, into b's memory; the result is b."""
    _check(a.nelements == b.nelements, Op.CPY, a, b)
    t = _view_of(b, b.ne, b.nb, Op.CPY, (a, b))
    return t.named(f"{b.name} (copy of {a.name})" if b.name else f"{a.name} (copy)")


def cast(a: Tensor, type: GGMLType) -> Tensor:
    """A packed copy of another type."""
    t = Tensor(type, a.ne, op=Op.CPY, src=(a,))
    return t.named(f"{a.name} (copy)")


def cont(a: Tensor, *ne: int) -> Tensor:
    """A packed copy, with another shape if one is given."""
    shape = padded(ne) if ne else a.ne
    t = Tensor(a.type, shape, op=Op.CONT, src=(a,))
    _check(t.nelements == a.nelements, Op.CONT, a, t)
    return t.named(f"{a.name} (cont)")


def concat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """a, then b, along a dimension."""
    rest = all(a.ne[i] == b.ne[i] for i in range(4) if i != dim)
    _check(a.type == b.type and rest, Op.CONCAT, a, b)
    ne = padded(tuple(a.ne[i] + b.ne[i] if i == dim else a.ne[i] for i in range(4)))
    return Tensor(a.type, ne, op=Op.CONCAT, src=(a, b), params=p.ConcatParams(dim))


def repeat(a: Tensor, like: Tensor) -> Tensor:
    """a tiled to the shape of `like`."""
    return repeat_to(a, like.ne)


def repeat_to(a: Tensor, ne: Shape) -> Tensor:
    """a tiled to a shape."""
    t = Tensor(a.type, ne, op=Op.REPEAT, src=(a,))
    _check(a.can_repeat_to(t), Op.REPEAT, a, t)
    return t


# ---------------------------------------------------------------- views
def reshape(a: Tensor, *ne: int) -> Tensor:
    """The same packed elements with another shape."""
    shape = padded(ne)
    t = _view_of(a, shape, dense_strides(a.type, shape), Op.RESHAPE, (a,))
    _check(a.is_contiguous and t.nelements == a.nelements, Op.RESHAPE, a, t)
    return t.named(f"{a.name} (reshaped)")


def view(a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...] = (), offset: int = 0) -> Tensor:
    """A window of a: shape `ne`, byte strides `nb` of dimensions 1.. , byte offset."""
    shape = padded(ne)
    strides = [a.type.type_size, a.type.row_size(shape[0]), 0, 0]
    strides[1 : 1 + len(nb)] = nb
    for i in range(max(2, 1 + len(nb)), 4):
        strides[i] = strides[i - 1] * shape[i - 1]
    t = _view_of(a, shape, (strides[0], strides[1], strides[2], strides[3]), Op.VIEW, (a,))
    t.view_offs += offset
    if t.data is not None:
        t.data += offset
    t.params = p.ViewParams(offset)
    root = t.view_src
    assert root is not None
    _check(t.is_empty or t.view_offs + t.nbytes <= root.nbytes, Op.VIEW, a, t)
    return t.named(f"{a.name} (view)")


def permute(a: Tensor, *axes: int) -> Tensor:
    """Dimension i of a becomes dimension axes[i] of the result."""
    _check(sorted(axes) == [0, 1, 2, 3], Op.PERMUTE, a)
    ne, nb = [0] * 4, [0] * 4
    for i, axis in enumerate(axes):
        ne[axis], nb[axis] = a.ne[i], a.nb[i]
    t = _view_of(a, padded(tuple(ne)), padded(tuple(nb)), Op.PERMUTE, (a,))
    t.params = p.PermuteParams((axes[0], axes[1], axes[2], axes[3]))
    return t.named(f"{a.name} (permuted)")


def transpose(a: Tensor) -> Tensor:
    """Dimensions 0 and 1 exchanged."""
    ne, nb = a.ne, a.nb
    t = _view_of(a, (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3]), Op.TRANSPOSE, (a,))
    return t.named(f"{a.name} (transposed)")


# ---------------------------------------------------------------- attention
def soft_max_ext(
    a: Tensor,
    mask: Tensor | None,
    scale: float,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(a * scale + slope * mask) over dimension 0; sinks join the denominator only."""
    if mask is not None:
        ok = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and mask.is_contiguous
        _check(ok and a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0, Op.SOFT_MAX, a, mask)
    _check(a.is_contiguous and (max_bias == 0 or mask is not None), Op.SOFT_MAX, a, mask)
    params = p.SoftMaxParams(scale, max_bias)
    return Tensor(a.type, a.ne, op=Op.SOFT_MAX, src=(a, mask, sinks), params=params)


def soft_max(a: Tensor) -> Tensor:
    """softmax over dimension 0."""
    return soft_max_ext(a, None, 1.0)


def flash_attn_ext(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    params: p.FlashAttnParams,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [dk, n_batch, n_head, ne3], k [dk, n_kv, n_head_kv, ne3], v [dv, n_kv, n_head_kv, ne3].

    The mask is F16 [n_kv, n_batch, ne32, ne33]; the result F32 [dv, n_head, n_batch, ne3].
    """
    ok = (
        q.ne[0] == k.ne[0]
        and k.ne[1:] == v.ne[1:]
        and q.ne[2] % k.ne[2] == 0
        and q.ne[3] % k.ne[3] == 0
    )
    _check(ok, Op.FLASH_ATTN_EXT, q, k, v)
    if mask is not None:
        fits = mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1]
        heads = q.ne[2] % mask.ne[2] == 0 and q.ne[3] % mask.ne[3] == 0
        kind = mask.type == GGMLType.F16 and mask.is_contiguous
        _check(fits and heads and kind, Op.FLASH_ATTN_EXT, q, mask)
    _check(params.max_bias == 0 or mask is not None, Op.FLASH_ATTN_EXT, q)
    ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    return Tensor(F32, ne, op=Op.FLASH_ATTN_EXT, src=(q, k, v, mask, sinks), params=params)


def rope_ext(a: Tensor, pos: Tensor, freq_factors: Tensor | None, params: p.RopeParams) -> Tensor:
    """Rotate channel pairs of a [ne0, n_head, n_tokens] by position."""
    n_pos = a.ne[2] * (4 if params.mode & RopeMode.MROPE else 1)
    ok = pos.type == I32 and pos.ne[0] == n_pos and params.n_dims % 2 == 0
    _check(ok and params.n_dims + params.n_offs <= a.ne[0], Op.ROPE, a, pos)
    _check(freq_factors is None or freq_factors.ne[0] >= params.n_dims // 2, Op.ROPE, freq_factors)
    return Tensor(a.type, a.ne, op=Op.ROPE, src=(a, pos, freq_factors), params=params)


# ---------------------------------------------------------------- recurrent layers
def ssm_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of each channel: [n_channels, n_tokens, n_seqs].

    x is [n_kernel - 1 + n_tokens, n_channels, n_seqs], what came before the tokens included; the
    kernel is [n_kernel, n_channels].
    """
    n_tokens = x.ne[0] - kernel.ne[0] + 1
    ok = x.type == F32 and x.ne[1] == kernel.ne[1] and x.ne[3] == 1
    _check(ok and n_tokens >= 0 and kernel.ne[2] == kernel.ne[3] == 1, Op.SSM_CONV, x, kernel)
    return Tensor(F32, (x.ne[1], n_tokens, x.ne[2], 1), op=Op.SSM_CONV, src=(x, kernel))


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    n_snapshots: int = 1,
) -> Tensor:
    """The gated delta rule over the tokens of each sequence.

    q, k [n, n_head_k, n_tokens, n_seqs], v [n, n_head, n_tokens, n_seqs], gate (logarithms of the
    decay, for each head or each key channel) [1 or n, n_head, n_tokens, n_seqs], beta [1, n_head,
    n_tokens, n_seqs], state [n, n, n_head, n_seqs], key channels first. Head h uses q and k of
    head h % n_head_k. The result's rows of n * n_head values are the outputs of all tokens, then
    the states after the last tokens, latest first: [n * n_head, n_tokens * n_seqs + n_snapshots *
    n * n_seqs]. Of states before the first token nothing is written.
    """
    n, n_head, n_tokens, n_seqs = v.ne
    ok = (
        q.ne == k.ne
        and q.ne[0] == n
        and q.ne[2] == n_tokens
        and n_head % q.ne[1] == n_seqs % q.ne[3] == 0
        and gate.ne in ((1, n_head, n_tokens, n_seqs), (n, n_head, n_tokens, n_seqs))
        and beta.ne == (1, n_head, n_tokens, n_seqs)
        and state.ne == (n, n, n_head, n_seqs)
        and n_snapshots >= 1
    )
    src = (q, k, v, gate, beta, state)
    _check(ok and all(t.type == F32 for t in src), Op.GATED_DELTA_NET, *src)
    ne = (n * n_head, n_tokens * n_seqs + n_snapshots * n * n_seqs, 1, 1)
    return Tensor(F32, ne, op=Op.GATED_DELTA_NET, src=src, params=p.DeltaNetParams(n_snapshots))


# ---------------------------------------------------------------- selection
def argsort(a: Tensor, *, descending: bool = False) -> Tensor:
    """Indices that sort each row: I32, like a."""
    return Tensor(I32, a.ne, op=Op.ARGSORT, src=(a,), params=p.SortParams(descending))


def argsort_top_k(a: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, largest first: a strided view of an ARGSORT."""
    order = argsort(a, descending=True)
    return view(order, (k, *order.ne[1:]), order.nb[1:])
