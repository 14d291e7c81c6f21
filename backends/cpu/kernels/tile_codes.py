"""The bodies of the products with the types of codes.py, as in tile.py: one unit of a panel.

A weight is an unsigned integer less `Codes.zero`: the sum of what that makes too much is taken
from the activations' sums. So no instruction set needs signed quants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from pyggml.backends.cpu.kernels.block_parts import small_floats
from pyggml.backends.cpu.kernels.codes import CODES, Codes, place
from pyggml.backends.cpu.kernels.emit import V, in_order
from pyggml.backends.cpu.kernels.simd import Vec
from pyggml.backends.cpu.kernels.tile import (
    BODIES,
    QUANTS,
    SUMS16,
    SUMS32,
    Dots,
    Tile,
    added,
    scaled,
    times_sums,
)
from pyggml.dtypes import GGMLType


class Weights:
    """Unsigned weights of a block of `groups` times 32 values, whose codes start at `start`."""

    def __init__(self, tile: Tile, codes: Codes, groups: int, start: int) -> None:
        self.tile, self.codes, self.groups = tile, codes, groups
        self.start = start
        self.low = start + {"": 0, "eight": 32, "value": 256}[codes.high]
        self.limit = 0x7FFF // (2 * 127 * codes.largest)  # see tile.py

    def __call__(self, g: int, c: int) -> V:
        """Of each row the values 32 * g + 4 * c and the following three."""
        codes = self.codes
        if codes.high == "eight":
            return self._field(self.low, g, c, codes.bits, 3) | self._shift(g, c)
        q = self._field(self.low, g, c, codes.bits, codes.step // 2)
        if codes.high == "value":
            q = q | self._field(self.start, g, c, 1, codes.bits)
        return q if codes.step else q.lookup(codes.entries(codes.zero))

    def _field(self, start: int, g: int, c: int, bits: int, up: int) -> V:
        """A field of each byte times 2**up."""
        vector, field = place(self.groups, bits, g, c)
        q, down = self.tile.quants(start + 32 * vector), bits * field
        q = q >> down - up if down >= up else q << up - down
        return q & ((1 << bits) - 1) << up

    def _shift(self, g: int, c: int) -> V:
        """2 where IQ1 shifts 8 values up instead of down, an eighth of their step."""
        words = self.tile.words(self.start)
        return (words << 31 - (4 * g + c // 2) >> 31 & 0x02020202).cast("u8")


# ---------------------------------------------------------------- blocks of 256
_SCALES = 32  # where they start in the unit


class Scales:
    """4-bit scales n that stand for 2 * n + 1: 8 in a word, in the order 0 1 4 5 2 3 6 7."""

    def __init__(self, tile: Tile, codes: Codes) -> None:
        self.tile, self.values = tile, codes.scaled or 32
        self.count = 256 // self.values if codes.scaled else 0
        self.nbytes = 4 * self.count

    def __call__(self, sub: int) -> V | None:
        """The scale of each row, if there are any."""
        if not self.count:
            return None
        words = self.tile.words(_SCALES + 32 * (sub // 8))
        nibble = (sub & 1) | (sub >> 2 & 1) << 1 | (sub >> 1 & 1) << 2
        words = words >> 4 * nibble - 1 if nibble else words << 1
        return words & 30 | 1

    def pairs(self) -> list[tuple[V, V]]:
        """Of each 4 sub-blocks the scales 0 and 2, and 1 and 3, as i16."""
        if not self.count:
            vec = Vec("i16", 2 * self.tile.rows)
            ones = V(self.tile.b, vec, ir.Constant(vec.ir, [1] * vec.lanes))
            return [(ones, ones)] * 2
        found: list[V] = []
        for i in range(0, self.count, 8):
            words = self.tile.words(_SCALES + 4 * i)
            for shift in range(0, 16, 4):
                n = (words >> shift & 0x000F000F) << 1
                found.append((n | 0x00010001).cast("i16"))
        return list(zip(found[::2], found[1::2], strict=True))


def _k(codes: Codes, tile: Tile, acc: list[V]) -> list[V]:
    ys, total = tile.block(0), list[V]()
    scales = Scales(tile, codes)
    weights = Weights(tile, codes, 8, _SCALES + scales.nbytes)
    for sub in range(256 // scales.values):
        dots = Dots(tile, ys, weights.limit, scales(sub))
        for v in range(scales.values * sub, scales.values * (sub + 1), 4):
            dots.add(weights(v // 32, v % 32 // 4), QUANTS + v)
        total = in_order(added(total, dots.finish()))
    zeros = [(a * codes.zero, b * codes.zero) for a, b in scales.pairs()]
    sums = times_sums(tile, zeros, SUMS16 if scales.values == 16 else SUMS32)
    total = [t - s for t, s in zip(total, sums, strict=True)]
    return scaled(tile, acc, total, tile.halfs(0) * codes.factor, ys)


# ---------------------------------------------------------------- blocks of 32
def _two_blocks(codes: Codes, groups: int, tile: Tile, acc: list[V]) -> list[V]:
    """Two blocks of `groups` times 32 values, one scale each."""
    nbytes = 32 * codes.bits * groups
    for i in range(2):
        weights = Weights(tile, codes, groups, 32 + nbytes * i)
        for g in range(groups):
            ys = tile.block(groups * i + g)
            dots = Dots(tile, ys, weights.limit, start=4)
            for c in range(8):
                dots.add(weights(g, c), 8 + 4 * c)
            acc = scaled(tile, acc, dots.finish(), tile.halfs(16 * i), ys)
    return acc


def _block_scales(tile: Tile, i: int) -> V:
    """The scales of block i of four."""
    words, up = tile.words(0), 7 - 8 * i
    return small_floats(words << up if up >= 0 else words >> -up)


def _nvfp4(codes: Codes, tile: Tile, acc: list[V]) -> list[V]:
    """Four blocks of 16; the activations' blocks have a sum of each half."""
    weights = Weights(tile, codes, 2, 32)
    for sub in range(4):
        g, half = divmod(sub, 2)
        ys = tile.block(g)
        dots = Dots(tile, ys, weights.limit, start=4 + 4 * half)
        for c in range(4 * half, 4 * half + 4):
            dots.add(weights(g, c), 16 + 4 * c)
        acc = scaled(tile, acc, dots.finish(), _block_scales(tile, sub), ys)
    return acc


def _body(type: GGMLType, codes: Codes) -> Callable[[Tile, list[V]], list[V]]:
    if type == GGMLType.NVFP4:
        return partial(_nvfp4, codes)
    if type.block_size < 256:
        return partial(_two_blocks, codes, type.block_size // 32)
    return partial(_k, codes)


BODIES.update({type: _body(type, codes) for type, codes in CODES.items()})
