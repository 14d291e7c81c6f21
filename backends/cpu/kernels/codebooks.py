"""IQ1, IQ2 and IQ3: blocks whose codes are rows of a codebook with signs, spread in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from pyggml.backends.cpu.kernels.emit import V, at, load_vector, repeated
from pyggml.backends.cpu.kernels.rows import steps
from pyggml.backends.cpu.kernels.simd import I8, I16, I32, I64, Vec, call_ir, load_ir
from pyggml.backends.cpu.kernels.spread import SCALES, D, copy_d, store_scalar
from pyggml.quants_iq import grid

_EIGHT = Vec("u8", 8)


class Codebook:
    """A grid as codes, and how a sign changes them."""

    def __init__(self, b: Any, name: str, first: int, flip: int) -> None:
        """The smallest magnitude has code `first`, the next ones follow; signs flip bits."""
        self.b, self.flip = b, flip
        magnitudes, codes = np.unique(grid(name), return_inverse=True)
        assert len(magnitudes) <= 8
        table = (codes + first).astype(np.uint8)
        self.width = len(grid(name)[0])
        self.base = _constant(b, f"codes_{name}", table.tobytes())

    def row(self, index: Any) -> V:
        """The codes of an i32 index."""
        offset = _times(self.b, self.b.zext(index, I64), self.width)
        return load_vector(self.b, Vec("u8", self.width), self.b.add(self.base, offset))

    def store(self, codes: V, signs: Any, address: Any) -> None:
        """8 codes, flipped where the byte `signs` (i8) has a bit, lowest first."""
        b = self.b
        bits = V(b, _EIGHT, ir.Constant(_EIGHT.ir, [1 << i for i in range(8)]))
        chosen = repeated(b, _EIGHT, signs) & bits
        chosen.if_less(1, codes, codes ^ self.flip).store(address)


def _constant(b: Any, name: str, data: bytes) -> Any:
    """Address of constant bytes; the same of every use in a module."""
    found = b.module.globals.get(name)
    if found is None:
        kind = ir.ArrayType(I8, len(data))
        found = ir.GlobalVariable(b.module, kind, name)
        found.initializer = ir.Constant(kind, bytearray(data))
        found.global_constant, found.linkage = True, "internal"
    return b.ptrtoint(found, I64)


# ---------------------------------------------------------------- pieces
def _times(b: Any, value: Any, factor: int) -> Any:
    return b.mul(value, ir.Constant(value.type, factor))


def _field(b: Any, word: Any, shift: Any, bits: int) -> Any:
    """Bits of a word from a place on; `shift` is a number or a word."""
    if isinstance(shift, int):
        shift = ir.Constant(word.type, shift)
    return b.and_(b.lshr(word, shift), ir.Constant(word.type, (1 << bits) - 1))


def _byte(b: Any, address: Any, offset: int = 0) -> Any:
    """As i32."""
    return b.zext(load_ir(b, at(b, address, offset), I8), I32)


def _half(b: Any, address: Any, offset: int = 0) -> Any:
    """16 bits as i32."""
    return b.zext(load_ir(b, at(b, address, offset), I16), I32)


def _joined(b: Any, low: Any, high: Any, shift: int) -> Any:
    return b.or_(low, b.shl(high, ir.Constant(I32, shift)))


def _even(b: Any, code: Any) -> Any:
    """8 signs of 7 bits: the eighth makes their number even."""
    parity = b.and_(call_ir(b, "llvm.ctpop.i32", I32, [code]), ir.Constant(I32, 1))
    return b.trunc(_joined(b, code, parity, 7), I8)


class Group:
    """One of the 8 groups of 32 values of a block, in a loop over them."""

    def __init__(self, b: Any, block: Any, to: Any, g: Any) -> None:
        self.b, self.block, self.to, self.g = b, block, to, g

    def part(self, offset: int, nbytes: int) -> Any:
        """Address of the group's part of a field with so many bytes per group."""
        return at(self.b, self.b.add(self.block, _times(self.b, self.g, nbytes)), offset)

    def eighth(self, i: int) -> Any:
        """Where 8 codes go."""
        return at(self.b, self.b.add(self.to, _times(self.b, self.g, 32)), 8 * i)

    def scale(self, value: Any, i: int = 0, n: int = 1) -> None:
        """Scale i of the n that a group has."""
        address = self.b.add(self.to, _times(self.b, self.g, n))
        store_scalar(self.b, self.b.trunc(value, I8), at(self.b, address, SCALES + i))

    def nibble_scales(self, offset: int) -> None:
        """Two scales of 4 bits."""
        both = _byte(self.b, self.part(offset, 1))
        for i in range(2):
            self.scale(_field(self.b, both, 4 * i, 4), i, 2)

    def parity(self) -> Any:
        """0 or 4: the place of the group's nibble in a byte for two groups."""
        return _times(self.b, self.b.and_(self.b.trunc(self.g, I32), ir.Constant(I32, 1)), 4)


def _groups(b: Any) -> Any:
    return steps(b, ir.Constant(I64, 0), ir.Constant(I64, 8), 1)


# ---------------------------------------------------------------- IQ2
def iq2_xxs(b: Any, block: Any, to: Any) -> None:
    """Per group 4 indices, and a word of 4 sign codes and the scale."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq2_xxs", 0, 4)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        indices = group.part(2, 8)
        word = load_ir(b, at(b, indices, 4), I32)
        for i in range(4):
            signs = _even(b, _field(b, word, 7 * i, 7))
            book.store(book.row(_byte(b, indices, i)), signs, group.eighth(i))
        group.scale(_field(b, word, 28, 4))


def iq2_xs(b: Any, block: Any, to: Any) -> None:
    """Per 8 values 9 bits of index and a sign code."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq2_xs", 0, 4)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        for i in range(4):
            q = _half(b, group.part(2, 8), 2 * i)
            signs = _even(b, _field(b, q, 9, 7))
            book.store(book.row(_field(b, q, 0, 9)), signs, group.eighth(i))
        group.nibble_scales(66)


def iq2_s(b: Any, block: Any, to: Any) -> None:
    """Per 8 values 10 bits of index and 8 signs."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq2_s", 0, 4)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        high = _byte(b, group.part(66, 1))
        for i in range(4):
            index = _joined(b, _byte(b, group.part(2, 4), i), _field(b, high, 2 * i, 2), 8)
            signs = load_ir(b, at(b, group.part(34, 4), i), I8)
            book.store(book.row(index), signs, group.eighth(i))
        group.nibble_scales(74)


# ---------------------------------------------------------------- IQ3
def iq3_xxs(b: Any, block: Any, to: Any) -> None:
    """Per group 8 indices of 4 values, and elsewhere a word of 4 sign codes and the scale."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq3_xxs", 0, 8)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        word = load_ir(b, group.part(66, 4), I32)
        for i in range(4):
            first, second = (book.row(_byte(b, group.part(2, 8), 2 * i + j)) for j in range(2))
            signs = _even(b, _field(b, word, 7 * i, 7))
            book.store(first.concat(second), signs, group.eighth(i))
        group.scale(_field(b, word, 28, 4))


def iq3_s(b: Any, block: Any, to: Any) -> None:
    """Per 4 values 9 bits of index, 8 signs per 8."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq3_s", 8, 15)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        high = _byte(b, group.part(66, 1))
        for i in range(4):
            rows = []
            for k in (2 * i, 2 * i + 1):
                index = _joined(b, _byte(b, group.part(2, 8), k), _field(b, high, k, 1), 8)
                rows.append(book.row(index))
            signs = load_ir(b, at(b, group.part(74, 4), i), I8)
            book.store(rows[0].concat(rows[1]), signs, group.eighth(i))
        half = b.lshr(g, ir.Constant(I64, 1))
        both = _byte(b, b.add(block, half), 106)
        group.scale(_field(b, both, group.parity(), 4))


# ---------------------------------------------------------------- IQ1
def _upward(b: Any, is_down: Any) -> Any:
    """All 8 bits set if the shift of 8 values goes up: bit 0 of an i32 is 0."""
    return b.trunc(b.sub(is_down, ir.Constant(I32, 1)), I8)


def iq1_s(b: Any, block: Any, to: Any) -> None:
    """Per 8 values 11 bits of index; per 32 a 3-bit scale and the sign of the shift."""
    copy_d(b, block, to, 0)
    book = Codebook(b, "iq1_s", 0, 4)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        high = _half(b, group.part(34, 2))
        for i in range(4):
            index = _joined(b, _byte(b, group.part(2, 4), i), _field(b, high, 3 * i, 3), 8)
            book.store(book.row(index), _upward(b, _field(b, high, 15, 1)), group.eighth(i))
        group.scale(_field(b, high, 12, 3))


def iq1_m(b: Any, block: Any, to: Any) -> None:
    """Per 8 values 11 bits of index and the sign of the shift; a 3-bit scale per 16.

    d is spread over the upper four bits of the four scale words.
    """
    d = ir.Constant(I32, 0)
    for i in range(4):
        d = _joined(b, d, _field(b, _half(b, block, 48 + 2 * i), 12, 4), 4 * i)
    store_scalar(b, b.trunc(d, I16), at(b, to, D))
    book = Codebook(b, "iq1_s", 0, 4)
    with _groups(b) as g:
        group = Group(b, block, to, g)
        for i in range(4):
            high = _field(b, _byte(b, group.part(32, 2), i // 2), 4 * (i % 2), 4)
            index = _joined(b, _byte(b, group.part(0, 4), i), _field(b, high, 0, 3), 8)
            book.store(book.row(index), _upward(b, _field(b, high, 3, 1)), group.eighth(i))
        # two groups share a word of four scales
        pair = _times(b, b.lshr(g, ir.Constant(I64, 1)), 2)
        scales = b.lshr(_half(b, b.add(block, pair), 48), _three_halves(b, group.parity()))
        for i in range(2):
            group.scale(_field(b, scales, 3 * i, 3), i, 2)


def _three_halves(b: Any, n: Any) -> Any:
    """n * 3 / 2: from the place of a nibble to that of two fields of 3 bits."""
    return b.lshr(_times(b, n, 3), ir.Constant(I32, 1))
