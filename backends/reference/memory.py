"""Tensors in host memory as NumPy arrays.

Arrays have ggml's dimensions reversed, as NumPy counts them: [ne3, ne2, ne1, ne0].
"""

import ctypes
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pyggml.dtypes import GGMLType
from pyggml.ids import check_ids, ids_of
from pyggml.quants import dequantize, quantize
from pyggml.tensor import Tensor

Array = NDArray[Any]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

INTEGERS = (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64)


def bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """Host memory; the caller keeps its owner alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def stored(t: Tensor) -> Array:
    """A writable view of what lies in memory, whatever its strides.

    Plain types: elements, [ne3, ne2, ne1, ne0]; quantized types: row bytes, [ne3, ne2, ne1, bytes].
    """
    assert t.data is not None, f"{t!r} is not allocated"
    if t.is_empty:
        return np.empty(t.ne[::-1], t.type.info.numpy or np.uint8)
    memory = bytes_at(t.data, t.nbytes)
    nb = t.nb[::-1]
    if t.type.info.numpy is None:
        assert t.has_contiguous_rows, f"{t!r} has blocks apart from each other"
        return as_strided(memory, (*t.ne[:0:-1], t.type.row_size(t.ne[0])), (*nb[:3], 1))
    first = memory[: t.type.type_size].view(t.type.info.numpy)
    return as_strided(first, t.ne[::-1], nb)


def decode(a: Array, type: GGMLType) -> Floats:
    """Stored form to float32."""
    if type in INTEGERS or type == GGMLType.F64:
        return a.astype(np.float32)
    if type.info.numpy is None:
        return dequantize(a, type)
    return dequantize(np.ascontiguousarray(a)[..., None].view(np.uint8), type)[..., 0]


def encode(values: Array, type: GGMLType) -> Array:
    """Numbers to the stored form; integers are truncated towards zero."""
    if type in INTEGERS or type == GGMLType.F64:
        return values.astype(type.info.numpy)
    values = np.ascontiguousarray(values, np.float32)
    if type.info.numpy is None:
        return quantize(values, type)
    return quantize(values[..., None], type).view(type.info.numpy)[..., 0]


def floats(t: Tensor | None) -> Floats:
    """All values as float32, dequantized: [ne3, ne2, ne1, ne0]."""
    assert t is not None
    return decode(stored(t), t.type)


def integers(t: Tensor | None) -> Ints:
    """All values of an integer tensor."""
    assert t is not None and t.type in INTEGERS
    return stored(t).astype(np.int64)


def existing_ids(node: Tensor) -> Ints:
    """The ids that a node reads. Raises IdError if one of them names nothing."""
    ids = integers(ids_of(node))
    check_ids(node, ids)
    return ids


def write(t: Tensor, values: Array) -> None:
    """Store values, converted to the tensor's type."""
    stored(t)[...] = encode(values, t.type)
