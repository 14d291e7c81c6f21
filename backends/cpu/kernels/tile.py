"""The bodies of the quantized products: one unit of a panel times some columns (see panels.py).

Offsets in a unit are those of panels.py, for half a panel.

For every element of the result the order of addition is the same everywhere: the exact integer
dot product of a block, then one chain of float32 fma over the blocks. So results do not depend on
the number of columns, the tile's shape or the instructions used.

Without VNNI dot products are collected in i16: |sum| <= n * 2 * q * 127 for n products of quants
up to q. The `limit` of `Dots` is an n for which it fits: 14224 for 8 of 3 bits, 30480 for 8 of 4
bits, 31496 for 4 of 5 bits, 32004 for 2 of 6 bits and 32512 for one of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels.emit import (
    V,
    add_pairs,
    at,
    broadcast,
    dot_accumulate,
    in_order,
    load_vector,
    multiply_pairs,
    tile_operation,
)
from pyggml.backends.cpu.kernels.simd import F32, HAS_VNNI, I32, Vec, half_to_float, prefetch_ir
from pyggml.backends.cpu.panels import LAYOUTS, ROWS
from pyggml.dtypes import GGMLType

AHEAD = 6144  # bytes between what is used and what is asked for


class Tile:
    """Reads one unit of a panel or of half of it, and blocks of activations of some columns."""

    def __init__(
        self,
        b: Any,
        rows: int,
        columns: int,
        column_bytes: int,
        addresses: Sequence[Any],
        asked: set[int] | None = None,
    ) -> None:
        """`asked`: cache lines of the unit asked for ahead of their use; None: none are."""
        self.b, self.rows, self.asked = b, rows, asked
        self.columns, self.column_bytes = columns, column_bytes
        self.vectors, self.halfs_at = addresses[:2]
        self.y, self.y_step = addresses[2], addresses[3]

    # ------------------------------------------------------------ weights: a lane per row
    def _load(self, vec: Vec, base: Any, offset: int) -> V:
        """Weights; a single column asks for those it will need soon: it waits for nothing else."""
        line = 2 * offset // 64 * 64
        if self.asked is not None and line not in self.asked:
            self.asked.add(line)
            prefetch_ir(self.b, at(self.b, self.vectors, AHEAD + line))
        return load_vector(self.b, vec, at(self.b, base, 2 * offset))

    def _words(self, vec: Vec, offset: int) -> V:
        return self._load(vec, self.vectors, offset)

    def quants(self, offset: int) -> V:
        """4 bytes of each row."""
        return self._words(Vec("u8", 4 * self.rows), offset)

    def words(self, offset: int) -> V:
        """An i32 of each row."""
        return self._words(Vec("i32", self.rows), offset)

    def halfs(self, offset: int) -> V:
        """A half of each row, as f32."""
        h = self._load(Vec("f16", self.rows), self.halfs_at, offset)
        return V(self.b, Vec("f32", self.rows), half_to_float(self.b, h.value))

    def floats(self, offset: int) -> V:
        """A float of each row."""
        return self._words(Vec("f32", self.rows), offset)

    # ------------------------------------------------------------ activations, repeated per row
    def block(self, index: int) -> list[Any]:
        """Addresses of block `index` of the unit, one per column."""
        y = self.y
        for _ in range(index):
            y = self.b.add(y, self.y_step)
        return [at(self.b, y, self.column_bytes * c) for c in range(self.columns)]

    def bytes4(self, address: Any, offset: int) -> V:
        return broadcast(self.b, Vec("i8", 4 * self.rows), I32, at(self.b, address, offset))

    def pair(self, address: Any, offset: int) -> V:
        """Two i16."""
        return broadcast(self.b, Vec("i16", 2 * self.rows), I32, at(self.b, address, offset))

    def number(self, address: Any, offset: int) -> V:
        return broadcast(self.b, Vec("f32", self.rows), F32, at(self.b, address, offset))

    def integer(self, address: Any, offset: int) -> V:
        return broadcast(self.b, Vec("i32", self.rows), I32, at(self.b, address, offset))

    def zero(self) -> V:
        vec = Vec("i32", self.rows)
        return V(self.b, vec, ir.Constant(vec.ir, None))


class Dots:
    """Integer dot products of a tile's rows with each column."""

    def __init__(
        self,
        tile: Tile,
        columns: Sequence[Any],
        limit: int,
        scale: V | None = None,
        start: int | None = None,
    ) -> None:
        """`columns` are addresses of blocks of activations.

        The products are multiplied by `scale` (an i32 of each row that fits i16); `start` is the
        offset of an i32 in the block that is added.
        """
        self.tile, self.columns, self.limit = tile, columns, limit
        self.scale, self.start = scale, start
        self.count = 0
        self.sums: list[V] = []  # of products: i32 with VNNI, else i16
        self.totals: list[V] = []
        if HAS_VNNI:
            self.sums = self._first()

    def _first(self) -> list[V]:
        if self.start is None:
            return [self.tile.zero() for _ in self.columns]
        return [self.tile.integer(y, self.start) for y in self.columns]

    def add(self, quants: V, offset: int) -> None:
        """Unsigned quants of 4 values, times the activations at an offset of the block."""
        for c, column in enumerate(self.columns):
            y = self.tile.bytes4(column, offset)
            if HAS_VNNI:
                self.sums[c] = dot_accumulate(self.sums[c], quants, y)
            elif self.count == 0:
                self.sums.append(multiply_pairs(quants, y))
            else:
                self.sums[c] = self.sums[c] + multiply_pairs(quants, y)
        if HAS_VNNI:
            return
        self.count += 1
        if self.count == self.limit:
            self._widen()

    def add_signed(self, quants: V, offset: int) -> None:
        """Signed quants; with VNNI shifted by 128, which `start` takes back."""
        if HAS_VNNI:
            self.add((quants ^ -128).cast("u8"), offset)
            return
        ys = [self.tile.bytes4(y, offset).with_sign_of(quants) for y in self.columns]
        sizes = quants.absolute().cast("u8")
        self.sums = [multiply_pairs(sizes, y) for y in ys]
        self._widen()

    def add_listed(self, nibbles: V, table: Sequence[int], offset: int) -> None:
        """Signed quants from a table of 16; with VNNI shifted by 128, which is to be taken back."""
        if HAS_VNNI:
            self.add(nibbles.lookup([v + 128 for v in table]), offset)
        else:
            self.add_signed(nibbles.lookup(table).cast("i8"), offset)

    def _widen(self) -> None:
        factor = _ones(self.sums[0]) if self.scale is None else _twice(self.scale)
        self.totals = added(self.totals, [add_pairs(s, factor) for s in self.sums])
        self.sums, self.count = [], 0

    def finish(self) -> list[V]:
        """The dot products in i32."""
        if HAS_VNNI:
            return self.sums if self.scale is None else [s * self.scale for s in self.sums]
        if self.sums:
            self._widen()
        return self.totals if self.start is None else added(self._first(), self.totals)


def added(before: list[V], more: list[V]) -> list[V]:
    return [a + b for a, b in zip(before, more, strict=True)] if before else more


def _ones(like: V) -> V:
    return V(like.b, like.vec, ir.Constant(like.vec.ir, [1] * like.vec.lanes))


def _twice(scale: V) -> V:
    """Each i32 as two equal i16."""
    return ((scale & 0xFFFF) | (scale << 16)).cast("i16")


# ---------------------------------------------------------------- blocks of 32
def scaled(tile: Tile, acc: list[V], dots: list[V], d: V, ys: Sequence[Any]) -> list[V]:
    """acc + (dots * d of the weights) * d of the activations.

    The products of both d, though ready earlier, would halve the speed of prompts on Zen 5.
    """
    dots = in_order(dots)
    return [
        (dot.to_float() * d).fma(tile.number(y, 0), a)
        for a, dot, y in zip(acc, dots, ys, strict=True)
    ]


def _nibbles(tile: Tile, ys: Sequence[Any], at: int, h: V | None, start: int | None) -> list[V]:
    """Dots of a block of 4-bit quants, or of 5 bits if h has the fifth."""
    dots = Dots(tile, ys, 8 if h is None else 4, start=start)
    for c in range(4):
        q = tile.quants(at + 32 * c)
        low, high = q & 15, q >> 4
        if h is not None:
            low, high = low | ((h >> c & 1) << 4), high | ((h >> (c + 4) & 1) << 4)
        dots.add(low, 8 + 4 * c)
        dots.add(high, 24 + 4 * c)
    return dots.finish()


def q4_0(tile: Tile, acc: list[V]) -> list[V]:
    for i in range(2):
        ys = tile.block(i)
        acc = scaled(tile, acc, _nibbles(tile, ys, 32 + 128 * i, None, 4), tile.halfs(16 * i), ys)
    return acc


def q5_0(tile: Tile, acc: list[V]) -> list[V]:
    for i in range(2):
        ys, at = tile.block(i), 32 + 160 * i
        dots = _nibbles(tile, ys, at + 32, tile.quants(at), 4)
        acc = scaled(tile, acc, dots, tile.halfs(16 * i), ys)
    return acc


def _with_minimum(tile: Tile, acc: list[V], dots: list[V]) -> list[V]:
    ys = tile.block(0)
    acc, m = scaled(tile, acc, dots, tile.halfs(0), ys), tile.halfs(16)
    return [m.fma(tile.number(y, 4), a) for a, y in zip(acc, ys, strict=True)]


def q4_1(tile: Tile, acc: list[V]) -> list[V]:
    return _with_minimum(tile, acc, _nibbles(tile, tile.block(0), 32, None, None))


def q5_1(tile: Tile, acc: list[V]) -> list[V]:
    return _with_minimum(tile, acc, _nibbles(tile, tile.block(0), 64, tile.quants(32), None))


def q8_0(tile: Tile, acc: list[V]) -> list[V]:
    for i in range(2):
        ys = tile.block(i)
        dots = Dots(tile, ys, 1, start=4 if HAS_VNNI else None)
        for c in range(8):
            dots.add_signed(tile.quants(32 + 256 * i + 32 * c).cast("i8"), 8 + 4 * c)
        acc = scaled(tile, acc, dots.finish(), tile.halfs(16 * i), ys)
    return acc


IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _listed(tile: Tile, ys: Sequence[Any], at: int, table: Sequence[int]) -> list[V]:
    """Dots of a block of 4-bit indices into a table."""
    dots = Dots(tile, ys, 1, start=4 if HAS_VNNI else None)
    for c in range(4):
        q = tile.quants(at + 32 * c)
        dots.add_listed(q & 15, table, 8 + 4 * c)
        dots.add_listed(q >> 4, table, 24 + 4 * c)
    return dots.finish()


def iq4_nl(tile: Tile, acc: list[V]) -> list[V]:
    for i in range(2):
        ys = tile.block(i)
        dots = _listed(tile, ys, 32 + 128 * i, IQ4_TABLE)
        acc = scaled(tile, acc, dots, tile.halfs(16 * i), ys)
    return acc


def mxfp4(tile: Tile, acc: list[V]) -> list[V]:
    ys = tile.block(0)
    return scaled(tile, acc, _listed(tile, ys, 32, MXFP4_TABLE), tile.floats(0), ys)


# ---------------------------------------------------------------- blocks of 256
SUMS16, SUMS32, QUANTS = 16, 48, 64  # offsets in a q8_K block


def times_sums(tile: Tile, words: Sequence[tuple[V, V]], sums: int) -> list[V]:
    """Sums over sub-blocks of an i16 of each row times the activations' sum.

    Each of `words` holds four sub-blocks as two vectors of pairs: 0 and 2, 1 and 3.
    """
    totals: list[V] = []
    for i, pairs in enumerate(words):
        for part, factors in enumerate(pairs):
            at = sums + 8 * i + 4 * part
            more = [add_pairs(factors, tile.pair(y, at)) for y in tile.block(0)]
            totals = added(totals, more)
    return totals


def _k45(tile: Tile, acc: list[V], fifth: int | None, quants: int) -> list[V]:
    ys, total = tile.block(0), list[V]()
    for sub in range(8):
        scale = _byte(tile.words(32 + 32 * (sub // 4)), sub % 4)
        dots = Dots(tile, ys, 8 if fifth is None else 4, scale)
        for c in range(8):
            q = tile.quants(quants + 256 * (sub // 2) + 32 * c)
            q = q >> 4 if sub % 2 else q & 15
            if fifth is not None:
                q = q | ((tile.quants(fifth + 32 * c) >> sub & 1) << 4)
            dots.add(q, QUANTS + 32 * sub + 4 * c)
        total = in_order(added(total, dots.finish()))
    acc = scaled(tile, acc, total, tile.halfs(0), ys)
    minimums = [_byte_pairs(tile.words(at)) for at in (96, 128)]
    return scaled(tile, acc, times_sums(tile, minimums, SUMS32), -tile.halfs(16), ys)


def q4_k(tile: Tile, acc: list[V]) -> list[V]:
    return _k45(tile, acc, None, 160)


def q5_k(tile: Tile, acc: list[V]) -> list[V]:
    return _k45(tile, acc, 160, 416)


def _byte(words: V, i: int) -> V:
    """Byte i of each word, unsigned."""
    return words >> 8 * i & 0xFF


def _signed_byte(words: V, i: int) -> V:
    return words << (24 - 8 * i) >> 24


def _byte_pairs(words: V) -> tuple[V, V]:
    """Bytes 0 and 2, and 1 and 3, as i16."""
    return (words & 0xFF00FF).cast("i16"), (words >> 8 & 0xFF00FF).cast("i16")


def _signed_pairs(words: V) -> tuple[V, V]:
    pairs = words.cast("i16")
    return pairs << 8 >> 8, pairs >> 8


def _less(sums: list[V], offsets: list[V], shift: int) -> list[V]:
    """sums - offsets * 2**shift: quants are stored without their sign."""
    return [s - (o << shift) for s, o in zip(sums, offsets, strict=True)]


def _sixteens(
    tile: Tile, limit: int, scale: Callable[[int], V], quants: Callable[[int, int, int], V]
) -> list[V]:
    """Scaled dots of 16 sub-blocks; quants(half, group, c): 4 values of each row, which are
    values 128 * half + 32 * group + 4 * c and the following."""
    total = list[V]()
    for half in range(2):
        for part in range(2):
            for group in range(4):
                dots = Dots(tile, tile.block(0), limit, scale(8 * half + 2 * group + part))
                for c in range(4 * part, 4 * part + 4):
                    dots.add(quants(half, group, c), QUANTS + 128 * half + 32 * group + 4 * c)
                total = in_order(added(total, dots.finish()))
    return total


def q2_k(tile: Tile, acc: list[V]) -> list[V]:
    def scale(sub: int) -> V:
        return _byte(tile.words(32 + 32 * (sub // 4)), sub % 4) & 15

    def quants(half: int, group: int, c: int) -> V:
        return tile.quants(160 + 256 * half + 32 * c) >> 2 * group & 3

    ys = tile.block(0)
    acc = scaled(tile, acc, _sixteens(tile, 8, scale, quants), tile.halfs(0), ys)
    minimums = [tile.words(32 + 32 * i) >> 4 & 0x0F0F0F0F for i in range(4)]
    sums = times_sums(tile, [_byte_pairs(m) for m in minimums], SUMS16)
    return scaled(tile, acc, sums, -tile.halfs(16), ys)


def q3_k(tile: Tile, acc: list[V]) -> list[V]:
    def scale(sub: int) -> V:
        return _signed_byte(tile.words(32 * (sub // 4)), sub % 4)

    def quants(half: int, group: int, c: int) -> V:
        high = tile.quants(128 + 32 * c) >> (4 * half + group) & 1
        return tile.quants(384 + 256 * half + 32 * c) >> 2 * group & 3 | high << 2

    total = _sixteens(tile, 8, scale, quants)
    scales = [_signed_pairs(tile.words(32 * i)) for i in range(4)]
    dots = _less(total, times_sums(tile, scales, SUMS16), 2)
    return scaled(tile, acc, dots, tile.halfs(896), tile.block(0))


def iq4_xs(tile: Tile, acc: list[V]) -> list[V]:
    ys, total = tile.block(0), list[V]()
    for sub in range(8):
        scale = _signed_byte(tile.words(32 + 32 * (sub // 4)), sub % 4)
        dots = Dots(tile, ys, 1, scale)
        for c in range(4):
            q = tile.quants(96 + 128 * sub + 32 * c)
            dots.add_listed(q & 15, IQ4_TABLE, QUANTS + 32 * sub + 4 * c)
            dots.add_listed(q >> 4, IQ4_TABLE, QUANTS + 32 * sub + 16 + 4 * c)
        total = in_order(added(total, dots.finish()))
    if HAS_VNNI:  # the table's entries were shifted by 128
        scales = [_signed_pairs(tile.words(32 + 32 * i)) for i in range(2)]
        total = _less(total, times_sums(tile, scales, SUMS32), 7)
    return scaled(tile, acc, total, tile.halfs(0), ys)


def _six_bits(tile: Tile, at: int, group: int) -> V:
    """The values of one of the four groups of 32 in 3 x 32 bytes."""
    low, h = tile.quants(at + 32 * (group % 2)), tile.quants(at + 64)
    if group < 2:
        return (low & 15) | ((h & 3) << 4 if group == 0 else (h & 12) << 2)
    return (low >> 4) | (h & 48 if group == 2 else h >> 2 & 48)


def q6_k(tile: Tile, acc: list[V]) -> list[V]:
    def scale(sub: int) -> V:
        return _signed_byte(tile.words(32 * (sub // 4)), sub % 4)

    def quants(half: int, group: int, c: int) -> V:
        return _six_bits(tile, 128 + 96 * (8 * half + c), group)

    total = _sixteens(tile, 2, scale, quants)
    scales = [_signed_pairs(tile.words(32 * i)) for i in range(4)]
    dots = _less(total, times_sums(tile, scales, SUMS16), 5)
    return scaled(tile, acc, dots, tile.halfs(1664), tile.block(0))


Body = Callable[[Tile, list[V]], list[V]]
BODIES: dict[GGMLType, Body] = {
    GGMLType.Q4_0: q4_0,
    GGMLType.Q4_1: q4_1,
    GGMLType.Q5_0: q5_0,
    GGMLType.Q5_1: q5_1,
    GGMLType.Q8_0: q8_0,
    GGMLType.IQ4_NL: iq4_nl,
    GGMLType.MXFP4: mxfp4,
    GGMLType.Q2_K: q2_k,
    GGMLType.Q3_K: q3_k,
    GGMLType.IQ4_XS: iq4_xs,
    GGMLType.Q4_K: q4_k,
    GGMLType.Q5_K: q5_k,
    GGMLType.Q6_K: q6_k,
}


def unit_operation(type: GGMLType, rows: int, columns: int) -> Any:
    """Operation (acc, vectors, halfs, activations, bytes to the next block, _, _) for many columns.

    `vectors` and `halfs` are the addresses that offsets of 4 and of 2 bytes per row count from:
    both the unit's for 16 rows or the first 8; of the other 8, HALF rows further.
    """
    layout = LAYOUTS[type]

    def emit(b: Any, acc: list[V], addresses: Sequence[Any]) -> list[V]:
        return BODIES[type](Tile(b, rows, columns, layout.activations.nbytes, addresses), acc)

    return tile_operation(rows, columns, emit)


def column_operation(type: GGMLType, rows: int) -> Any:
    """The same for all of a panel and one column, with an accumulator for each `rows` rows."""
    layout = LAYOUTS[type]

    def emit(b: Any, acc: list[V], addresses: Sequence[Any]) -> list[V]:
        result, asked = [], set[int]()
        for i, a in enumerate(acc):
            base = at(b, addresses[0], 4 * rows * i), at(b, addresses[1], 2 * rows * i)
            tile = Tile(b, rows, 1, layout.activations.nbytes, (*base, *addresses[2:]), asked)
            result += BODIES[type](tile, [a])
        return result

    return tile_operation(rows, ROWS // rows, emit)
