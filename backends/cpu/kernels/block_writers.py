"""Quantizing one block of a row: ggml's run-time quantizers (quantized KV caches) as emitted code.

Operation for operation the float32 arithmetic of pyggml.quants, so the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.block_parts import BYTES, FLOATS, INTS
from pyggml.backends.cpu.kernels.blocks import IQ4_VALUES
from pyggml.backends.cpu.kernels.emit import V, at, load_vector, repeated
from pyggml.backends.cpu.kernels.rows import MAX, Fold, fold_lanes
from pyggml.backends.cpu.kernels.simd import (
    F16,
    F32,
    I16,
    I32,
    I64,
    call_ir,
    float_to_half,
    load_ir,
)
from pyggml.quants_base import TINY

# (builder, address of the block, address of its 32 values)
Write = Callable[[Any, Any, Any], None]
MIN = Fold(float("inf"), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))


# ---------------------------------------------------------------- pieces
def _values(b: Any, address: Any) -> list[V]:
    return [load_vector(b, FLOATS, at(b, address, 64 * i)) for i in range(2)]


def _float(value: float) -> Any:
    return ir.Constant(F32, value)


def _inverse(b: Any, d: Any) -> V:
    """1 / d, and 0 where d is 0; in every lane."""
    is_zero = b.fcmp_ordered("==", d, _float(0.0))
    return repeated(b, FLOATS, b.select(is_zero, _float(0.0), b.fdiv(_float(1.0), d)))


def _signed_max(b: Any, address: Any) -> Any:
    """The value with the largest magnitude, the first of several; with its sign."""
    magnitudes = [f.magnitude(x) for x in _values(b, address)]
    top = fold_lanes(b, MAX, [m.value for m in magnitudes])
    halves = []
    for m in magnitudes:
        is_top = b.fcmp_ordered("==", m.value, repeated(b, FLOATS, top).value)
        halves.append(b.zext(b.bitcast(is_top, I16), I32))
    bits = b.or_(halves[0], b.shl(halves[1], ir.Constant(I32, 16)))
    first = call_ir(b, "llvm.cttz.i32", I32, [bits, ir.Constant(ir.IntType(1), 0)])
    # no lane equals the largest if that is NaN: take any
    first = b.and_(first, ir.Constant(I32, 31))
    return load_ir(b, b.add(address, b.zext(b.shl(first, ir.Constant(I32, 2)), I64)), F32)


def _store_half(b: Any, address: Any, offset: int, value: Any) -> None:
    pointer = b.inttoptr(at(b, address, offset), F16.as_pointer())
    b.store(float_to_half(b, value), pointer, align=1)


def _levels(x: V, top: int) -> Any:
    """Whole part within 0 ... top, as i32 lanes."""
    limited = f.at_most(f.at_least(x, f.const(x, 0.0)), f.const(x, float(top)))
    return x.b.fptosi(limited.value, INTS.ir)


def _store_bytes(b: Any, address: Any, offset: int, lanes: Any) -> None:
    V(b, BYTES, b.trunc(lanes, BYTES.ir)).store(at(b, address, offset))


def _store_nibbles(b: Any, address: Any, offset: int, low: Any, high: Any) -> None:
    four, fifteen = (ir.Constant(low.type, [n] * 16) for n in (4, 15))
    both = b.or_(b.and_(low, fifteen), b.shl(b.and_(high, fifteen), four))
    _store_bytes(b, address, offset, both)


def _store_fifth_bits(b: Any, address: Any, offset: int, levels: list[Any]) -> None:
    """Bit j of an i32 for element j."""
    for i, lanes in enumerate(levels):
        is_set = b.icmp_signed(">", lanes, ir.Constant(lanes.type, [15] * 16))
        pointer = b.inttoptr(at(b, address, offset + 2 * i), I16.as_pointer())
        b.store(b.bitcast(is_set, I16), pointer, align=1)


# ---------------------------------------------------------------- formats
def _q8_0(b: Any, block: Any, x: Any) -> None:
    values = _values(b, x)
    top = fold_lanes(b, MAX, [f.magnitude(v).value for v in values])
    d = b.fdiv(top, _float(127.0))
    _store_half(b, block, 0, d)
    inverse = _inverse(b, d)
    for i, v in enumerate(values):
        scaled = v * inverse
        # C's roundf: half away from zero
        whole = f.trunc(scaled)
        twice = (scaled - whole) + (scaled - whole)
        level = b.fptosi((whole + f.trunc(twice)).value, INTS.ir)
        _store_bytes(b, block, 2 + 16 * i, level)


def _symmetric(b: Any, block: Any, x: Any, most: int) -> list[Any]:
    """Levels around the middle; the value of largest magnitude becomes level 0."""
    d = b.fdiv(_signed_max(b, x), _float(-float(most)))
    _store_half(b, block, 0, d)
    inverse = _inverse(b, d)
    middle = most + 0.5
    return [_levels(v * inverse + f.const(v, middle), 2 * most - 1) for v in _values(b, x)]


def _from_minimum(b: Any, block: Any, x: Any, top: int) -> list[Any]:
    """Levels above the minimum."""
    values = _values(b, x)
    low = fold_lanes(b, MIN, [v.value for v in values])
    high = fold_lanes(b, MAX, [v.value for v in values])
    d = b.fdiv(b.fsub(high, low), _float(float(top)))
    _store_half(b, block, 0, d)
    _store_half(b, block, 2, low)
    inverse, least = _inverse(b, d), repeated(b, FLOATS, low)
    return [_levels((v - least) * inverse + f.const(v, 0.5), top) for v in values]


def _q4_0(b: Any, block: Any, x: Any) -> None:
    _store_nibbles(b, block, 2, *_symmetric(b, block, x, 8))


def _q4_1(b: Any, block: Any, x: Any) -> None:
    _store_nibbles(b, block, 4, *_from_minimum(b, block, x, 15))


def _q5_0(b: Any, block: Any, x: Any) -> None:
    levels = _symmetric(b, block, x, 16)
    _store_fifth_bits(b, block, 2, levels)
    _store_nibbles(b, block, 6, *levels)


def _q5_1(b: Any, block: Any, x: Any) -> None:
    levels = _from_minimum(b, block, x, 31)
    _store_fifth_bits(b, block, 4, levels)
    _store_nibbles(b, block, 8, *levels)


def _iq4_nl(b: Any, block: Any, x: Any) -> None:
    """The nearest levels of x * (level 0 / x of largest magnitude); then d fitted to them."""
    values = _values(b, x)
    largest = b.fadd(_signed_max(b, x), _float(0.0))  # -0 counts as 0
    scale = repeated(b, FLOATS, b.fdiv(_float(1.0), b.fdiv(largest, _float(float(IQ4_VALUES[0])))))
    levels = [_nearest_iq4(v * scale) for v in values]
    terms = [(v * v * q, v, q) for v, (_, q) in zip(values, levels, strict=True)]
    sum_xq = _ordered_sum(b, [wq * v for wq, v, _ in terms])
    sum_q2 = _ordered_sum(b, [wq * q for wq, _, q in terms])
    size = call_ir(b, "llvm.fabs.f32", F32, [largest])
    fitted = b.and_(
        b.fcmp_ordered(">=", size, _float(float(TINY))), b.fcmp_ordered(">", sum_q2, _float(0.0))
    )
    _store_half(b, block, 0, b.select(fitted, b.fdiv(sum_xq, sum_q2), _float(0.0)))
    _store_nibbles(b, block, 2, *(level for level, _ in levels))


def _nearest_iq4(v: V) -> tuple[Any, V]:
    """Index of the nearest level, the upper of equals, as i32 lanes; and the level."""
    b, index = v.b, ir.Constant(INTS.ir, [0] * 16)
    level = f.const(v, float(IQ4_VALUES[0]))
    for i, (low, high) in enumerate(itertools.pairwise(IQ4_VALUES), 1):
        # NaN, from a block of zeros, is above all, as in NumPy
        is_above = b.fcmp_unordered(">=", v.value, f.const(v, (low + high) / 2).value)
        index = b.select(is_above, ir.Constant(index.type, [i] * 16), index)
        level = f.select(is_above, f.const(v, float(high)), level)
    return index, level


def _ordered_sum(b: Any, vectors: list[V]) -> Any:
    """One lane after the other, since the sum decides a byte."""
    lanes = [b.extract_element(v.value, ir.Constant(I32, i)) for v in vectors for i in range(16)]
    total = lanes[0]
    for lane in lanes[1:]:
        total = b.fadd(total, lane)
    return total


WRITERS: dict[str, Write] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
}
