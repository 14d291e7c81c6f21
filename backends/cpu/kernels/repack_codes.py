"""Panels of the types of codes.py: their blocks are spread, and packed as tile_codes.py reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_

from llvmlite import ir

from pyggml.backends.cpu.kernels.codes import CODES, Codes, place
from pyggml.backends.cpu.kernels.emit import V, at
from pyggml.backends.cpu.kernels.repack import BLOCKS, Rows
from pyggml.backends.cpu.kernels.rows import steps
from pyggml.backends.cpu.kernels.simd import I64, load_ir
from pyggml.backends.cpu.kernels.spread import SCALES, SPREAD_BYTES, D, stack_memory, store_scalar
from pyggml.dtypes import GGMLType


def _spread(rows: Rows, codes: Codes) -> Rows:
    """The same rows, their blocks spread in memory; a loop, since the code is long."""
    b = rows.b
    area, table = stack_memory(b, 8 * SPREAD_BYTES), stack_memory(b, 8 * 8)
    for i, row in enumerate(rows.rows):
        store_scalar(b, row, at(b, table, 8 * i))
    with steps(b, ir.Constant(I64, 0), ir.Constant(I64, 8), 1) as i:
        row = load_ir(b, b.add(table, b.mul(i, ir.Constant(I64, 8))), I64)
        codes.spread(b, row, b.add(area, b.mul(i, ir.Constant(I64, SPREAD_BYTES))))
    spread = [at(b, area, SPREAD_BYTES * i) for i in range(8)]
    return Rows(b, spread, rows.scales, rows.quants)


def _plane(words: Sequence[V], first: int, bits: int) -> list[V]:
    """Some bits of all codes in the places of codes.py; `words` are in the order of values."""
    groups, mask = len(words) // 8, ((1 << bits) - 1) * 0x01010101
    vectors: list[list[V]] = [[] for _ in range(groups * bits)]
    for i, word in enumerate(words):
        vector, field = place(groups, bits, *divmod(i, 8))
        vectors[vector].append((word >> first & mask) << bits * field)
    return [reduce(or_, fields) for fields in vectors]


def _scale_words(rows: Rows, count: int) -> list[V]:
    """4-bit scales, 8 in a word; see tile_codes.Scales."""
    pairs = [(w | w >> 4) & 0x00FF00FF for w in rows.words(SCALES, 4)]
    return [pairs[i] | pairs[i + 1] << 8 for i in range(0, count // 4, 2)]


def _shift_word(words: Sequence[V]) -> V:
    """Bit 2 of the codes, which each 8 neighbours share; `words` are in the order of values."""
    return reduce(or_, [(w >> 2 & 1) << i for i, w in enumerate(words[::2])])


def _pack(type: GGMLType, codes: Codes, rows: Rows) -> None:
    rows, n = _spread(rows, codes), type.block_size // 4
    values = [w for i in range(0, n, 4) for w in rows.words(4 * i, 4)]
    high: list[V] = []
    if codes.high == "eight":
        high = [_shift_word(values)]
    elif codes.high == "value":
        high = _plane(values, codes.bits, 1)
    scales: list[V] = []
    if type == GGMLType.NVFP4:
        scales = [rows.word(SCALES)]
    elif codes.scaled:
        scales = _scale_words(rows, 256 // codes.scaled)
    rows.store([*scales, *high, *_plane(values, 0, codes.bits)], 0)
    if type != GGMLType.NVFP4:
        rows.store_halfs(D, 0)


BLOCKS.update({type: partial(_pack, type, codes) for type, codes in CODES.items()})
