"""Writing straight-line vector code as Python: values with operators, unrolled by Python's loops.

Numba's front end takes most of the compile time. The inner bodies of the matrix products are
therefore Python functions that run once, while a kernel is compiled, and emit one block of code;
to Numba each is a single operation on a tuple of accumulators (`tile_operation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types

from pyggml.backends.cpu.kernels.simd import (
    F32,
    HAS_AVX2,
    HAS_AVX512,
    HAS_VNNI,
    I16,
    I32,
    I64,
    Typed,
    Vec,
    call_ir,
    intrinsic,
    load_ir,
    shuffle_ir,
    splat_ir,
)


class V:
    """A vector in the code being emitted. Operators take vectors of its type or small integers."""

    def __init__(self, b: Any, vec: Vec, value: Any) -> None:
        self.b, self.vec, self.value = b, vec, value

    def _same(self, value: Any) -> V:
        return V(self.b, self.vec, value)

    def _operand(self, other: V | float) -> Any:
        if isinstance(other, V):
            assert other.vec == self.vec, f"{self.vec} and {other.vec}"
            return other.value
        return ir.Constant(self.vec.ir, [other] * self.vec.lanes)

    def __and__(self, other: V | int) -> V:
        return self._same(self.b.and_(self.value, self._operand(other)))

    def __or__(self, other: V | int) -> V:
        return self._same(self.b.or_(self.value, self._operand(other)))

    def __xor__(self, other: V | int) -> V:
        return self._same(self.b.xor(self.value, self._operand(other)))

    def __lshift__(self, n: V | int) -> V:
        return self._same(self.b.shl(self.value, self._operand(n)))

    def __rshift__(self, n: int) -> V:
        shift = self.b.ashr if self.vec.is_signed else self.b.lshr
        return self._same(shift(self.value, self._operand(n)))

    def __add__(self, other: V | float) -> V:
        add = self.b.fadd if self.vec.is_float else self.b.add
        return self._same(add(self.value, self._operand(other)))

    def __sub__(self, other: V | int) -> V:
        sub = self.b.fsub if self.vec.is_float else self.b.sub
        return self._same(sub(self.value, self._operand(other)))

    def __mul__(self, other: V | float) -> V:
        mul = self.b.fmul if self.vec.is_float else self.b.mul
        return self._same(mul(self.value, self._operand(other)))

    def __neg__(self) -> V:
        return self._same(self.b.fneg(self.value))

    def constant(self, n: int) -> V:
        """A vector of the same type with n in every lane."""
        return self._same(self._operand(n))

    def if_less(self, limit: int, then: V, other: V) -> V:
        """Lanes of `then` where self < limit, of `other` elsewhere."""
        compare = self.b.icmp_signed if self.vec.is_signed else self.b.icmp_unsigned
        is_less = compare("<", self.value, self._operand(limit))
        return then._same(self.b.select(is_less, then.value, other.value))

    def fma(self, factor: V, addend: V) -> V:
        """self * factor + addend, rounded once."""
        args = [self.value, self._operand(factor), self._operand(addend)]
        return self._same(call_ir(self.b, f"llvm.fma.{self.vec.suffix}", self.vec.ir, args))

    def cast(self, elem: str) -> V:
        """The same bits as lanes of another kind."""
        bits = int(elem[1:])
        vec = Vec(elem, self.vec.lanes * self.vec.bits // bits)
        return V(self.b, vec, self.b.bitcast(self.value, vec.ir))

    def to_float(self) -> V:
        """i32 lanes as f32."""
        vec = Vec("f32", self.vec.lanes)
        return V(self.b, vec, self.b.sitofp(self.value, vec.ir))

    def pick(self, lanes: Sequence[int], other: V | None = None) -> V:
        """Lanes of self, and from self.lanes on of `other`."""
        second = self.value if other is None else other.value
        vec = Vec(self.vec.elem, len(lanes))
        return V(self.b, vec, shuffle_ir(self.b, self.value, second, lanes))

    def concat(self, other: V) -> V:
        return self.pick(range(2 * self.vec.lanes), other)

    def absolute(self) -> V:
        """Absolute values; -128 becomes 128 when read as unsigned."""
        args = [self.value, ir.Constant(ir.IntType(1), 0)]
        return self._same(call_ir(self.b, f"llvm.abs.{self.vec.suffix}", self.vec.ir, args))

    def with_sign_of(self, s: V) -> V:
        """self negated where s < 0 (and 0 or unchanged where s == 0); vpsignb."""
        if HAS_AVX2 and self.vec == Vec("i8", 32):
            args = [self.value, self._operand(s)]
            return self._same(call_ir(self.b, "llvm.x86.avx2.psign.b", self.vec.ir, args))
        negative = self.b.icmp_signed("<", s.value, self._operand(0))
        flipped = self.b.sub(self._operand(0), self.value)
        return self._same(self.b.select(negative, flipped, self.value))

    def lookup(self, table: Sequence[int]) -> V:
        """Entries of a table of 16 bytes at these indices (bytes of 0...15); vpshufb."""
        entries = [v & 0xFF for v in table]
        if HAS_AVX2 and self.vec.lanes in (32, 64):
            wide = "avx2.pshuf.b" if self.vec.lanes == 32 else "avx512.pshuf.b.512"
            tables = ir.Constant(self.vec.ir, entries * (self.vec.lanes // 16))
            args = [tables, self.value]
            return self._same(call_ir(self.b, f"llvm.x86.{wide}", self.vec.ir, args))
        found = self._operand(entries[0])
        for i, entry in enumerate(entries[1:], 1):
            is_it = self.b.icmp_unsigned("==", self.value, self._operand(i))
            found = self.b.select(is_it, self._operand(entry), found)
        return self._same(found)

    def store(self, address: Any) -> None:
        pointer = self.b.inttoptr(address, self.vec.ir.as_pointer())
        self.b.store(self.value, pointer, align=1)


def at(b: Any, address: Any, offset: int) -> Any:
    """address + offset."""
    return b.add(address, ir.Constant(I64, offset)) if offset else address


def in_order(vectors: list[V]) -> list[V]:
    """The same vectors; what is emitted later stays behind them. No instruction.

    In long bodies the compiler would compute one column after the other and spill all weights;
    and those of a single column must be read from front to back: the hardware follows nothing else.
    """
    if not HAS_AVX2:
        return vectors
    return [v._same(_pinned(v)) for v in vectors]


def _pinned(v: V) -> Any:
    """Through an empty assembler statement, of which neither order nor value may be changed."""
    kind = ir.FunctionType(v.vec.ir, [v.vec.ir])
    return v.b.asm(kind, "", "=v,0,~{memory}", [v.value], True)


def or_last(b: Any, index: Any, last: Any) -> Any:
    """The index, but `last` instead of any after it: what is missing is computed twice."""
    return b.select(b.icmp_signed("<", index, last), index, last)


def repeated(b: Any, vec: Vec, scalar: Any) -> V:
    """A scalar in every lane."""
    return V(b, vec, splat_ir(b, vec.ir, scalar))


def load_vector(b: Any, vec: Vec, address: Any) -> V:
    return V(b, vec, load_ir(b, address, vec.ir))


def load_masked(b: Any, vec: Vec, address: Any, mask: Any) -> V:
    """Lanes of the mask from memory, the others 0; memory outside the mask is not read."""
    pointer = b.inttoptr(address, vec.ir.as_pointer())
    args = [pointer, ir.Constant(I32, vec.bits // 8), mask, ir.Constant(vec.ir, None)]
    return V(b, vec, call_ir(b, f"llvm.masked.load.{vec.suffix}.p0", vec.ir, args))


def broadcast(b: Any, vec: Vec, unit: Any, address: Any) -> V:
    """One `unit` (an LLVM scalar type) from memory, repeated over a vector."""
    width = 32 if unit == F32 else unit.width
    wide = ir.VectorType(unit, vec.lanes * vec.bits // width)
    return V(b, vec, b.bitcast(splat_ir(b, wide, load_ir(b, address, unit)), vec.ir))


# ---------------------------------------------------------------- dot products
def multiply_pairs(u: V, s: V) -> V:
    """u8 x i8 products of neighbours added in i16 (vpmaddubsw); the sums must fit."""
    b, lanes = u.b, u.vec.lanes
    t = Vec("i16", lanes // 2)
    args = [u.value, s.value]
    if HAS_AVX2 and lanes == 32:
        return V(b, t, call_ir(b, "llvm.x86.avx2.pmadd.ub.sw", t.ir, args))
    if HAS_AVX512 and lanes == 64:
        return V(b, t, call_ir(b, "llvm.x86.avx512.pmaddubs.w.512", t.ir, args))
    wide = ir.VectorType(I16, lanes)
    products = V(b, Vec("i16", lanes), b.mul(b.zext(u.value, wide), b.sext(s.value, wide)))
    return products.pick(range(0, lanes, 2)) + products.pick(range(1, lanes, 2))


def add_pairs(x: V, y: V) -> V:
    """i16 x i16 products of neighbours added in i32 (vpmaddwd)."""
    b, lanes = x.b, x.vec.lanes
    t = Vec("i32", lanes // 2)
    args = [x.value, y.value]
    if HAS_AVX2 and lanes == 16:
        return V(b, t, call_ir(b, "llvm.x86.avx2.pmadd.wd", t.ir, args))
    if HAS_AVX512 and lanes == 32:
        return V(b, t, call_ir(b, "llvm.x86.avx512.pmaddw.d.512", t.ir, args))
    wide = ir.VectorType(I32, lanes)
    products = V(b, Vec("i32", lanes), b.mul(b.sext(x.value, wide), b.sext(y.value, wide)))
    return products.pick(range(0, lanes, 2)) + products.pick(range(1, lanes, 2))


def dot_accumulate(acc: V, u: V, s: V) -> V:
    """acc (i32) + sums of 4 neighbouring u8 x i8 products (vpdpbusd); only with VNNI."""
    assert HAS_VNNI
    name = "llvm.x86.avx512.vpdpbusd.256" if u.vec.lanes == 32 else "llvm.x86.avx512.vpdpbusd.512"
    return acc._same(call_ir(acc.b, name, acc.vec.ir, [acc.value, u.value, s.value]))


# ---------------------------------------------------------------- to Numba
def tile_type(lanes: int, n: int) -> Any:
    """The type of n accumulators of f32 lanes."""
    return cast(Any, types).UniTuple(Vec("f32", lanes), n)


def _unpacked(b: Any, lanes: int, tile: Any) -> list[V]:
    """The accumulators of a tile."""
    vec = Vec("f32", lanes)
    return [V(b, vec, b.extract_value(tile, i)) for i in range(tile.type.count)]


def _packed(b: Any, vectors: Sequence[V]) -> Any:
    """The tile of some accumulators."""
    kind = ir.ArrayType(vectors[0].vec.ir, len(vectors))
    tile = ir.Constant(kind, ir.Undefined)
    for i, v in enumerate(vectors):
        tile = b.insert_value(tile, v.value, i)
    return tile


def tile_zero(lanes: int, n: int) -> Any:
    """Operation () -> n accumulators of zeros."""
    tile = tile_type(lanes, n)

    def zeros(_: Any) -> Typed:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(context.get_value_type(tile), None)

        return tile(), codegen

    return intrinsic(zeros)


def tile_load(lanes: int, n: int) -> Any:
    """Operation (address) -> n accumulators that lie one after the other."""
    vec, tile = Vec("f32", lanes), tile_type(lanes, n)

    def operation(_: Any, address: Any) -> Typed:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            places = [at(builder, args[0], 4 * lanes * i) for i in range(n)]
            return _packed(builder, [load_vector(builder, vec, place) for place in places])

        return tile(types.intp), codegen

    return intrinsic(operation)


def tile_save(lanes: int, n: int) -> Any:
    """Operation (accumulators, address) that `tile_load` takes back."""
    tile = tile_type(lanes, n)

    def operation(_: Any, acc: Any, address: Any) -> Typed:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            for i, v in enumerate(_unpacked(builder, lanes, args[0])):
                v.store(at(builder, args[1], 4 * lanes * i))
            return context.get_dummy_value()

        return types.void(tile, types.intp), codegen

    return intrinsic(operation)


Emit = Callable[[Any, list[V], Sequence[Any]], list[V]]


def tile_operation(lanes: int, n: int, emit: Emit) -> Any:
    """Operation (accumulators, six integers) -> accumulators, from a function that emits it."""
    tile = tile_type(lanes, n)

    def operation(_: Any, acc: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Typed:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _packed(builder, emit(builder, _unpacked(builder, lanes, args[0]), args[1:]))

        i = types.intp
        return tile(tile, i, i, i, i, i, i), codegen

    return intrinsic(operation)


def tile_store(lanes: int, n: int, columns: Callable[[list[V]], list[V]] = list) -> Any:
    """Operation (accumulators, address, bytes between columns, rows, columns).

    Stores one vector per column, all of it or its first `rows` lanes; `columns` makes the
    columns' vectors from the accumulators.
    """
    tile = tile_type(lanes, n)

    def operation(_: Any, acc: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            tile_value, address, step, n_rows, n_columns = args
            values = columns(_unpacked(builder, lanes, tile_value))
            full_rows = builder.icmp_signed(">=", n_rows, ir.Constant(I64, values[0].vec.lanes))
            full_columns = builder.icmp_signed(">=", n_columns, ir.Constant(I64, len(values)))
            with builder.if_else(builder.and_(full_rows, full_columns)) as (whole, part):
                with whole:
                    for c, v in enumerate(values):
                        v.store(_column(builder, address, step, c))
                with part:
                    for c, v in enumerate(values):
                        _store_part(v, _column(builder, address, step, c), c, n_rows, n_columns)
            return context.get_dummy_value()

        i = types.intp
        return types.void(tile, i, i, i, i), codegen

    return intrinsic(operation)


def joined(parts: list[V]) -> list[V]:
    """One vector of all."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concat(part)
    return [whole]


def _column(b: Any, address: Any, step: Any, c: int) -> Any:
    return b.add(address, b.mul(step, ir.Constant(I64, c)))


def _store_part(v: V, address: Any, c: int, n_rows: Any, n_columns: Any) -> None:
    """Store the first n_rows lanes if c < n_columns."""
    b = v.b
    wanted = b.icmp_signed("<", ir.Constant(I64, c), n_columns)
    n = b.trunc(b.select(wanted, n_rows, ir.Constant(I64, 0)), I32)
    mask = first_lanes(b, v.vec.lanes, n)
    pointer = b.inttoptr(address, v.vec.ir.as_pointer())
    args = [v.value, pointer, ir.Constant(I32, 4), mask]
    call_ir(b, f"llvm.masked.store.{v.vec.suffix}.p0", ir.VoidType(), args)


def first_lanes(b: Any, lanes: int, n: Any) -> Any:
    """A mask of the lanes below an i32."""
    indices = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return b.icmp_signed("<", indices, splat_ir(b, ir.VectorType(I32, lanes), n))
