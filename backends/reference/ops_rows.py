"""Reference: operations on whole rows: norms, sums, gather, scatter, copies, sorting."""

import numpy as np

from pyggml.backends.reference.memory import (
    Array,
    decode,
    encode,
    existing_ids,
    floats,
    integers,
    stored,
)
from pyggml.params import ConcatParams, NormParams, SortParams, TopKParams
from pyggml.tensor import Tensor


def _eps(node: Tensor) -> np.float32:
    assert isinstance(node.params, NormParams)
    return np.float32(node.params.eps)


# ---------------------------------------------------------------- norms and sums
def norm(node: Tensor) -> Array:
    """(x - mean) / sqrt(variance + eps)"""
    x = floats(node.src[0]).astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    out: Array = centred / np.sqrt(variance + _eps(node))
    return out


def rms_norm(node: Tensor) -> Array:
    """x / sqrt(mean(x**2) + eps)"""
    x = floats(node.src[0]).astype(np.float64)
    out: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + _eps(node))
    return out


def l2_norm(node: Tensor) -> Array:
    """x / max(length, eps)"""
    x = floats(node.src[0]).astype(np.float64)
    length = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
    out: Array = x / np.maximum(length, _eps(node))
    return out


def sum_rows(node: Tensor) -> Array:
    out: Array = floats(node.src[0]).sum(axis=-1, keepdims=True, dtype=np.float64)
    return out


# ---------------------------------------------------------------- gather and scatter
def get_rows(node: Tensor) -> Array:
    """dst[:, i, p, q] = a[:, ids[i, p, q], p, q], dequantized; integers stay integers."""
    a = node.src[0]
    assert a is not None
    ids = existing_ids(node)[0]  # [i2, i1, n]
    rows = np.take_along_axis(stored(a), ids[..., None], axis=2)
    return rows if node.type == a.type else decode(rows, a.type)


def set_rows(node: Tensor) -> None:
    """a[:, ids[i, p, q], p, q] = b[:, i, p, q]; writes into a, which the result views."""
    b = floats(node.src[0])
    ids = existing_ids(node)[0]
    ids = np.tile(ids, (b.shape[0] // ids.shape[0], b.shape[1] // ids.shape[1], 1))
    np.put_along_axis(stored(node), ids[..., None], encode(b, node.type), axis=2)


# ---------------------------------------------------------------- copies
def copy(node: Tensor) -> None:
    """CPY, CONT, DUP: the same elements in logical order, converted; shapes may differ."""
    a = node.src[0]
    assert a is not None
    target = stored(node)
    if a.type == node.type:
        target[...] = stored(a).reshape(target.shape)
    else:
        values = integers(a) if a.type.info.numpy in (np.int32, np.int64) else floats(a)
        target[...] = encode(values.reshape(node.ne[::-1]), node.type)


def concat(node: Tensor) -> None:
    """a, then b, along a dimension."""
    assert isinstance(node.params, ConcatParams)
    a, b = node.src
    assert a is not None and b is not None
    stored(node)[...] = np.concatenate([stored(a), stored(b)], axis=3 - node.params.dim)


def repeat(node: Tensor) -> None:
    """a tiled."""
    a = node.src[0]
    assert a is not None
    target, part = stored(node), stored(a)
    if part.size:
        target[...] = np.tile(part, [n // m for n, m in zip(target.shape, part.shape, strict=True)])


# ---------------------------------------------------------------- sorting
def _order(x: Array, descending: bool) -> Array:
    """Indices that sort each row; equal values keep their order."""
    return np.argsort(-x if descending else x, axis=-1, kind="stable")


def argsort(node: Tensor) -> Array:
    assert isinstance(node.params, SortParams)
    return _order(floats(node.src[0]), node.params.descending)


def top_k(node: Tensor) -> Array:
    """Indices of the k largest of each row; any order will do, here the largest come first."""
    assert isinstance(node.params, TopKParams)
    return _order(floats(node.src[0]), descending=True)[..., : node.params.k]
