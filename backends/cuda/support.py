"""What CUDA's kernels can compute, so that the scheduler decides as it does beside a real card.

One function per operation; an operation that is not in the table has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from pyggml.backend import is_noop
from pyggml.backends.cuda.support_attention import attention_supported
from pyggml.dtypes import GGMLType
from pyggml.ops import Op, Precision
from pyggml.params import MulMatParams
from pyggml.tensor import Tensor

T = GGMLType
FLOATS = frozenset((T.F32, T.F16, T.BF16))
LEGACY = frozenset((T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0))
PRODUCT_TYPES = frozenset(
    (
        *FLOATS,
        *LEGACY,
        *(T.Q1_0, T.Q2_0, T.MXFP4, T.NVFP4, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_K),
        *(T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_NL, T.IQ4_XS),
    )
)
ROW_TYPES = PRODUCT_TYPES - {T.NVFP4} | {T.I32}
SUPERBLOCK_ROWS = frozenset((T.IQ4_NL, T.MXFP4))  # read 256 values at a time
WRITTEN_ROWS = FLOATS | LEGACY | {T.IQ4_NL}
COPIES = frozenset(
    (
        *((a, b) for a in FLOATS for b in FLOATS),
        *((T.F32, t) for t in (*LEGACY, T.IQ4_NL, T.I32)),
        *((t, T.F32) for t in (*LEGACY, T.I32)),
        (T.I32, T.I32),
    )
)
CONVOLVED_CHANNELS = 128  # a block of threads of SSM_CONV


def supports(node: Tensor) -> bool:
    """Whether CUDA has a kernel for the node."""
    if is_noop(node):
        return True
    rule = RULES.get(node.op)
    return rule is not None and rule(node)


# ---------------------------------------------------------------- products and rows
def _sources(node: Tensor) -> tuple[Tensor, Tensor]:
    a, b = node.src[0], node.src[1]
    assert a is not None and b is not None
    return a, b


def _product(node: Tensor) -> bool:
    a, b = _sources(node)
    if a.nb[0] != a.type.type_size or b.nb[0] != b.type.type_size:
        return False
    if b.type == T.F16 and a.type != T.F16:
        return False
    return a.type in PRODUCT_TYPES


def _experts(node: Tensor) -> bool:
    precise = isinstance(node.params, MulMatParams) and node.params.precision == Precision.F32
    return not precise and _product(node)


def _get_rows(node: Tensor) -> bool:
    a, _ = _sources(node)
    return a.type in ROW_TYPES and (a.type not in SUPERBLOCK_ROWS or a.ne[0] % 256 == 0)


def _set_rows(node: Tensor) -> bool:
    values, ids = _sources(node)
    if ids.type not in (T.I64, T.I32):
        return False
    if values.type == T.F16:
        return node.type == T.F16
    return values.type == T.F32 and node.type in WRITTEN_ROWS


def _copy(node: Tensor) -> bool:
    a = _first(node)
    if (a.type, node.type) in COPIES:
        return True
    return a.type == node.type and a.is_contiguous and node.is_contiguous


def _out_prod(node: Tensor) -> bool:
    return node.type == T.F32 and all(s.type == T.F32 for s in _sources(node))


# ---------------------------------------------------------------- element by element, row by row
def _first(node: Tensor) -> Tensor:
    a = node.src[0]
    assert a is not None
    return a


def _always(node: Tensor) -> bool:
    return True


def _binary(node: Tensor) -> bool:
    """F32 and F16 in any mixture, or BF16 with BF16 or F32."""
    types = {node.type, *(s.type for s in _sources(node))}
    return types <= {T.F32, T.F16} or types <= {T.F32, T.BF16}


def _floats(node: Tensor) -> bool:
    return _first(node).type in (T.F32, T.F16) and node.type in (T.F32, T.F16)


def _f32(node: Tensor) -> bool:
    return node.type == T.F32 and _first(node).type == T.F32


def _scale(node: Tensor) -> bool:
    return _first(node).type in (T.F32, T.BF16)


def _unary(node: Tensor) -> bool:
    return _first(node).is_contiguous


def _glu(node: Tensor) -> bool:
    return _first(node).is_contiguous_n(1)


def _rows(node: Tensor) -> bool:
    return _first(node).has_contiguous_rows


def _row_sums(node: Tensor) -> bool:
    return _first(node).type == T.F32 and _rows(node)


def _rope(node: Tensor) -> bool:
    a = _first(node)
    return a.nb[0] == a.type.type_size and a.is_contiguous_n(2)


def _not_small_integers(node: Tensor) -> bool:
    return _first(node).type not in (T.I16, T.I32)


def _convolution(node: Tensor) -> bool:
    return _first(node).ne[1] % CONVOLVED_CHANNELS == 0


Rule = Callable[[Tensor], bool]
RULES: dict[Op, Rule] = {
    Op.MUL_MAT: _product,
    Op.MUL_MAT_ID: _experts,
    Op.MUL_MAT_ID_COLD: _experts,
    Op.OUT_PROD: _out_prod,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
    Op.FLASH_ATTN_EXT: attention_supported,
    **dict.fromkeys((Op.CPY, Op.DUP, Op.CONT), _copy),
    **dict.fromkeys((Op.ADD, Op.SUB, Op.MUL, Op.DIV), _binary),
    **dict.fromkeys((Op.SQR, Op.SQRT, Op.SIN, Op.COS, Op.LOG, Op.CLAMP, Op.LEAKY_RELU), _floats),
    Op.REPEAT: _floats,
    Op.CONCAT: _not_small_integers,
    Op.SCALE: _scale,
    Op.UNARY: _unary,
    Op.GLU: _glu,
    **dict.fromkeys((Op.NORM, Op.RMS_NORM, Op.L2_NORM), _rows),
    Op.GROUP_NORM: _unary,
    **dict.fromkeys((Op.SUM_ROWS, Op.MEAN), _row_sums),
    **dict.fromkeys((Op.ROPE, Op.ROPE_BACK), _rope),
    **dict.fromkeys((Op.SUM, Op.CUMSUM, Op.TRI, Op.FILL, Op.DIAG, Op.PAD), _f32),
    **dict.fromkeys((Op.ADD_ID, Op.SOFT_MAX, Op.DIAG_MASK_INF), _always),
    **dict.fromkeys((Op.ARGMAX, Op.ARGSORT, Op.TOP_K), _always),
    Op.SSM_CONV: _convolution,
    Op.GATED_DELTA_NET: _always,
}


# ---------------------------------------------------------------- offloading
def batch_of(node: Tensor) -> int:
    """Tokens of an operation: how often its weights are used once they are on the card."""
    if node.op == Op.GET_ROWS:
        return 0
    if node.op == Op.MUL_MAT:
        return node.ne[1]
    if node.op in (Op.MUL_MAT_ID, Op.MUL_MAT_ID_COLD, Op.ROPE, Op.ROPE_BACK):
        return node.ne[2]
    return node.nrows
