"""The K family: super-blocks of 256 values whose 8 or 16 groups have small scales of their own.

The quantizers search each group's scale (and minimum) for the least weighted error, then round
the scales to their few bits and the values again with the rounded scales. In the searches the
first axis runs over the values of a group, the second over all groups: [n, groups].
"""

from dataclasses import dataclass

import numpy as np

from pyggml.dtypes import GGMLType
from pyggml.quants_base import (
    TINY,
    Blocks,
    Bytes,
    Floats,
    Ints,
    Quantizer,
    column,
    floats,
    join,
    nearest_int,
    ordered_sum,
    signed_max,
    split,
)


@dataclass(frozen=True, slots=True)
class _Search:
    """Levels 0...top and the trial scales of _fit_scale_min: (top + low + step * i) / range."""

    top: int
    low: float
    step: float
    steps: int
    absolute: bool = False  # error by |difference| instead of its square

    def numerators(self) -> Floats:
        i = np.arange(self.steps + 1, dtype=np.float32)
        return np.float32(self.low) + np.float32(self.step) * i + np.float32(self.top)

    def levels(self, x: Floats, numerator: np.float32, high: Floats, minimum: Floats) -> Ints:
        return np.clip(nearest_int(numerator / (high - minimum) * (x - minimum)), 0, self.top)

    def error(self, difference: Floats, w: Floats) -> Floats:
        return ordered_sum(w * (np.abs(difference) if self.absolute else difference**2))


class Q2_K(Quantizer, type=GGMLType.Q2_K):
    """16 groups of 16; d * scale * q - dmin * min, scale and min in one byte."""

    layout = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])

    def dequantize(self, b: Blocks) -> Floats:
        scale, minimum = self._scale_min(b)
        q = split(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
        return scale[..., None] * floats(q) - minimum[..., None]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        g = _groups(x, 16)
        scales, minima, q = _fit_scale_min(g, np.abs(g), _Search(3, -0.5, 0.1, 15, absolute=True))
        b["d"], scale = _round_to_largest(scales.reshape(-1, 16), 15)
        b["dmin"], minimum = _round_to_largest(minima.reshape(-1, 16), 15)
        b["scales"] = scale | minimum << 4
        d, dmin = (a.reshape(-1) for a in self._scale_min(b))
        levels = _levels(_requantize(g + dmin, d, q, 0, 3))
        b["qs"] = join(levels.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
        return b

    @staticmethod
    def _scale_min(b: Blocks) -> tuple[Floats, Floats]:
        d, dmin = column(b["d"]), column(b["dmin"])
        return d * floats(b["scales"] & 15), dmin * floats(b["scales"] >> 4)


class Q3_K(Quantizer, type=GGMLType.Q3_K):
    """16 groups of 16; d * (scale - 32) * (q - 4), 6-bit scales, bit 2 of q in hmask."""

    layout = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])

    def dequantize(self, b: Blocks) -> Floats:
        low = split(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
        high = split(b["hmask"], 1).reshape(-1, 16, 16)
        q = floats(low | high << 2) - 4
        return (column(b["d"]) * self._scales(b))[..., None] * q

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        g = _groups(x, 16)
        scales, q = _fit_q3(g)
        scales = scales.reshape(-1, 16)
        largest = signed_max(scales, 1)
        iscale, zero = np.float32(-32) / largest, largest == 0
        level = np.where(zero, -32, np.clip(nearest_int(iscale * scales), -32, 31)) + 32
        b["d"] = np.where(zero, 0, 1 / iscale)[:, 0]
        low, high = level.astype(np.uint8) & 15, level.astype(np.uint8) >> 4
        b["scales"][:, :8] = join(low.reshape(-1, 2, 8), 4)
        b["scales"][:, 8:] = join(high.reshape(-1, 4, 4), 2)
        d = column(b["d"]) * self._scales(b)
        levels = _levels(_requantize(g, d.reshape(-1), q, -4, 3))
        b["hmask"] = join(levels.reshape(-1, 8, 32) >> 2, 1)
        b["qs"] = join(levels.reshape(-1, 2, 4, 32) & 3, 2).reshape(-1, 64)
        return b

    @staticmethod
    def _scales(b: Blocks) -> Floats:
        low = split(b["scales"][:, :8], 4).reshape(-1, 16)
        high = split(b["scales"][:, 8:], 2).reshape(-1, 16)
        return floats(low | high << 4) - 32


class Q4_K(Quantizer, type=GGMLType.Q4_K):
    """8 groups of 32; d * scale * q - dmin * min, 6-bit scales and minima."""

    layout = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])

    def dequantize(self, b: Blocks) -> Floats:
        scale, minimum = _scale_min(b)
        q = split(b["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
        return scale[..., None] * floats(q) - minimum[..., None]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        levels = _quantize_scale_min(x, b, _Search(15, -1, 0.1, 20))
        b["qs"] = join(levels.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
        return b


class Q5_K(Quantizer, type=GGMLType.Q5_K):
    """As Q4_K with a fifth bit: bit g of qh for group g."""

    layout = np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    )

    def dequantize(self, b: Blocks) -> Floats:
        scale, minimum = _scale_min(b)
        low = split(b["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
        q = low | split(b["qh"], 1) << 4
        return scale[..., None] * floats(q) - minimum[..., None]

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        levels = _quantize_scale_min(x, b, _Search(31, -0.5, 0.1, 15))
        b["qh"] = join(levels.reshape(-1, 8, 32) >> 4, 1)
        b["qs"] = join(levels.reshape(-1, 4, 2, 32) & 15, 4).reshape(-1, 128)
        return b


class Q6_K(Quantizer, type=GGMLType.Q6_K):
    """16 groups of 16; d * scale * (q - 32), 8-bit scales, bits 4 and 5 of q in qh."""

    layout = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

    def dequantize(self, b: Blocks) -> Floats:
        low = split(b["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
        high = split(b["qh"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
        q = floats(low | high << 4) - 32
        return (column(b["d"]) * floats(b["scales"]))[..., None] * q

    def quantize(self, x: Floats) -> Blocks:
        b = np.empty(len(x), self.layout)
        g = _groups(x, 16)
        scales, q = _fit_scale(g, 32)
        scales = scales.reshape(-1, 16)
        largest = signed_max(scales, 1)
        iscale = np.float32(-128) / largest
        b["d"] = (1 / iscale)[:, 0]
        b["scales"] = np.minimum(nearest_int(iscale * scales), 127)
        d = column(b["d"]) * floats(b["scales"])
        levels = _levels(_requantize(g, d.reshape(-1), q, -32, 31)).reshape(-1, 256)
        b["ql"] = join(levels.reshape(-1, 2, 2, 64) & 15, 4).reshape(-1, 128)
        b["qh"] = join(levels.reshape(-1, 2, 4, 32) >> 4, 2).reshape(-1, 64)
        b[np.abs(largest[:, 0]) < TINY] = np.zeros((), self.layout)
        return b


class Q8_K(Quantizer, type=GGMLType.Q8_K):
    """d * q with d in F32: the activations' format; bsums are the sums of 16 q."""

    layout = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])

    def dequantize(self, b: Blocks) -> Floats:
        return column(b["d"]) * floats(b["qs"])

    def quantize(self, x: Floats) -> Blocks:
        b = np.zeros(len(x), self.layout)
        largest = signed_max(x, 1)
        iscale = np.float32(-127) / largest
        q = np.where(largest == 0, 0, np.minimum(nearest_int(iscale * x), 127))
        b["d"] = np.where(largest == 0, 0, 1 / iscale)[:, 0]
        b["qs"] = q
        b["bsums"] = b["qs"].reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
        return b


def _groups(x: Floats, n: int) -> Floats:
    """[blocks, 256] -> [n, groups]"""
    return np.ascontiguousarray(x.reshape(-1, n).T)


def _levels(q: Ints) -> Bytes:
    """The inverse of _groups for quantized values: [n, groups] -> [groups, n]."""
    return np.ascontiguousarray(q.T.astype(np.uint8))


def _requantize(v: Floats, d: Floats, q: Ints, low: int, high: int) -> Ints:
    """round(v / d) - low within low...high; groups whose scale rounded to 0 keep the search's q."""
    return np.where(d == 0, q, np.clip(nearest_int(v / d), low, high) - low)


def _round_to_largest(values: Floats, top: int) -> tuple[Floats, Bytes]:
    """Per block of groups d and the values in steps of d, 0...top: [blocks, groups] each."""
    largest = np.maximum(values.max(axis=1, keepdims=True), 0)
    steps = nearest_int(np.where(largest > 0, top / largest, np.float32(0)) * values)
    return (largest / top)[:, 0], np.minimum(steps.astype(np.uint8), top)


def _scale_min(b: Blocks) -> tuple[Floats, Floats]:
    """d * scale and dmin * min of the 8 groups of Q4_K and Q5_K: [blocks, 8] each.

    Bytes 0-3 and 4-7 hold the low 6 bits of scales and minima 0-3, bytes 8-11 the low 4 bits of
    both for 4-7, whose upper two bits sit on top of bytes 0-7.
    """
    first, second, last = (b["scales"][:, i : i + 4] for i in (0, 4, 8))
    scale = np.concatenate([first & 63, last & 15 | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, last >> 4 | (second >> 6) << 4], axis=1)
    return column(b["d"]) * floats(scale), column(b["dmin"]) * floats(minimum)


def _quantize_scale_min(x: Floats, b: Blocks, search: _Search) -> Bytes:
    """Fill d, dmin and scales of Q4_K or Q5_K blocks; the levels of x: [groups, 32]."""
    g = _groups(x, 32)
    weights = np.sqrt(ordered_sum(g * g) / 32) + np.abs(g)
    scales, minima, q = _fit_scale_min(g, weights, search)
    b["d"], scale = _round_to_largest(scales.reshape(-1, 8), 63)
    b["dmin"], minimum = _round_to_largest(minima.reshape(-1, 8), 63)
    b["scales"][:, :4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    b["scales"][:, 4:8] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    b["scales"][:, 8:] = scale[:, 4:] & 15 | minimum[:, 4:] << 4
    d, dmin = (a.reshape(-1) for a in _scale_min(b))
    return _levels(_requantize(g + dmin, d, q, 0, search.top))


def _fit_scale_min(x: Floats, w: Floats, search: _Search) -> tuple[Floats, Floats, Ints]:
    """Scale, minus minimum and levels with x ~ scale * level + minimum, minimum <= 0.

    Each trial rounds with its own scale, fits scale and minimum to these levels, and stays if the
    weighted error drops; the next one starts from the minimum so far.
    """
    high, low = x.max(axis=0), np.minimum(x.min(axis=0), 0)
    sums = ordered_sum(w), ordered_sum(w * x)
    top = np.float32(search.top)
    scale, minimum = 1 / (top / (high - low)), low
    levels = search.levels(x, top, high, low)
    error = search.error(scale * floats(levels) + low - x, w)
    for numerator in search.numerators():
        trial = search.levels(x, numerator, high, minimum)
        q = floats(trial)
        trial_scale, trial_minimum = _least_squares(x, w, q, *sums)
        trial_error = search.error(trial_scale * q + trial_minimum - x, w)
        better = trial_error < error
        error = np.where(better, trial_error, error)
        scale = np.where(better, trial_scale, scale)
        minimum = np.where(better, trial_minimum, minimum)
        levels = np.where(better, trial, levels)
    flat = high == low
    return np.where(flat, 0, scale), -np.where(flat, low, minimum), np.where(flat, 0, levels)


def _least_squares(
    x: Floats, w: Floats, q: Floats, sum_w: Floats, sum_x: Floats
) -> tuple[Floats, Floats]:
    """The best scale and minimum <= 0 for given levels; NaN where all levels are equal."""
    wq = w * q
    sum_q, sum_q2, sum_xq = ordered_sum(wq), ordered_sum(wq * q), ordered_sum(wq * x)
    determinant = sum_w * sum_q2 - sum_q * sum_q
    determinant[determinant <= 0] = np.nan
    scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
    minimum = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
    positive = minimum > 0
    return np.where(positive, sum_xq / sum_q2, scale), np.where(positive, np.float32(0), minimum)


def _fit_scale(x: Floats, top: int) -> tuple[Floats, Ints]:
    """Scale and levels + top with x ~ scale * level, levels -top...top-1, weights x**2.

    Tries scales around the one that maps the largest value to -top and keeps the levels with the
    least error, measured as <x, q>**2 / <q, q>.
    """
    w = x * x
    wx = w * x
    largest = signed_max(x, 0)[0]

    def trial(scale: Floats) -> tuple[Ints, Floats, Floats]:
        levels = np.clip(nearest_int(scale * x), -top, top - 1)
        q = floats(levels)
        return levels, ordered_sum(wx * q), ordered_sum(w * q * q)

    best_q, sum_xq, sum_q2 = trial(-top / largest)
    scale = np.where(sum_q2 == 0, np.float32(0), sum_xq / sum_q2)
    best = scale * sum_xq
    for i in (*range(-9, 0), *range(1, 10)):
        q, sum_xq, sum_q2 = trial(-(top + np.float32(0.1) * np.float32(i)) / largest)
        better = (sum_q2 > 0) & (sum_xq * sum_xq > best * sum_q2)
        scale = np.where(better, sum_xq / sum_q2, scale)
        best = np.where(better, scale * sum_xq, best)
        best_q = np.where(better, q, best_q)
    zero = np.abs(largest) < TINY
    return np.where(zero, np.float32(0), scale), np.where(zero, 0, best_q + top)


def _fit_q3(x: Floats) -> tuple[Floats, Ints]:
    """Scale and levels + 4 with x ~ scale * level, levels -4...3, weights x**2.

    Starts with the largest value at -4, then moves one level after the other to its best place
    given all others, at most five rounds.
    """
    w = x * x
    wx = w * x
    largest = signed_max(x, 0)[0]
    q = floats(np.clip(nearest_int(-4 / largest * x), -4, 3))
    sum_xq, sum_q2 = ordered_sum(wx * q), ordered_sum(w * q * q)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            others_xq, others_q2 = sum_xq - wx[i] * q[i], sum_q2 - w[i] * q[i] * q[i]
            level = nearest_int(x[i] * others_q2 / others_xq)
            moved = floats(np.clip(level, -4, 3))
            moved_xq, moved_q2 = others_xq + wx[i] * moved, others_q2 + w[i] * moved * moved
            better = (others_xq > 0) & (moved != q[i]) & (moved_q2 > 0)
            better &= moved_xq * moved_xq * sum_q2 > sum_xq * sum_xq * moved_q2
            q[i] = np.where(better, moved, q[i])
            sum_xq = np.where(better, moved_xq, sum_xq)
            sum_q2 = np.where(better, moved_q2, sum_q2)
            changed |= bool(better.any())
        if not changed:
            break
    zero = np.abs(largest) < TINY
    scale = np.where(zero | (sum_q2 <= 0), np.float32(0), sum_xq / sum_q2)
    return scale, np.where(zero, 0, q.astype(np.int32) + 4)
