"""Dequantizing one block of the types of codes.py: spread in memory, then looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels.codes import CODES, Codes
from pyggml.backends.cpu.kernels.emit import V, at, load_vector
from pyggml.backends.cpu.kernels.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    Vec,
    half_to_float,
    load_ir,
    splat_ir,
)
from pyggml.backends.cpu.kernels.spread import SCALES, SPREAD_BYTES, D, stack_memory
from pyggml.dtypes import GGMLType

_FLOATS, _INTS, _BYTES = Vec("f32", 16), Vec("i32", 16), Vec("u8", 16)


def _splat(b: Any, vec: Vec, scalar: Any) -> V:
    return V(b, vec, splat_ir(b, vec.ir, scalar))


def _half(b: Any, address: Any) -> V:
    return _splat(b, _FLOATS, half_to_float(b, load_ir(b, address, F16)))


def _small_float(b: Any, address: Any) -> V:
    """Half of an unsigned 8-bit float; see tile_codes.py."""
    bits = b.shl(b.zext(load_ir(b, address, I8), I16), ir.Constant(I16, 7))
    value = half_to_float(b, b.bitcast(bits, F16))
    return _splat(b, _FLOATS, b.fmul(value, ir.Constant(F32, 128.0)))


def _odd(b: Any, address: Any) -> V:
    """2 * scale + 1."""
    scale = _splat(b, _INTS, b.zext(load_ir(b, address, I8), I32))
    return (scale << 1) + scale.constant(1)


def _values(type: GGMLType, codes: Codes, b: Any, block: Any) -> Iterator[V]:
    """All products are exact, so their order does not matter."""
    area = stack_memory(b, SPREAD_BYTES)
    codes.spread(b, block, area)
    for k in range(type.block_size // 16):
        found = load_vector(b, _BYTES, at(b, area, 16 * k)).lookup(codes.entries())
        q = V(b, _INTS, b.sext(found.value, _INTS.ir))
        if type == GGMLType.NVFP4:
            yield q.to_float() * _small_float(b, at(b, area, SCALES + k))
            continue
        if codes.scaled:
            q = q * _odd(b, at(b, area, SCALES + 16 * k // codes.scaled))
        yield q.to_float() * (_half(b, at(b, area, D)) * codes.factor)


CODE_BLOCKS: dict[GGMLType, Callable[[Any, Any], Iterator[V]]] = {
    type: partial(_values, type, codes) for type, codes in CODES.items()
}
