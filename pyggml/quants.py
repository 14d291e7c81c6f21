"""NumPy reference (de)quantizers: what every other implementation is measured against.

Each type is one small class: its block as a record layout, its values from the record, and for
most types the record from values. The quantizers are ggml's deterministic ones (no importance
matrix) and give its bytes, operation for operation in float32.
"""

from collections.abc import Iterable

import numpy as np

import pyggml.quants_iq
import pyggml.quants_k  # noqa: F401 - adds its types to the table
from pyggml.dtypes import GGMLType
from pyggml.errors import UserError
from pyggml.quants_base import (
    CODECS,
    Blocks,
    Bytes,
    Codec,
    Floats,
    Quantizer,
    column,
    floats,
    inverse,
    join,
    largest_magnitude,
    ordered_sum,
    roundf,
    signed_max,
    split,
    truncate,
)

# Elements per step: the temporaries of a step stay in the L2 cache.
STEP = 1 << 16


def dequantize(raw: Bytes, type: GGMLType) -> Floats:
    """Values of stored rows: [..., row_bytes] -> [..., n]."""
    codec = _codec(type)
    if raw.dtype != np.uint8 or raw.shape[-1] % type.type_size:
        raise UserError(
            f"a row of {type.label} is a multiple of {type.type_size} bytes, "
            f"not {raw.shape[-1]} of {raw.dtype}"
        )
    blocks = np.ascontiguousarray(raw).reshape(-1).view(codec.layout)
    out = np.empty((blocks.size, type.block_size), np.float32)
    step = STEP // type.block_size
    with np.errstate(all="ignore"):  # scales read from a file may be anything
        for i in range(0, blocks.size, step):
            out[i : i + step] = codec.dequantize(blocks[i : i + step]).reshape(-1, out.shape[1])
    return out.reshape(*raw.shape[:-1], raw.shape[-1] // type.type_size * type.block_size)


def quantize(x: Floats, type: GGMLType) -> Bytes:
    """Stored form of rows: [..., n] -> [..., row_bytes].

    x must be finite: infinity and NaN give valid blocks of unspecified values.
    """
    codec = _codec(type)
    if not isinstance(codec, Quantizer):
        raise UserError(f"{type.label} has no quantizer here; use one of {_names(QUANTIZABLE)}")
    if x.shape[-1] % type.block_size:
        raise UserError(
            f"a row of {type.label} is a multiple of {type.block_size} values, not {x.shape[-1]}"
        )
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, type.block_size)
    out = np.empty(len(rows), codec.layout)
    step = STEP // type.block_size
    with np.errstate(all="ignore"):  # scales of tiny and huge blocks leave the range of F16
        for i in range(0, len(rows), step):
            out[i : i + step] = codec.quantize(rows[i : i + step])
    return out.view(np.uint8).reshape(*x.shape[:-1], type.row_size(x.shape[-1]))


def _codec(type: GGMLType) -> Codec:
    codec = CODECS.get(type)
    if codec is None:
        name = type.label if isinstance(type, GGMLType) else repr(type)
        raise UserError(f"no conversion between {name} and f32; known: {_names(CODECS)}")
    return codec


class F32(Quantizer, type=GGMLType.F32):
    layout = np.dtype("<f4")

    def dequantize(self, b: Blocks) -> Floats:
        return b.astype(np.float32)

    def quantize(self, x: Floats) -> Blocks:
        return x[:, 0].astype(self.layout)


class F16(Quantizer, type=GGMLType.F16):
    layout = np.dtype("<f2")

    def dequantize(self, b: Blocks) -> Floats:
        return b.astype(np.float32)

    def quantize(self, x: Floats) -> Blocks:
        return x[:, 0].astype(self.layout)


class BF16(Quantizer, type=GGMLType.BF16):
    """The upper half of an F32."""

    layout = np.dtype("<u2")

    def dequantize(self, b: Blocks) -> Floats:
        return (b.astype(np.uint32) << 16).view(np.float32)

    def quantize(self, x: Floats) -> Blocks:
        bits = x[:, 0].view(np.uint32)
        high = bits >> 16
        nearest_even = (bits + 0x7FFF + (high & 1)) >> 16
        # a NaN whose payload is in the lower half would round to infinity: set the quiet bit
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, high | 0x40, nearest_even).astype(self.layout)


class Q4_0(Quantizer, type=GGMLType.Q4_0):
    """d * (q - 8); the extreme value of the block is -8."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        q = split(b["qs"], 4).reshape(-1, 32)
        return (floats(q) - 8) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d = signed_max(x, 1) / np.float32(-8)
        b["d"] = d[:, 0]
        b["qs"] = join(truncate(x * inverse(d) + 8.5, 15).reshape(-1, 2, 16), 4)
        return b


class Q4_1(Quantizer, type=GGMLType.Q4_1):
    """d * q + m"""

    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        q = split(b["qs"], 4).reshape(-1, 32)
        return floats(q) * column(b["d"]) + column(b["m"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d, low = _range(x, 15)
        b["d"], b["m"] = d[:, 0], low[:, 0]
        b["qs"] = join(truncate((x - low) * inverse(d) + 0.5, 15).reshape(-1, 2, 16), 4)
        return b


class Q5_0(Quantizer, type=GGMLType.Q5_0):
    """d * (q - 16); bit 4 of element j is bit j of qh."""

    layout = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        return (floats(_five_bits(b)) - 16) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d = signed_max(x, 1) / np.float32(-16)
        b["d"] = d[:, 0]
        _store_five_bits(b, truncate(x * inverse(d) + 16.5, 31))
        return b


class Q5_1(Quantizer, type=GGMLType.Q5_1):
    """d * q + m; bit 4 of element j is bit j of qh."""

    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        return floats(_five_bits(b)) * column(b["d"]) + column(b["m"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d, low = _range(x, 31)
        b["d"], b["m"] = d[:, 0], low[:, 0]
        _store_five_bits(b, truncate((x - low) * inverse(d) + 0.5, 31))
        return b


def _range(x: Floats, steps: int) -> tuple[Floats, Floats]:
    """Step and minimum of each row, as columns."""
    low: Floats = x.min(axis=1, keepdims=True)
    return (x.max(axis=1, keepdims=True) - low) / np.float32(steps), low


def _five_bits(b: Blocks) -> Bytes:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little")
    return split(b["qs"], 4).reshape(-1, 32) | high << np.uint8(4)


def _store_five_bits(b: Blocks, q: Bytes) -> None:
    b["qh"] = np.packbits(q >> 4, axis=-1, bitorder="little")
    b["qs"] = join(q.reshape(-1, 2, 16) & 15, 4)


class Q8_0(Quantizer, type=GGMLType.Q8_0):
    """d * q"""

    layout = np.dtype([("d", "<f2"), ("qs", "i1", 32)])

    def dequantize(self, b: Blocks) -> Floats:
        return floats(b["qs"]) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d = largest_magnitude(x) / np.float32(127)
        b["d"] = d[:, 0]
        b["qs"] = roundf(x * inverse(d))
        return b


class Q8_1(Quantizer, type=GGMLType.Q8_1):
    """d * q; s = d * sum(q) serves the dot products of the types that store a minimum."""

    layout = np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)])

    def dequantize(self, b: Blocks) -> Floats:
        return floats(b["qs"]) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d = largest_magnitude(x) / np.float32(127)
        b["d"] = d[:, 0]
        b["qs"] = roundf(x * inverse(d))
        b["s"] = floats(b["qs"].sum(axis=1, dtype=np.int32)) * d[:, 0]
        return b


class Q1_0(Quantizer, type=GGMLType.Q1_0):
    """Signs: +d for a set bit, -d otherwise; d is the mean magnitude."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        d = column(b["d"])
        return np.where(np.unpackbits(b["qs"], axis=-1, bitorder="little"), d, -d)

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        b["d"] = ordered_sum(np.abs(x.T)) / 128
        b["qs"] = np.packbits(x >= 0, axis=-1, bitorder="little")
        return b


class Q2_0(Quantizer, type=GGMLType.Q2_0):
    """d * (q - 1) of consecutive 2-bit q; the quantizer never uses the value 2 * d."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        q = split(b["qs"][..., None], 2).reshape(-1, 64)
        return (floats(q) - 1) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        d = largest_magnitude(x)
        b["d"] = d[:, 0]
        q = truncate(roundf(x * inverse(d)) + 1, 3)
        b["qs"] = join(q.reshape(-1, 16, 4, 1), 2)[..., 0]
        return b


DEQUANTIZABLE: tuple[GGMLType, ...] = tuple(CODECS)
QUANTIZABLE: tuple[GGMLType, ...] = tuple(t for t, c in CODECS.items() if isinstance(c, Quantizer))


def _names(types: Iterable[GGMLType]) -> str:
    return ", ".join(t.label for t in sorted(types))
