"""Dequantizing one block of a quantized row: the formats of pyggml.quants as emitted code.

Operation for operation the same float32 arithmetic as the NumPy reference, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels.blocks_codes import CODE_BLOCKS
from pyggml.backends.cpu.kernels.codes import FP4
from pyggml.backends.cpu.kernels.emit import V, at, load_vector
from pyggml.backends.cpu.kernels.simd import (
    F16,
    I8,
    I16,
    I32,
    Vec,
    half_to_float,
    load_ir,
    splat_ir,
)

FLOATS, INTS, BYTES = Vec("f32", 16), Vec("i32", 16), Vec("u8", 16)

# (builder, address of a block) -> its values in order, 16 at a time
Dequantize = Callable[[Any, Any], Iterator[V]]


# ---------------------------------------------------------------- pieces
def _bytes(b: Any, address: Any, offset: int) -> V:
    return load_vector(b, BYTES, at(b, address, offset))


def _ints(v: V) -> V:
    """Unsigned bytes as i32 lanes."""
    return V(v.b, INTS, v.b.zext(v.value, INTS.ir))


def _half(b: Any, address: Any, offset: int) -> V:
    """A F16 in every lane, as float32."""
    half = load_ir(b, at(b, address, offset), F16)
    return V(b, FLOATS, splat_ir(b, FLOATS.ir, half_to_float(b, half)))


def _number(b: Any, value: int) -> V:
    return V(b, INTS, ir.Constant(INTS.ir, [value] * 16))


def _splat(b: Any, scalar: Any) -> V:
    """An i32 in every lane."""
    return V(b, INTS, splat_ir(b, INTS.ir, scalar))


def _byte(b: Any, address: Any, offset: int, *, signed: bool = False) -> Any:
    raw = load_ir(b, at(b, address, offset), I8)
    return (b.sext if signed else b.zext)(raw, I32)


# ---------------------------------------------------------------- blocks of 32
def _q4_0(b: Any, block: Any) -> Iterator[V]:
    d, q = _half(b, block, 0), _bytes(b, block, 2)
    for nibble in (q & 15, q >> 4):
        yield (_ints(nibble) - _number(b, 8)).to_float() * d


def _q4_1(b: Any, block: Any) -> Iterator[V]:
    d, m, q = _half(b, block, 0), _half(b, block, 2), _bytes(b, block, 4)
    for nibble in (q & 15, q >> 4):
        yield _ints(nibble).to_float() * d + m


def _five_bits(b: Any, high: Any, q: V) -> Iterator[V]:
    """Nibbles with a fifth bit: bit j of the i32 for element j."""
    bits = _splat(b, high)
    for half, nibble in enumerate((q & 15, q >> 4)):
        lanes = V(b, INTS, ir.Constant(INTS.ir, [16 * half + j for j in range(16)]))
        bit = V(b, INTS, b.lshr(bits.value, lanes.value)) & 1
        yield _ints(nibble) | bit << 4


def _q5_0(b: Any, block: Any) -> Iterator[V]:
    d = _half(b, block, 0)
    for q in _five_bits(b, load_ir(b, at(b, block, 2), I32), _bytes(b, block, 6)):
        yield (q - _number(b, 16)).to_float() * d


def _q5_1(b: Any, block: Any) -> Iterator[V]:
    d, m = _half(b, block, 0), _half(b, block, 2)
    for q in _five_bits(b, load_ir(b, at(b, block, 4), I32), _bytes(b, block, 8)):
        yield q.to_float() * d + m


def _q8_0(b: Any, block: Any) -> Iterator[V]:
    d = _half(b, block, 0)
    for offset in (2, 18):
        q = V(b, INTS, b.sext(_bytes(b, block, offset).value, INTS.ir))
        yield q.to_float() * d


def _table(b: Any, q: V, values: tuple[int, ...]) -> V:
    """values[q] for q below 16, by comparison with each."""
    found = _number(b, values[0])
    for i, value in enumerate(values[1:], 1):
        is_i = b.icmp_signed("==", q.value, _number(b, i).value)
        found = V(b, INTS, b.select(is_i, _number(b, value).value, found.value))
    return found


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(b: Any, block: Any) -> Iterator[V]:
    d, q = _half(b, block, 0), _bytes(b, block, 2)
    for nibble in (q & 15, q >> 4):
        yield _table(b, _ints(nibble), IQ4_VALUES).to_float() * d


def _mxfp4(b: Any, block: Any) -> Iterator[V]:
    """A power of two, 2**(e - 128), times FP4; e < 2 gives subnormal numbers."""
    e, q = _splat(b, _byte(b, block, 0)), _bytes(b, block, 1)
    d = e.if_less(2, e.constant(0x200000) << e, (e - 1) << 23).cast("f32")
    for nibble in (q & 15, q >> 4):
        yield _table(b, _ints(nibble), FP4).to_float() * d


# ---------------------------------------------------------------- blocks of 256
def _scale_min(b: Any, scales: Any, j: int) -> tuple[V, V]:
    """The 6-bit scale and minimum of sub-block j (Q4_K, Q5_K)."""

    def s(i: int) -> V:
        return _splat(b, _byte(b, scales, i))

    if j < 4:
        return s(j) & 63, s(j + 4) & 63
    return (s(j + 4) & 15) | (s(j - 4) >> 6) << 4, s(j + 4) >> 4 | (s(j) >> 6) << 4


def _q4_k(b: Any, block: Any) -> Iterator[V]:
    yield from _scaled_groups(b, block, qs=16, qh=None)


def _q5_k(b: Any, block: Any) -> Iterator[V]:
    yield from _scaled_groups(b, block, qs=48, qh=16)


def _scaled_groups(b: Any, block: Any, qs: int, qh: int | None) -> Iterator[V]:
    """8 groups of 32: d * scale * q - dmin * minimum; bit j of qh is the fifth bit of group j."""
    d, dmin = _half(b, block, 0), _half(b, block, 2)
    for j in range(8):
        scale, minimum = _scale_min(b, at(b, block, 4), j)
        scale, minimum = scale.to_float() * d, minimum.to_float() * dmin
        for part in (0, 16):
            q = _ints(_bytes(b, block, qs + 32 * (j // 2) + part) >> 4 * (j % 2)) & 15
            if qh is not None:
                q = q | ((_ints(_bytes(b, block, qh + part)) >> j) & 1) << 4
            yield scale * q.to_float() - minimum


def _q6_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * scale * (q - 32)."""
    d = _half(b, block, 208)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        low = _bytes(b, block, 64 * half + 32 * (k % 2) + 16 * part) >> 4 * (k // 2) & 15
        high = _bytes(b, block, 128 + 32 * half + 16 * part) >> 2 * k & 3
        q = _ints(low) | _ints(high) << 4
        scale = _splat(b, _byte(b, block, 192 + group, signed=True)).to_float() * d
        yield scale * (q - _number(b, 32)).to_float()


def _q2_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * scale * q - dmin * minimum."""
    d, dmin = _half(b, block, 80), _half(b, block, 82)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        q = _bytes(b, block, 16 + 32 * half + 16 * part) >> 2 * k & 3
        both = _splat(b, _byte(b, block, group))
        scale, minimum = (both & 15).to_float() * d, (both >> 4).to_float() * dmin
        yield scale * _ints(q).to_float() - minimum


def _q3_k(b: Any, block: Any) -> Iterator[V]:
    """16 groups of 16: d * (scale - 32) * (q - 4), bit 2 of q in hmask."""
    d = _half(b, block, 108)
    for group in range(16):
        half, k, part = group // 8, group // 2 % 4, group % 2
        low = _bytes(b, block, 32 + 32 * half + 16 * part) >> 2 * k & 3
        high = _bytes(b, block, 16 * part) >> (4 * half + k) & 1
        q = _ints(low) | _ints(high) << 2
        low_scale = _splat(b, _byte(b, block, 96 + group % 8)) >> 4 * (group // 8) & 15
        high_scale = _splat(b, _byte(b, block, 104 + group % 4)) >> 2 * (group // 4) & 3
        scale = (low_scale | high_scale << 4) - _number(b, 32)
        yield scale.to_float() * d * (q - _number(b, 4)).to_float()


def _iq4_xs(b: Any, block: Any) -> Iterator[V]:
    """8 groups of 32: d * (scale - 32) * table[q]."""
    d = _half(b, block, 0)
    high = _splat(b, b.zext(load_ir(b, at(b, block, 2), I16), I32))
    for j in range(8):
        low_scale = _splat(b, _byte(b, block, 4 + j // 2)) >> 4 * (j % 2) & 15
        scale = (low_scale | (high >> 2 * j & 3) << 4) - _number(b, 32)
        q = _bytes(b, block, 8 + 16 * j)
        for nibble in (q & 15, q >> 4):
            yield scale.to_float() * d * _table(b, _ints(nibble), IQ4_VALUES).to_float()


# ---------------------------------------------------------------- the table
@dataclass(frozen=True, slots=True)
class Block:
    """A block format: how many values in how many bytes, and their values."""

    values: int
    nbytes: int
    dequantize: Dequantize


BLOCKS: dict[str, Block] = {
    "q4_0": Block(32, 18, _q4_0),
    "q4_1": Block(32, 20, _q4_1),
    "q5_0": Block(32, 22, _q5_0),
    "q5_1": Block(32, 24, _q5_1),
    "q8_0": Block(32, 34, _q8_0),
    "iq4_nl": Block(32, 18, _iq4_nl),
    "mxfp4": Block(32, 17, _mxfp4),
    "q2_k": Block(256, 84, _q2_k),
    "q3_k": Block(256, 110, _q3_k),
    "q4_k": Block(256, 144, _q4_k),
    "q5_k": Block(256, 176, _q5_k),
    "q6_k": Block(256, 210, _q6_k),
    "iq4_xs": Block(256, 136, _iq4_xs),
    **{t.name.lower(): Block(t.block_size, t.type_size, f) for t, f in CODE_BLOCKS.items()},
}
