"""Reference: matrix products, exact or with ggml's rounding of the activations."""

import numpy as np
from numpy.typing import NDArray

from pyggml.backends.reference.memory import (
    Array,
    Ints,
    decode,
    encode,
    existing_ids,
    floats,
    integers,
    stored,
)
from pyggml.dtypes import GGMLType
from pyggml.ids import ABSENT
from pyggml.ops import INTO
from pyggml.quants_base import CODECS
from pyggml.tensor import Tensor

Double = NDArray[np.float64]

# ggml rounds the activations to the type of float weights, and to `dot` for quantized ones.
_DOT = {GGMLType.F32: GGMLType.F32, GGMLType.F16: GGMLType.F16, GGMLType.BF16: GGMLType.BF16}


def mul_mat(node: Tensor, *, quantize_activations: bool = False) -> Array:
    """dst[i, j, p, q] = sum over k of a[k, i, p / r2, q / r3] * b[k, j, p, q]"""
    a, b = node.src
    assert a is not None and b is not None
    y = floats(b)
    weights = stored(a).repeat(y.shape[1] // a.ne[2], axis=1).repeat(y.shape[0] // a.ne[3], axis=0)
    return product(weights, a.type, y, quantize_activations=quantize_activations)


def mul_mat_id(node: Tensor, *, quantize_activations: bool = False) -> None:
    """dst[:, e, t] = a[:, :, ids[e, t]] . b[:, e % n_b, t]; an id of -1 leaves its row as it is."""
    ids = existing_ids(node)[0, 0]
    _experts(node, ids, ids != ABSENT, quantize_activations)


def mul_mat_id_cold(node: Tensor, *, quantize_activations: bool = False) -> None:
    """The same for experts that are marked cold; all other rows are left as they are."""
    ids, cold = existing_ids(node)[0, 0], integers(node.src[3]).reshape(-1)
    chosen = ids != ABSENT
    chosen[chosen] = cold[ids[chosen]] != 0
    _experts(node, ids, chosen, quantize_activations)


def _experts(node: Tensor, ids: Ints, chosen: NDArray[np.bool_], quantize: bool) -> None:
    """Write the chosen rows [t, e]; the others are those of the tensor to continue, if any."""
    a, b = node.src[:2]
    assert a is not None and b is not None
    out, weights, y = stored(node), stored(a)[0], floats(b)[0]
    for into in node.src[INTO[node.op] :]:
        assert into is not None
        out[...] = stored(into)
    for t, e in np.argwhere(chosen):
        column = y[t, e % b.ne[1], None]
        (out[0, t, e],) = product(weights[ids[t, e]], a.type, column, quantize_activations=quantize)


def product(weights: Array, type: GGMLType, y: Array, *, quantize_activations: bool) -> Double:
    """Rows of y times rows of the weights: [..., n, k] x [..., m, k] -> [..., m, n], in float64."""
    x = decode(weights, type).astype(np.float64).swapaxes(-1, -2)
    out: Double
    if not quantize_activations:
        out = np.matmul(y.astype(np.float64), x)
        return out
    dot = _DOT.get(type, type.info.dot)
    assert dot is not None, f"{type.label} has no dot product"
    rounded = encode(y, dot)
    out = np.matmul(decode(rounded, dot).astype(np.float64), x)
    return out + _q8_1_error(weights, type, rounded) if dot == GGMLType.Q8_1 else out


def _q8_1_error(weights: Array, type: GGMLType, y: Array) -> Double:
    """Q8_1 stores its sum s rounded to F16: the part that weights' minima take from it is off."""
    minima = _fields(weights, type)["m"].astype(np.float64)
    blocks = _fields(y, GGMLType.Q8_1)
    exact = blocks["d"].astype(np.float64) * blocks["qs"].sum(axis=-1, dtype=np.int64)
    out: Double = np.matmul(blocks["s"] - exact, minima.swapaxes(-1, -2))
    return out


def _fields(rows: Array, type: GGMLType) -> Array:
    """Row bytes as one record per block."""
    return np.ascontiguousarray(rows).view(CODECS[type].layout)
