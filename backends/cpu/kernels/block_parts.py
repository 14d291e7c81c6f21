"""Pieces of dequantizing a block: its fields as 16 lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml.backends.cpu.kernels.emit import V, at, load_vector, repeated
from pyggml.backends.cpu.kernels.simd import F16, I8, I32, Vec, half_to_float, load_ir

FLOATS, INTS, BYTES = Vec("f32", 16), Vec("i32", 16), Vec("u8", 16)


def load_bytes(b: Any, address: Any, offset: int) -> V:
    """16 bytes."""
    return load_vector(b, BYTES, at(b, address, offset))


def load_half(b: Any, address: Any, offset: int) -> V:
    """A F16 in every lane, as float32."""
    return repeated(b, FLOATS, half_to_float(b, load_ir(b, at(b, address, offset), F16)))


def load_byte(b: Any, address: Any, offset: int, *, signed: bool = False) -> V:
    """A byte in every lane, as i32."""
    raw = load_ir(b, at(b, address, offset), I8)
    return repeated(b, INTS, (b.sext if signed else b.zext)(raw, I32))


def unsigned(v: V) -> V:
    """Bytes as i32 lanes."""
    return V(v.b, INTS, v.b.zext(v.value, INTS.ir))


def entries(q: V, table: Sequence[int]) -> V:
    """Entries of a table of 16 signed bytes at these indices, as i32 lanes."""
    return V(q.b, INTS, q.b.sext(q.lookup(table).value, INTS.ir))


def small_floats(bits: V) -> V:
    """Halves of unsigned 8-bit floats (4 bits of exponent, 3 below), which are bits 7 to 14 of
    32-bit lanes."""
    b, lanes = bits.b, bits.vec.lanes
    vec = Vec("i16", lanes)
    halfs = V(b, vec, b.trunc((bits & 0x7F80).value, vec.ir)).cast("f16")
    # a half's exponent is biased by 15, this one by 7
    return V(b, Vec("f32", lanes), half_to_float(b, halfs.value)) * 128
