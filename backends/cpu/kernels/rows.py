"""Loops over the elements of a row, as single operations for Numba.

A row operation runs over n elements with as many lanes as the CPU has and masks the rest, so every
element is computed alike wherever it stands. Sums are made of ROW_SUMS partial sums per lane in an
order that depends on n alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.kernels.emit import V, at, first_lanes, repeated
from pyggml.backends.cpu.kernels.simd import (
    F16,
    F32,
    HAS_AVX512,
    I16,
    I32,
    I64,
    Typed,
    Vec,
    call_ir,
    float_to_half,
    half_to_float,
    intrinsic,
    literal_intrinsic,
    load_ir,
    shuffle_ir,
    typed,
)

LANES = 16 if HAS_AVX512 else 8
LANE = Vec("f32", LANES)
ROW_SUMS = 4


# ---------------------------------------------------------------- stored types
@dataclass(frozen=True, slots=True)
class Stored:
    """How elements of a type lie in memory and become float32 lanes."""

    size: int
    irt: Any  # of an element in memory
    decode: Callable[[Any, Any], Any]  # (builder, stored lanes) -> float lanes
    encode: Callable[[Any, Any], Any]

    def load(self, b: Any, address: Any, lanes: int, n: Any = None) -> V:
        """`lanes` elements, or only the first n (i32), the others 0."""
        vec_ir = ir.VectorType(self.irt, lanes)
        if n is None:
            raw = load_ir(b, address, vec_ir)
        else:
            pointer = b.inttoptr(address, vec_ir.as_pointer())
            args = [
                pointer,
                ir.Constant(I32, 1),
                first_lanes(b, lanes, n),
                ir.Constant(vec_ir, None),
            ]
            raw = call_ir(b, f"llvm.masked.load.{_suffix(self.irt, lanes)}.p0", vec_ir, args)
        return V(b, Vec("f32", lanes), self.decode(b, raw))

    def store(self, b: Any, address: Any, v: V, n: Any = None) -> None:
        """All lanes, or only the first n (i32)."""
        raw = self.encode(b, v.value)
        pointer = b.inttoptr(address, raw.type.as_pointer())
        if n is None:
            b.store(raw, pointer, align=1)
            return
        lanes = v.vec.lanes
        args = [raw, pointer, ir.Constant(I32, 1), first_lanes(b, lanes, n)]
        call_ir(b, f"llvm.masked.store.{_suffix(self.irt, lanes)}.p0", ir.VoidType(), args)


def _suffix(irt: Any, lanes: int) -> str:
    return f"v{lanes}{'f32' if irt == F32 else f'i{irt.width}'}"


def _as(b: Any, value: Any, irt: Any) -> Any:
    """The same bits as lanes of another type of the same width."""
    return b.bitcast(value, ir.VectorType(irt, value.type.count))


def _constant(value: Any, number: int) -> Any:
    return ir.Constant(value.type, [number] * value.type.count)


def _decode_bf16(b: Any, raw: Any) -> Any:
    wide = b.zext(raw, ir.VectorType(I32, raw.type.count))
    return _as(b, b.shl(wide, _constant(wide, 16)), F32)


def _encode_bf16(b: Any, x: Any) -> Any:
    """The upper half, rounded to nearest even; NaN stays NaN."""
    bits = _as(b, x, I32)
    high = b.lshr(bits, _constant(bits, 16))
    odd = b.and_(high, _constant(bits, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, _constant(bits, 0x7FFF))), _constant(bits, 16))
    magnitude = b.and_(bits, _constant(bits, 0x7FFFFFFF))
    is_nan = b.icmp_unsigned(">", magnitude, _constant(bits, 0x7F800000))
    quiet = b.or_(high, _constant(bits, 0x40))
    return b.trunc(b.select(is_nan, quiet, rounded), ir.VectorType(I16, x.type.count))


STORED: dict[str, Stored] = {
    "f32": Stored(4, F32, lambda b, raw: raw, lambda b, x: x),
    "f16": Stored(
        2,
        I16,
        lambda b, raw: half_to_float(b, _as(b, raw, F16)),
        lambda b, x: _as(b, float_to_half(b, x), I16),
    ),
    "bf16": Stored(2, I16, _decode_bf16, _encode_bf16),
    "i32": Stored(
        4,
        I32,
        lambda b, raw: b.sitofp(raw, ir.VectorType(F32, raw.type.count)),
        lambda b, x: b.fptosi(x, ir.VectorType(I32, x.type.count)),
    ),
    # any two bytes, to be moved: they travel in the lower half of a lane
    "raw2": Stored(
        2,
        I16,
        lambda b, raw: _as(b, b.zext(raw, ir.VectorType(I32, raw.type.count)), F32),
        lambda b, x: b.trunc(_as(b, x, I32), ir.VectorType(I16, x.type.count)),
    ),
}


# ---------------------------------------------------------------- folds
@dataclass(frozen=True, slots=True)
class Fold:
    """How the values of a row become one number."""

    neutral: float
    combine: Callable[[Any, Any, Any], Any]  # of LLVM vectors


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


SUM = Fold(0.0, lambda b, x, y: b.fadd(x, y))
MAX = Fold(float("-inf"), _larger)


def fold_lanes(b: Any, fold: Fold, values: Sequence[Any]) -> Any:
    """Partial results to one scalar: neighbours pair up, then the upper half onto the lower."""
    values = list(values)
    while len(values) > 1:
        values = [fold.combine(b, *values[i : i + 2]) for i in range(0, len(values), 2)]
    x, n = values[0], values[0].type.count
    while n > 1:
        n //= 2
        low, high = shuffle_ir(b, x, x, range(n)), shuffle_ir(b, x, x, range(n, 2 * n))
        x = fold.combine(b, low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


# ---------------------------------------------------------------- row operations
# (source vectors, constants) -> the vector to store, or to fold; or both
Emit = Callable[[list[V], list[V]], V | tuple[V, V]]


@dataclass(frozen=True, slots=True)
class Row:
    """A loop over the elements of a row."""

    emit: Emit
    sources: tuple[str, ...] = ("f32",)
    target: str | None = "f32"
    fold: Fold | None = None
    unroll: int = 1

    def operation(self) -> Any:
        """Operation (target, source, second source, n, four constants) -> the fold, or 0.

        The target may be one of the sources: elements are stored after they were loaded.
        """

        def row(_: Any, d: Any, x: Any, y: Any, n: Any, p: Any, q: Any, r: Any, s: Any) -> Typed:
            i, f = types.intp, types.float32
            return typed(f(i, i, i, i, f, f, f, f), self.loop)

        return intrinsic(row)

    def loop(self, b: Any, args: Any) -> Any:
        addresses, n = args[:3], args[3]
        constants = [repeated(b, LANE, c) for c in args[4:]]
        n_sums = ROW_SUMS if self.fold else 1
        neutral = self.fold.neutral if self.fold else 0.0
        sums = running_sums(b, n_sums, neutral)
        unroll = max(self.unroll, n_sums)
        whole = _floor(b, n, unroll * LANES)
        with steps(b, ir.Constant(I64, 0), whole, unroll * LANES) as i:
            for k in range(unroll):
                self._step(b, addresses, at(b, i, k * LANES), constants, sums[k % n_sums])
        vectors = _floor(b, n, LANES)
        if unroll > 1:
            with steps(b, whole, vectors, LANES) as i:
                self._step(b, addresses, i, constants, sums[0])
        rest = b.sub(n, vectors)
        with b.if_then(b.icmp_signed(">", rest, ir.Constant(I64, 0))):
            self._step(b, addresses, vectors, constants, sums[0], b.trunc(rest, I32))
        if self.fold is None:
            return ir.Constant(F32, 0.0)
        return fold_lanes(b, self.fold, [b.load(s) for s in sums])

    def _step(
        self, b: Any, addresses: Any, i: Any, constants: list[V], total: Any, n: Any = None
    ) -> None:
        """One vector of elements from index i on; n: only so many."""
        values = []
        for address, name in zip(addresses[1:], self.sources, strict=False):
            kind = STORED[name]
            values.append(kind.load(b, element(b, address, i, kind.size), LANES, n))
        result = self.emit(values, constants)
        stored, folded = result if isinstance(result, tuple) else (result, result)
        if self.target:
            kind = STORED[self.target]
            kind.store(b, element(b, addresses[0], i, kind.size), stored, n)
        if self.fold:
            value = folded.value
            if n is not None:
                neutral = ir.Constant(LANE.ir, [self.fold.neutral] * LANES)
                value = b.select(first_lanes(b, LANES, n), value, neutral)
            b.store(self.fold.combine(b, b.load(total), value), total)


def for_lanes(b: Any, n: Any, step: Callable[[Any, Any], None]) -> None:
    """step(i, None) for each LANES of n elements, then step(i, rest) if some are left."""
    vectors = _floor(b, n, LANES)
    with steps(b, ir.Constant(I64, 0), vectors, LANES) as i:
        step(i, None)
    rest = b.sub(n, vectors)
    with b.if_then(b.icmp_signed(">", rest, ir.Constant(I64, 0))):
        step(vectors, b.trunc(rest, I32))


def _floor(b: Any, n: Any, multiple: int) -> Any:
    """n rounded down to a multiple, a power of two."""
    return b.and_(n, ir.Constant(I64, -multiple))


def steps(b: Any, start: Any, stop: Any, step: int) -> Any:
    """A loop from start to stop, as a context whose value is the index."""
    return _Index(cgutils.for_range_slice(b, start, stop, ir.Constant(I64, step), I64, inc=True))


def running_sums(b: Any, n: int, neutral: float = 0.0) -> list[Any]:
    """Pointers to n vectors of the kernel's frame, that loops add to."""
    initial = ir.Constant(LANE.ir, [neutral] * LANES)
    return [cast(Any, cgutils).alloca_once_value(b, initial) for _ in range(n)]


class _Index:
    """for_range_slice without its second value."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def __enter__(self) -> Any:
        return self.loop.__enter__()[0]

    def __exit__(self, *error: Any) -> Any:
        return self.loop.__exit__(*error)


def element(b: Any, address: Any, i: Any, size: int) -> Any:
    return b.add(address, b.mul(i, ir.Constant(I64, size)))


# ---------------------------------------------------------------- large helpers
@intrinsic
def stay_apart(_: Any) -> Typed:
    """Keeps the function that calls it from being inlined.

    For long helpers: in one huge function LLVM copies loops for every condition in them.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


def apart(fn: Callable[..., Any]) -> Any:
    """A helper that kernels call; it calls stay_apart() itself."""
    return njit(nogil=True, error_model="numpy", forceinline=False)(fn)


# ---------------------------------------------------------------- row addresses
def _load_word(b: Any, node: Any, index: int) -> Any:
    return load_ir(b, b.add(node, ir.Constant(I64, 8 * index)), I64, 8)


def _row_address(b: Any, node: Any, record: int, r: Any) -> Any:
    """Address of the row that belongs to row r of the destination.

    A source with fewer rows in a dimension repeats there.
    """
    address = _load_word(b, node, record)
    one = ir.Constant(I64, 1)
    for dim in (1, 2, 3):
        size = _load_word(b, node, layout.DST + 1 + dim)
        index = r if dim == 3 else b.srem(r, size)
        if record != layout.DST:
            own = _load_word(b, node, record + 1 + dim)
            repeated = b.select(
                b.icmp_signed("==", own, one), ir.Constant(I64, 0), b.srem(index, own)
            )
            index = b.select(b.icmp_signed("==", own, size), index, repeated)
        r = b.sdiv(r, size)
        address = b.add(address, b.mul(index, _load_word(b, node, record + 5 + dim)))
    return address


@intrinsic
def dst_row(_: Any, node: Any, r: Any) -> Typed:
    """Address of row r of the destination, counted over dimensions 1 to 3."""
    return typed(
        types.intp(types.intp, types.intp), lambda b, a: _row_address(b, a[0], layout.DST, a[1])
    )


@literal_intrinsic
def src_row(_: Any, node: Any, s: Any, r: Any) -> Typed:
    """Address of the row of source s that belongs to row r of the destination."""
    record = layout.SRC + s.literal_value * layout.OPERAND_WORDS
    return typed(
        types.intp(types.intp, s, types.intp), lambda b, a: _row_address(b, a[0], record, a[2])
    )
