"""Codebook, ternary and FP4 types: values looked up in tables instead of counted in steps."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml.dtypes import GGMLType
from pyggml.quants_base import (
    TINY,
    Blocks,
    Bytes,
    Codec,
    Floats,
    Integers,
    Quantizer,
    column,
    floats,
    inverse,
    join,
    largest_magnitude,
    nearest_int,
    ordered_sum,
    roundf,
    signed_max,
    split,
    truncate,
)

# E2M1 times 2, so that the table is integer; the block scales are halved in turn.
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# IQ4: 16 levels, denser around zero.
IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# The 7-bit sign codes of IQ2_XXS, IQ2_XS and IQ3_XXS: the eighth bit makes the count even.
SIGN_CODES = np.array([c | (c.bit_count() & 1) << 7 for c in range(128)], np.uint8)
# IQ1 shifts its ternary grid by this much, up or down per group.
IQ1_DELTA = np.float32(0.125)
GRIDS = Path(__file__).with_name("iq_grids.npz")


@cache
def grid(name: str) -> NDArray[Any]:
    """The codebook of a type, small integers: one row of 4 or 8 values per index."""
    with np.load(GRIDS) as tables:
        table: NDArray[Any] = tables[name]
    table.flags.writeable = False
    return table


def lookup(name: str, index: Integers) -> Floats:
    """Rows of a codebook: [...] -> [..., 4 or 8]."""
    return floats(grid(name)[index])


def fields(words: NDArray[Any], shifts: Iterable[int], bits: int) -> Integers:
    """Bit fields at the given positions of each word: [...] -> [..., len(shifts)]."""
    positions = np.array([*shifts], words.dtype)
    cut: Integers = (words[..., None] >> positions) & ((1 << bits) - 1)
    return cut


def signs(mask: Bytes) -> Floats:
    """-1 for a set bit, +1 otherwise, lowest bit first: [...] -> [..., 8]."""
    return 1 - 2 * floats(np.unpackbits(mask[..., None], axis=-1, bitorder="little"))


class MXFP4(Quantizer, type=GGMLType.MXFP4):
    """FP4 with a power of two per block."""

    layout = np.dtype([("e", "u1"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        return FP4[split(b["qs"], 4).reshape(-1, 32)] * _e8m0_half(b["e"])[:, None]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        largest = np.abs(x).max(axis=1).astype(np.float64)
        # ggml takes log2 in F32, where values a little below a power of two round up to it
        exponent = np.floor(np.log2(largest).astype(np.float32)) - 2 + 127
        b["e"] = truncate(exponent, 255)
        q = _nearest_fp4(x, _e8m0_half(b["e"])[:, None])
        b["qs"] = join(q.reshape(-1, 2, 16), 4)
        return b


class NVFP4(Quantizer, type=GGMLType.NVFP4):
    """FP4 with an unsigned 8-bit float per 16 values."""

    layout = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])

    def dequantize(self, b: Blocks) -> Floats:
        q = split(b["qs"].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)
        return FP4[q] * _from_ue4m3(b["d"])[..., None]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        x = x.reshape(-1, 4, 16)
        b["d"] = _to_ue4m3(np.abs(x).max(axis=2) / 6)
        q = _nearest_fp4(x, _from_ue4m3(b["d"])[..., None])
        b["qs"] = join(q.reshape(-1, 4, 2, 8), 4).reshape(-1, 32)
        return b


def _e8m0_half(e: Bytes) -> Floats:
    """2**(e - 128)"""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def _from_ue4m3(d: Bytes) -> Floats:
    """Half the value of an unsigned 8-bit float: 4 bits of exponent, bias 7, 3 of mantissa."""
    exponent, mantissa = (d >> 3 & 15).astype(np.int32), floats(d & 7)
    value = np.where(
        exponent == 0, mantissa * np.float32(2**-9), np.ldexp(1 + mantissa / 8, exponent - 7)
    )
    return np.where(d == 0x7F, np.float32(0), value / 2)


def _to_ue4m3(x: Floats) -> Bytes:
    """The nearest unsigned 8-bit float, halves up; from 248 on, always 448."""
    bits = np.minimum(x, 448).astype(np.float32).view(np.uint32)
    # exponent and three mantissa bits, plus the next bit to round: a carry reaches the exponent
    normal = ((bits >> 20) + (bits >> 19 & 1)).astype(np.int32) - (120 << 3)
    normal = np.where(normal >= 15 << 3, 0x7E, normal)
    subnormal = truncate(x * 512 + np.float32(0.5), 7)
    return np.where(bits >> 23 <= 120, subnormal, normal).astype(np.uint8)


def _nearest_fp4(x: Floats, d: Floats) -> Bytes:
    """Index of the table entry with d * entry nearest to x, the first of equals."""
    errors = np.stack([np.abs(v * d - x) for v in FP4])
    nearest: Bytes = errors.argmin(axis=0).astype(np.uint8)
    return nearest


class TQ1_0(Quantizer, type=GGMLType.TQ1_0):
    """d * trit, five trits in a byte: the byte / 256 is a fraction written in base 3."""

    layout = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
    # bytes of a part, trits per byte: trit n of all bytes comes before trit n + 1
    PARTS = ((32, 5), (16, 5), (4, 4))

    def dequantize(self, b: Blocks) -> Floats:
        packed = np.concatenate([b["qs"], b["qh"]], axis=1)
        trits = []
        for count, digits in self.PARTS:
            part, packed = packed[:, :count], packed[:, count:]
            fraction = part[:, None, :] * np.array([3**n for n in range(digits)], np.uint8)[:, None]
            trits.append((fraction.astype(np.uint16) * 3 >> 8).reshape(len(b), -1))
        return (floats(np.concatenate(trits, axis=1)) - 1) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        trits, b["d"] = _ternary(x)
        packed = []
        for count, digits in self.PARTS:
            part, trits = trits[:, : count * digits], trits[:, count * digits :]
            weights = np.array([3 ** (4 - n) for n in range(digits)], np.uint16)
            number = (part.reshape(-1, digits, count) * weights[:, None]).sum(axis=1)
            packed.append((number * 256 + 242) // 243)  # rounded up: truncation gives it back
        b["qs"], b["qh"] = np.concatenate(packed[:2], axis=1), packed[2]
        return b


class TQ2_0(Quantizer, type=GGMLType.TQ2_0):
    """d * (q - 1), 2-bit q."""

    layout = np.dtype([("qs", "u1", 64), ("d", "<f2")])

    def dequantize(self, b: Blocks) -> Floats:
        q = split(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 256)
        return (floats(q) - 1) * column(b["d"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        trits, b["d"] = _ternary(x)
        b["qs"] = join(trits.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
        return b


def _ternary(x: Floats) -> tuple[Bytes, Floats]:
    """Trits 0...2 of x against the largest magnitude of the block, and that magnitude."""
    d = largest_magnitude(x)
    return truncate(roundf(x * inverse(d)) + 1, 2), d[:, 0]


class IQ2_XXS(Codec, type=GGMLType.IQ2_XXS):
    """Per 32 values: four grid rows of 8, four sign codes of 7 bits, a 4-bit scale."""

    layout = np.dtype([("d", "<f2"), ("groups", [("index", "u1", 4), ("word", "<u4")], 8)])

    def dequantize(self, b: Blocks) -> Floats:
        word = b["groups"]["word"]
        scale = column(b["d"]) * (floats(word >> 28) + 0.5) * np.float32(0.25)
        sign = signs(SIGN_CODES[fields(word, (0, 7, 14, 21), 7)])
        return scale[..., None, None] * lookup("iq2_xxs", b["groups"]["index"]) * sign


class IQ2_XS(Codec, type=GGMLType.IQ2_XS):
    """Per 8 values 9 bits of index and a sign code; a 4-bit scale per 16 values."""

    layout = np.dtype([("d", "<f2"), ("qs", "<u2", (8, 2, 2)), ("scales", "u1", 8)])

    def dequantize(self, b: Blocks) -> Floats:
        sign = signs(SIGN_CODES[b["qs"] >> 9])
        return _iq2_scale(b)[..., None, None] * lookup("iq2_xs", b["qs"] & 511) * sign


class IQ2_S(Codec, type=GGMLType.IQ2_S):
    """Per 8 values 10 bits of index and 8 signs; a 4-bit scale per 16 values."""

    layout = np.dtype(
        [
            ("d", "<f2"),
            ("qs", "u1", (8, 2, 2)),
            ("signs", "u1", (8, 2, 2)),
            ("qh", "u1", 8),
            ("scales", "u1", 8),
        ]
    )

    def dequantize(self, b: Blocks) -> Floats:
        high = fields(b["qh"], (0, 2, 4, 6), 2).astype(np.uint16).reshape(-1, 8, 2, 2)
        values = lookup("iq2_s", b["qs"] | high << 8)
        return _iq2_scale(b)[..., None, None] * values * signs(b["signs"])


def _iq2_scale(b: Blocks) -> Floats:
    """[blocks, 8, 2]: one per 16 values."""
    return (
        column(b["d"])[..., None]
        * (floats(fields(b["scales"], (0, 4), 4)) + 0.5)
        * np.float32(0.25)
    )


class IQ3_XXS(Codec, type=GGMLType.IQ3_XXS):
    """Per 32 values: eight grid rows of 4, four sign codes of 7 bits, a 4-bit scale."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", (8, 4, 2)), ("words", "<u4", 8)])

    def dequantize(self, b: Blocks) -> Floats:
        scale = column(b["d"]) * (floats(b["words"] >> 28) + 0.5) * np.float32(0.5)
        sign = signs(SIGN_CODES[fields(b["words"], (0, 7, 14, 21), 7)])
        values = lookup("iq3_xxs", b["qs"]).reshape(-1, 8, 4, 8)
        return scale[..., None, None] * values * sign


class IQ3_S(Codec, type=GGMLType.IQ3_S):
    """Per 4 values 9 bits of index, 8 signs per 8; a 4-bit scale per 32 values."""

    layout = np.dtype(
        [
            ("d", "<f2"),
            ("qs", "u1", (8, 8)),
            ("qh", "u1", 8),
            ("signs", "u1", (8, 4)),
            ("scales", "u1", 4),
        ]
    )

    def dequantize(self, b: Blocks) -> Floats:
        high = fields(b["qh"], range(8), 1).astype(np.uint16)
        values = lookup("iq3_s", b["qs"] | high << 8).reshape(-1, 8, 4, 8)
        scale = column(b["d"]) * (2 * floats(fields(b["scales"], (0, 4), 4).reshape(-1, 8)) + 1)
        return scale[..., None, None] * values * signs(b["signs"])


class IQ1_S(Codec, type=GGMLType.IQ1_S):
    """Per 8 values 11 bits of index; per 32 a 3-bit scale and the sign of the shift."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", (8, 4)), ("qh", "<u2", 8)])

    def dequantize(self, b: Blocks) -> Floats:
        qh = b["qh"]
        scale = column(b["d"]) * floats(2 * (qh >> 12 & 7) + 1)
        delta = np.where(qh & 0x8000, -IQ1_DELTA, IQ1_DELTA)[..., None, None]
        values = lookup("iq1_s", b["qs"] | fields(qh, (0, 3, 6, 9), 3) << 8)
        return scale[..., None, None] * (values + delta)


class IQ1_M(Codec, type=GGMLType.IQ1_M):
    """Per 8 values 11 bits of index and the sign of the shift; a 3-bit scale per 16.

    The block scale is spread over the upper four bits of the four scale words.
    """

    layout = np.dtype([("qs", "u1", (16, 2)), ("qh", "u1", 16), ("scales", "<u2", 4)])

    def dequantize(self, b: Blocks) -> Floats:
        quarters = (b["scales"] & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
        d = column(np.bitwise_or.reduce(quarters, axis=1).view(np.float16))
        scale = d * floats(2 * fields(b["scales"], (0, 3, 6, 9), 3).reshape(-1, 16) + 1)
        nibbles = fields(b["qh"], (0, 4), 4).astype(np.uint16)
        delta = np.where(nibbles & 8, -IQ1_DELTA, IQ1_DELTA)[..., None]
        values = lookup("iq1_s", b["qs"] | (nibbles & 7) << 8)
        return scale[..., None, None] * (values + delta)


class IQ4_NL(Quantizer, type=GGMLType.IQ4_NL):
    """d * level; the quantizer fits d to the levels without a search."""

    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        return column(b["d"]) * IQ4[split(b["qs"], 4).reshape(-1, 32)]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        g = np.ascontiguousarray(x.T)
        largest = signed_max(g, 0)[0]
        q, sum_xq, sum_q2 = _iq4_trial(g, 1 / (largest / IQ4[0]))
        fitted = (np.abs(largest) >= TINY) & (sum_q2 > 0)
        b["d"] = np.where(fitted, sum_xq / sum_q2, 0)
        b["qs"] = join(q.T.reshape(-1, 2, 16), 4)
        return b


class IQ4_XS(Quantizer, type=GGMLType.IQ4_XS):
    """8 groups of 32; d * (scale - 32) * level, 6-bit scales."""

    layout = np.dtype(
        [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", (8, 16))]
    )

    def dequantize(self, b: Blocks) -> Floats:
        low = fields(b["scales_l"], (0, 4), 4).reshape(-1, 8)
        high = fields(b["scales_h"], range(0, 16, 2), 2)
        scale = column(b["d"]) * (floats(low | high << 4) - 32)
        return scale[..., None] * IQ4[split(b["qs"], 4).reshape(-1, 8, 32)]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        g = np.ascontiguousarray(x.reshape(-1, 32).T)
        scales = _fit_iq4(g).reshape(-1, 8)
        d = signed_max(scales, 1) / np.float32(-32)
        steps = np.clip(nearest_int(inverse(d) * scales), -32, 31)
        q = _nearest_iq4(inverse(d * floats(steps)).reshape(-1) * g)
        b["d"] = d[:, 0]
        levels = (steps + 32).astype(np.uint8)
        b["scales_l"] = join(levels.reshape(-1, 4, 2, 1) & 15, 4)[..., 0]
        b["scales_h"] = (levels.astype(np.uint16) >> 4 << np.arange(0, 16, 2)).sum(axis=1)
        b["qs"] = join(q.T.reshape(-1, 8, 2, 16), 4)
        return b


def _nearest_iq4(v: Floats) -> Bytes:
    """Index of the nearest level, the upper of equals."""
    above = np.clip(np.searchsorted(IQ4, v, side="right"), 1, 15)
    return (above - (v - IQ4[above - 1] < IQ4[above] - v)).astype(np.uint8)


def _iq4_trial(x: Floats, scale: Floats) -> tuple[Bytes, Floats, Floats]:
    """Levels of scale * x with <x, q> and <q, q>, weights x**2: all [n, groups] or [groups]."""
    levels = _nearest_iq4(scale * x)
    q, w = IQ4[levels], x * x
    return levels, ordered_sum(w * q * x), ordered_sum(w * q * q)


def _fit_iq4(x: Floats) -> Floats:
    """Scales of the groups: the best of sixteen starts, each fitted to its levels."""
    largest = signed_max(x, 0)[0]
    _, sum_xq, sum_q2 = _iq4_trial(x, 1 / (-largest / IQ4[0]))
    d = np.where(sum_q2 > 0, sum_xq / sum_q2, np.float32(0))
    best = d * sum_xq
    for i in range(-7, 8):
        _, sum_xq, sum_q2 = _iq4_trial(x, (i + IQ4[0]) / largest)
        better = (sum_q2 > 0) & (sum_xq * sum_xq > best * sum_q2)
        d = np.where(better, sum_xq / sum_q2, d)
        best = np.where(better, d * sum_xq, best)
    return np.where(np.abs(largest) < TINY, np.float32(0), d)
