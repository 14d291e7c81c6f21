"""What the block formats share: the codec table, bit fields, rounding."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pyggml.dtypes import GGMLType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Integers = NDArray[np.integer[Any]]
Blocks = NDArray[Any]  # one record per block, of the codec's layout

# Groups whose values are all smaller count as zero in the quantizers that search.
TINY = np.float32(1e-15)


class Codec(ABC):
    """How one type stores its values; subclassing with `type=` adds it to the table."""

    layout: ClassVar[np.dtype[Any]]  # the bytes of one block, field by field

    def __init_subclass__(cls, *, type: GGMLType | None = None) -> None:
        if type is not None:
            assert cls.layout.itemsize == type.type_size, type
            CODECS[type] = cls()

    @abstractmethod
    def dequantize(self, b: Blocks) -> Floats:
        """Values of n blocks: [n, ...], block_size values each in storage order."""


class Quantizer(Codec):
    """A codec that also has a deterministic quantizer."""

    @abstractmethod
    def quantize(self, x: Floats) -> Blocks:
        """Blocks of the rows of x: [n, block_size] -> [n]."""


CODECS: dict[GGMLType, Codec] = {}


def split(q: Bytes, bits: int) -> Bytes:
    """Fields of each byte, lowest first: [..., m] -> [..., 8 / bits, m]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (q[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def join(q: Integers, bits: int) -> Bytes:
    """The inverse of split: [..., 8 / bits, m] -> [..., m]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    joined: Bytes = np.bitwise_or.reduce(q.astype(np.uint8) << shifts, axis=-2)
    return joined


def floats(a: NDArray[Any]) -> Floats:
    return a.astype(np.float32)


def column(a: NDArray[Any]) -> Floats:
    """Per-block numbers as a float column: [n] -> [n, 1]."""
    return floats(a)[:, None]


def inverse(d: Floats) -> Floats:
    """1 / d, and 0 where d is 0."""
    return np.where(d == 0, np.float32(0), 1 / d)


def signed_max(x: Floats, axis: int) -> Floats:
    """The value with the largest magnitude, the first of several; keeps its sign and the axis."""
    first = np.abs(x).argmax(axis=axis, keepdims=True)
    return np.take_along_axis(x, first, axis) + np.float32(0)  # -0 counts as 0


def largest_magnitude(x: Floats) -> Floats:
    """Of each row: [..., n] -> [..., 1]."""
    largest: Floats = np.abs(x).max(axis=-1, keepdims=True)
    return largest


def ordered_sum(a: Floats) -> Floats:
    """Sum over the first axis, one row after the other.

    np.sum adds pairwise: other last bits, and the searches below compare sums for equality of
    bytes with ggml's loops.
    """
    total: Floats = a[0].copy()
    for row in a[1:]:
        total += row
    return total


def nearest_int(v: Floats) -> Ints:
    """Round half to even as the K formats do: by the float that has no fraction bits left.

    Right for |v| < 2**22; NaN gives 0 and infinity a large negative number, as in ggml.
    """
    bits = (v + np.float32(12582912)).view(np.int32)
    return (bits & 0x007FFFFF) - 0x00400000


def roundf(v: Floats) -> Floats:
    """Round half away from zero, C's roundf."""
    whole = np.trunc(v)
    return whole + np.trunc(2 * (v - whole))


def truncate(v: Floats, top: int) -> Bytes:
    """Integer part within 0...top; NaN gives 0."""
    return np.fmin(np.fmax(v, 0), top).astype(np.uint8)
