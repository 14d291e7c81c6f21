"""Reference: functions of single elements, with broadcast."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pyggml.backends.reference.memory import Array, Floats, existing_ids, floats
from pyggml.ids import ABSENT
from pyggml.ops import GluOp, UnaryOp
from pyggml.params import ClampParams, FillParams, GluParams, ScaleParams, UnaryParams
from pyggml.tensor import Tensor

Double = NDArray[np.float64]
Function = Callable[[Double], Double]


# ---------------------------------------------------------------- two operands
def _tiled(b: Array, shape: tuple[int, ...]) -> Array:
    """b repeated along every dimension until it has the shape."""
    return np.tile(b, [n // max(m, 1) for n, m in zip(shape, b.shape, strict=True)])


def binary(function: Callable[[Floats, Floats], Floats]) -> Callable[[Tensor], Array]:
    """ADD, SUB, MUL, DIV: in float32, the second operand tiled."""

    def run(node: Tensor) -> Array:
        a, b = floats(node.src[0]), floats(node.src[1])
        return function(a, _tiled(b, a.shape))

    return run


def add_id(node: Tensor) -> Array:
    """dst[:, j, t] = a[:, j, t] + b[:, ids[j, t]]; an id of -1 adds nothing."""
    a, b, ids = floats(node.src[0]), floats(node.src[1]), existing_ids(node)[0, 0]
    return np.where((ids == ABSENT)[..., None], a, a + b[0, 0, ids])


# ---------------------------------------------------------------- one operand
def scale(node: Tensor) -> Array:
    assert isinstance(node.params, ScaleParams)
    factor, bias = np.float32(node.params.scale), np.float32(node.params.bias)
    return floats(node.src[0]).astype(np.float64) * factor + bias


def clamp(node: Tensor) -> Array:
    assert isinstance(node.params, ClampParams)
    low, high = np.float32(node.params.low), np.float32(node.params.high)
    return np.minimum(np.maximum(floats(node.src[0]), low), high)


def sqr(node: Tensor) -> Array:
    return np.square(floats(node.src[0]))


def sqrt(node: Tensor) -> Array:
    return np.sqrt(floats(node.src[0]))


def fill(node: Tensor) -> Array:
    assert isinstance(node.params, FillParams)
    return np.full(node.ne[::-1], node.params.value, np.float32)


# ---------------------------------------------------------------- activations
def sigmoid(x: Double) -> Double:
    return 1 / (1 + np.exp(-x))


def silu(x: Double) -> Double:
    return x * sigmoid(x)


def gelu(x: Double) -> Double:
    """The tanh form."""
    out: Double = 0.5 * x * (1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))
    return out


def gelu_quick(x: Double) -> Double:
    return x * sigmoid(1.702 * x)


def gelu_erf(x: Double) -> Double:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def softplus(x: Double) -> Double:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def hardsigmoid(x: Double) -> Double:
    return np.clip((x + 3) / 6, 0, 1)


def _erf(x: Double) -> Double:
    out: Double = np.vectorize(math.erf, otypes=[np.float64])(x)
    return out


def _round(x: Double) -> Double:
    """Half away from zero."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


UNARY: dict[UnaryOp, Function] = {
    UnaryOp.ABS: np.abs,
    UnaryOp.SGN: np.sign,
    UnaryOp.NEG: np.negative,
    UnaryOp.STEP: lambda x: (x > 0).astype(np.float64),
    UnaryOp.TANH: np.tanh,
    UnaryOp.ELU: lambda x: np.where(x > 0, x, np.expm1(x)),
    UnaryOp.RELU: lambda x: np.maximum(x, 0),
    UnaryOp.SIGMOID: sigmoid,
    UnaryOp.GELU: gelu,
    UnaryOp.GELU_QUICK: gelu_quick,
    UnaryOp.SILU: silu,
    UnaryOp.HARDSWISH: lambda x: x * hardsigmoid(x),
    UnaryOp.HARDSIGMOID: hardsigmoid,
    UnaryOp.EXP: np.exp,
    UnaryOp.EXPM1: np.expm1,
    UnaryOp.SOFTPLUS: softplus,
    UnaryOp.GELU_ERF: gelu_erf,
    UnaryOp.FLOOR: np.floor,
    UnaryOp.CEIL: np.ceil,
    UnaryOp.ROUND: _round,
    UnaryOp.TRUNC: np.trunc,
}


def unary(node: Tensor) -> Array:
    assert isinstance(node.params, UnaryParams)
    x = floats(node.src[0]).astype(np.float64)
    if node.params.op == UnaryOp.XIELU:
        return _xielu(x, node.params)
    return UNARY[node.params.op](x)


def _xielu(x: Double, params: UnaryParams) -> Double:
    """Quadratic above zero, exponential below."""
    alpha_n, alpha_p, beta, eps = params.xielu
    below = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
    return np.where(x > 0, alpha_p * x * x + beta * x, below)


# ---------------------------------------------------------------- gated activations
GATED: dict[GluOp, Function] = {
    GluOp.REGLU: lambda x: np.maximum(x, 0),
    GluOp.GEGLU: gelu,
    GluOp.SWIGLU: silu,
    GluOp.GEGLU_ERF: gelu_erf,
    GluOp.GEGLU_QUICK: gelu_quick,
}


def glu(node: Tensor) -> Array:
    """activation(gate) * up; one source holds both as the halves of its rows."""
    params = node.params
    assert isinstance(params, GluParams)
    if len(node.src) > 1 and node.src[1] is not None:
        gate, up = floats(node.src[0]), floats(node.src[1])
    else:
        gate, up = np.split(floats(node.src[0]), 2, axis=-1)
        if params.swapped:
            gate, up = up, gate
    return gated(gate.astype(np.float64), up.astype(np.float64), params)


def gated(x: Double, g: Double, params: GluParams) -> Double:
    """One formula per kind; x is the gate."""
    if params.op in GATED:
        return GATED[params.op](x) * g
    limit = np.float32(params.limit)
    x, g = np.minimum(x, limit), np.clip(g, -limit, limit)
    if params.op == GluOp.SWIGLU_CLAMP:
        return silu(x) * g
    return x * sigmoid(np.float32(params.alpha) * x) * (g + 1)
