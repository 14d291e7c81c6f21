"""GGUF rows to panels (layouts in panels.py): whole tensors, or one panel on the fly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from llvmlite import ir
from numba import types

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    inline,
    param_int,
    register_kernel,
    src_data,
    src_nb,
)
from pyggml.backends.cpu.kernels.emit import V, at, load_vector, or_last
from pyggml.backends.cpu.kernels.simd import (
    I8,
    I16,
    I32,
    I64,
    LINE,
    Typed,
    Vec,
    intrinsic,
    load_ir,
    prefetch_ir,
    typed,
)
from pyggml.backends.cpu.panels import HALF, LAYOUTS, ROWS
from pyggml.dtypes import GGMLType

_WORDS4, _WORDS8 = Vec("i32", 4), Vec("i32", 8)


def transposed(rows: Sequence[V]) -> list[V]:
    """8 vectors of 4 words -> 4 vectors with one word of each of the 8."""
    # rows r and r + 4 share a vector, so that everything stays inside 128-bit halves
    v = [rows[r].concat(rows[r + 4]) for r in range(4)]
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs01 = [v[0].pick(low, v[1]), v[0].pick(high, v[1])]
    pairs23 = [v[2].pick(low, v[3]), v[2].pick(high, v[3])]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    return [
        x.pick(lanes, y) for x, y in zip(pairs01, pairs23, strict=True) for lanes in (first, second)
    ]


class Rows:
    """One block of each of 8 rows, and where it goes in its half of a panel's unit."""

    def __init__(self, b: Any, rows: Sequence[Any], scales: Any, quants: Any) -> None:
        self.b, self.rows = b, rows
        self.scales, self.quants = scales, quants

    def words(self, offset: int, n: int) -> list[V]:
        """n words (a multiple of 4) of each row from an offset, as n vectors."""
        result: list[V] = []
        for i in range(offset, offset + 4 * n, 16):
            parts = [load_vector(self.b, _WORDS4, at(self.b, r, i)) for r in self.rows]
            result += transposed(parts)
        return result

    def word(self, offset: int) -> V:
        """One word of each row."""
        return self._gathered(_WORDS8, I32, offset)

    def byte(self, offset: int) -> V:
        """One byte of each row, as a word."""
        return self._gathered(Vec("u32", 8), I8, offset)

    def _gathered(self, vec: Vec, stored: Any, offset: int) -> V:
        """A lane from each row, maybe of fewer bits there."""
        b, value = self.b, ir.Constant(vec.ir, ir.Undefined)
        for i, r in enumerate(self.rows):
            lane = b.zext(load_ir(b, at(b, r, offset), stored), vec.ir.element)
            value = b.insert_element(value, lane, ir.Constant(I32, i))
        return V(b, vec, value)

    def store_halfs(self, offset: int, to: int) -> None:
        """A half of each row, to the unit's scales."""
        self._gathered(Vec("i16", 8), I16, offset).store(at(self.b, self.scales, 2 * to))

    def store(self, vectors: Sequence[V], to: int) -> None:
        """Vectors one after the other, to the unit's quants."""
        for i, v in enumerate(vectors):
            v.store(at(self.b, self.quants, 2 * (to + 32 * i)))


def _fifth_bits(h: V) -> V:
    """Bit 4c + j of each word to bit c of byte j."""
    h = h.cast("u32")
    spread = [((h >> 4 * c & 15) * 0x204081 & 0x01010101) << c for c in range(8)]
    return reduce(or_, spread)


def _q4_0(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store(rows.words(2, 4), 0)


def _q4_1(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store_halfs(2, 16)
    rows.store(rows.words(4, 4), 0)


def _q5_0(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store([_fifth_bits(rows.word(2)), *rows.words(6, 4)], 0)


def _q5_1(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store_halfs(2, 16)
    rows.store([_fifth_bits(rows.word(4)), *rows.words(8, 4)], 0)


def _q8_0(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store(rows.words(2, 8), 0)


def _mxfp4(rows: Rows) -> None:
    """Scales 2**(e - 128) as floats; e < 2 gives subnormal numbers."""
    e = rows.byte(0)
    d = e.if_less(2, e.constant(0x200000) << e, (e - 1) << 23).cast("i32")
    rows.store([d, *rows.words(1, 4)], 0)


def _q2_k(rows: Rows) -> None:
    rows.store_halfs(80, 0)
    rows.store_halfs(82, 16)
    rows.store([*rows.words(0, 4), *rows.words(16, 16)], 0)


def _q3_k(rows: Rows) -> None:
    low_a, low_b, high = (rows.word(96 + 4 * i).cast("u32") for i in range(3))
    scales = [low_a, low_b, low_a >> 4, low_b >> 4]
    scales = [(s & 0x0F0F0F0F) | ((high >> 2 * i & 0x03030303) << 4) for i, s in enumerate(scales)]
    signed = [s.cast("u8") - 32 for s in scales]
    rows.store([*signed, *rows.words(0, 8), *rows.words(32, 16)], 0)
    rows.store_halfs(108, 896)


def _iq4_xs(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    # 8 scales of 6 bits: nibbles in 4 bytes, and pairs of bits in the half before them
    first, low = rows.word(0).cast("u32"), rows.word(4).cast("u32")
    high = first >> 16
    scales = []
    for i in range(2):
        four = low.constant(0)
        for j in range(4):
            sub = 4 * i + j
            value = (low >> 4 * sub & 15) | ((high >> 2 * sub & 3) << 4)
            four = four | (value << 8 * j)
        scales.append(four.cast("u8") - 32)
    rows.store([*scales, *rows.words(8, 32)], 0)


def _k_scales(rows: Rows) -> list[V]:
    """The 6-bit scales and minimums of Q4_K and Q5_K as bytes: scales 0-3, 4-7, minimums."""
    # the block starts with d and dmin, which make the first word
    _, low_scale, low_min, high = rows.words(0, 4)
    return [
        low_scale & 0x3F3F3F3F,
        (high & 0x0F0F0F0F) | (low_scale >> 2 & 0x30303030),
        low_min & 0x3F3F3F3F,
        (high >> 4 & 0x0F0F0F0F) | (low_min >> 2 & 0x30303030),
    ]


def _q4_k(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store_halfs(2, 16)
    rows.store([*_k_scales(rows), *rows.words(16, 32)], 0)


def _q5_k(rows: Rows) -> None:
    rows.store_halfs(0, 0)
    rows.store_halfs(2, 16)
    rows.store([*_k_scales(rows), *rows.words(16, 8), *rows.words(48, 32)], 0)


def _q6_k(rows: Rows) -> None:
    rows.store(rows.words(192, 4), 0)
    low, high = rows.words(0, 32), rows.words(128, 16)
    for half in range(2):
        for c in range(8):
            chunk = [low[16 * half + c], low[16 * half + 8 + c], high[8 * half + c]]
            rows.store(chunk, 128 + 96 * (8 * half + c))
    rows.store_halfs(208, 1664)


BLOCKS: dict[GGMLType, Callable[[Rows], None]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.IQ4_NL: _q4_0,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
# Where all that `Rows.store` writes starts in a unit, if not after 32 bytes of halfs.
STORED_AT = dict.fromkeys((GGMLType.Q3_K, GGMLType.Q6_K, GGMLType.MXFP4, GGMLType.NVFP4), 0)


def _block_operation(type: GGMLType) -> Any:
    """Operation (block of the first row, bytes between rows, last row, scales, quants)."""

    def operation(_: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Typed:
        def emit(b: Any, args: Any) -> None:
            block, step, last, scales, quants = args
            rows = []
            for r in range(8):
                index = or_last(b, ir.Constant(I64, r), last)
                rows.append(b.add(block, b.mul(index, step)))
                # the row that will be in its place in the next panel
                ahead = b.add(rows[-1], b.mul(step, ir.Constant(I64, ROWS)))
                for line in range(0, type.type_size, LINE):
                    prefetch_ir(b, at(b, ahead, line))
            BLOCKS[type](Rows(b, rows, scales, quants))

        i = types.intp
        return typed(types.void(i, i, i, i, i), emit)

    return intrinsic(operation)


def panel_packer(type: GGMLType) -> Any:
    """Inline function (rows, bytes between rows, number of rows, panel, blocks) that packs one
    panel; missing rows of a half repeat its last one, a missing half is left as it is."""
    block_operation = _block_operation(type)
    file_bytes = type.type_size
    unit_bytes = LAYOUTS[type].unit_bytes
    per_unit = LAYOUTS[type].values // type.block_size
    quants_at = STORED_AT.get(type, 32)
    quants_bytes = (LAYOUTS[type].nbytes - quants_at) // per_unit
    zero_halfs = _zero_halfs()

    @inline
    def pack(rows: int, step: int, n_rows: int, panel: int, n_blocks: int) -> None:
        for i in range(n_blocks):
            unit = panel + i // per_unit * unit_bytes
            part = i % per_unit
            for r in range(0, n_rows, HALF):
                block_operation(
                    rows + r * step + i * file_bytes,
                    step,
                    n_rows - r - 1,
                    unit + 2 * (16 * part + r),
                    unit + 2 * (quants_at + quants_bytes * part + 2 * r),
                )
        if n_blocks % per_unit != 0:
            zero_halfs(panel + n_blocks // per_unit * unit_bytes + 32)

    return pack


def _zero_halfs() -> Any:
    """Operation (address): 16 halfs of 0."""

    def operation(_: Any, address: Any) -> Typed:
        vec = Vec("i16", ROWS)

        def emit(b: Any, args: Any) -> None:
            V(b, vec, ir.Constant(vec.ir, None)).store(args[0])

        return typed(types.void(types.intp), emit)

    return intrinsic(operation)


def _define(type: GGMLType) -> None:
    """Kernel repack_TYPE: source rows, destination panels.

    Params: rows of a matrix, matrices, blocks, panel bytes."""
    pack = panel_packer(type)

    def repack(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_matrices = param_int(node, 0), param_int(node, 1)
        n_blocks, panel_bytes = param_int(node, 2), param_int(node, 3)
        per_matrix = (rows + ROWS - 1) // ROWS
        step = src_nb(node, 0, 1)
        start = chunk_start(per_matrix * n_matrices, chunk, n_chunks)
        for p in range(start, chunk_start(per_matrix * n_matrices, chunk + 1, n_chunks)):
            r = p % per_matrix * ROWS
            source = src_data(node, 0) + p // per_matrix * src_nb(node, 0, 2) + r * step
            pack(source, step, min(rows - r, ROWS), dst_data(node) + p * panel_bytes, n_blocks)

    register_kernel(f"repack_{type.name.lower()}", repack)


for _type in LAYOUTS:
    _define(_type)
