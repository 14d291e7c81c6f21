"""Dequantizing one block of a quantized row: the formats of pyggml.quants as emitted code.

Operation for operation the same float32 arithmetic as the NumPy reference, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels.block_parts import (
    INTS,
    entries,
    load_byte,
    load_bytes,
    load_half,
    unsigned,
)
from pyggml.backends.cpu.kernels.blocks_codes import CODE_BLOCKS
from pyggml.backends.cpu.kernels.codes import FP4
from pyggml.backends.cpu.kernels.emit import V, at, repeated
from pyggml.backends.cpu.kernels.simd import I16, I32, load_ir
from pyggml.dtypes import GGMLType

# (builder, address of a block) -> its values in order, 16 at a time
Dequantize = Callable[[Any, Any], Iterator[V]]


# ---------------------------------------------------------------- blocks of 32
def _q4_0(b: Any, block: Any) -> Iterator[V]:
    d, q = load_half(b, block, 0), load_bytes(b, block, 2)
    for nibble in (q & 15, q >> 4):
        yield (unsigned(nibble) - 8).to_float() * d


def _q4_1(b: Any, block: Any) -> Iterator[V]:
    d, m, q = load_half(b, block, 0), load_half(b, block, 2), load_bytes(b, block, 4)
    for nibble in (q & 15, q >> 4):
        yield unsigned(nibble).to_float() * d + m


def _five_bits(b: Any, high: Any, q: V) -> Iterator[V]:
    """Nibbles with a fifth bit: bit j of the i32 for element j."""
    bits = repeated(b, INTS, high)
    for half, nibble in enumerate((q & 15, q >> 4)):
        lanes = V(b, INTS, ir.Constant(INTS.ir, [16 * half + j for j in range(16)]))
        bit = V(b, INTS, b.lshr(bits.value, lanes.value)) & 1
        yield unsigned(nibble) | bit << 4


def _q5_0(b: Any, block: Any) -> Iterator[V]:
    d = load_half(b, block, 0)
    for q in _five_bits(b, load_ir(b, at(b, block, 2), I32), load_bytes(b, block, 6)):
        yield (q - 16).to_float() * d


def _q5_1(b: Any, block: Any) -> Iterator[V]:
    d, m = load_half(b, block, 0), load_half(b, block, 2)
    for q in _five_bits(b, load_ir(b, at(b, block, 4), I32), load_bytes(b, block, 8)):
        yield q.to_float() * d + m


def _q8_0(b: Any, block: Any) -> Iterator[V]:
    d = load_half(b, block, 0)
    for offset in (2, 18):
        q = V(b, INTS, b.sext(load_bytes(b, block, offset).value, INTS.ir))
        yield q.to_float() * d


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(b: Any, block: Any) -> Iterator[V]:
    d, q = load_half(b, block, 0), load_bytes(b, block, 2)
    for nibble in (q & 15, q >> 4):
        yield entries(nibble, IQ4_VALUES).to_float() * d


def _mxfp4(b: Any, block: Any) -> Iterator[V]:
    """A power of two, 2**(e - 128), times FP4; e < 2 gives subnormal numbers."""
    e, q = load_byte(b, block, 0), load_bytes(b, block, 1)
    d = e.if_less(2, e.constant(0x200000) << e, (e - 1) << 23).cast("f32")
    for nibble in (q & 15, q >> 4):
        yield entries(nibble, FP4).to_float() * d


# ---------------------------------------------------------------- blocks of 256
def _scale_min(b: Any, scales: Any, j: int) -> tuple[V, V]:
    """The 6-bit scale and minimum of sub-block j (Q4_K, Q5_K)."""

    def s(i: int) -> V:
        return load_byte(b, scales, i)

    if j < 4:
        return s(j) & 63, s(j + 4) & 63
    return (s(j + 4) & 15) | (s(j - 4) >> 6) << 4, s(j + 4) >> 4 | (s(j) >> 6) << 4


def _q4_k(b: Any, block: Any) -> Iterator[V]:
    yield from _scaled_groups(b, block, qs=16, qh=None)


def _q5_k(b: Any, block: Any) -> Iterator[V]:
    yield from _scaled_groups(b, block, qs=48, qh=16)


def _scaled_groups(b: Any, block: Any, qs: int, qh: int | None) -> Iterator[V]:
    """8 groups of 32: d * scale * q - dmin * minimum; bit j of qh is the fifth bit of group j."""
    d, dmin = load_half(b, block, 0), load_half(b, block, 2)
    for j in range(8):
        scale, minimum = _scale_min(b, at(b, block, 4), j)
        scale, minimum = scale.to_float() * d, minimum.to_float() * dmin
        for part in (0, 16):
            q = unsigned(load_bytes(b, block, qs + 32 * (j // 2) + part) >> 4 * (j % 2)) & 15
            if qh is not None:
                q = q | ((unsigned(load_bytes(b, block, qh + part)) >> j) & 1) << 4
            yield scale * q.to_float() - minimum


def _q6_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * scale * (q - 32)."""
    d = load_half(b, block, 208)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        low = load_bytes(b, block, 64 * half + 32 * (k % 2) + 16 * part) >> 4 * (k // 2) & 15
        high = load_bytes(b, block, 128 + 32 * half + 16 * part) >> 2 * k & 3
        q = unsigned(low) | unsigned(high) << 4
        scale = load_byte(b, block, 192 + group, signed=True).to_float() * d
        yield scale * (q - 32).to_float()


def _q2_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * scale * q - dmin * minimum."""
    d, dmin = load_half(b, block, 80), load_half(b, block, 82)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        q = load_bytes(b, block, 16 + 32 * half + 16 * part) >> 2 * k & 3
        both = load_byte(b, block, group)
        scale, minimum = (both & 15).to_float() * d, (both >> 4).to_float() * dmin
        yield scale * unsigned(q).to_float() - minimum


def _q3_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * (scale - 32) * (q - 4), bit 2 of q in hmask."""
    d = load_half(b, block, 108)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        low = load_bytes(b, block, 32 + 32 * half + 16 * part) >> 2 * k & 3
        high = load_bytes(b, block, 16 * part) >> (4 * half + k) & 1
        q = unsigned(low) | unsigned(high) << 2
        low_scale = load_byte(b, block, 96 + group % 8) >> 4 * (group // 8) & 15
        high_scale = load_byte(b, block, 104 + group % 4) >> 2 * (group // 4) & 3
        scale = (low_scale | high_scale << 4) - 32
        yield scale.to_float() * d * (q - 4).to_float()


def _iq4_xs(b: Any, block: Any) -> Iterator[V]:
    """8 groups of 32: d * (scale - 32) * table[q]."""
    d = load_half(b, block, 0)
    high = repeated(b, INTS, b.zext(load_ir(b, at(b, block, 2), I16), I32))
    for j in range(8):
        low_scale = load_byte(b, block, 4 + j // 2) >> 4 * (j % 2) & 15
        scale = (low_scale | (high >> 2 * j & 3) << 4) - 32
        q = load_bytes(b, block, 8 + 16 * j)
        for nibble in (q & 15, q >> 4):
            yield scale.to_float() * d * entries(nibble, IQ4_VALUES).to_float()


# ---------------------------------------------------------------- the table
@dataclass(frozen=True, slots=True)
class Block:
    """A block format: how many values in how many bytes, and their values."""

    values: int
    nbytes: int
    dequantize: Dequantize


T = GGMLType
_DEQUANTIZED: dict[GGMLType, Dequantize] = {
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
    T.Q8_0: _q8_0,
    T.IQ4_NL: _iq4_nl,
    T.MXFP4: _mxfp4,
    T.Q2_K: _q2_k,
    T.Q3_K: _q3_k,
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
    T.IQ4_XS: _iq4_xs,
    **CODE_BLOCKS,
}
BLOCKS = {
    t.name.lower(): Block(t.block_size, t.type_size, dequantize)
    for t, dequantize in _DEQUANTIZED.items()
}
