"""Arithmetic on SIMD vectors: operators, float and integer functions, dot products, reductions.

Everything is target-independent LLVM vector IR, except a few operations whose instruction LLVM
does not find by itself (vpmaddubsw, vpdpbusd, ...): these look at the CPU features when the
kernel is compiled and have a generic form. Both forms give the same bits.
"""

from __future__ import annotations

import operator
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, type_callable

from pyggml.backends.cpu.kernels.simd import (
    F32,
    HAS_AVX2,
    HAS_AVX512,
    HAS_VNNI,
    I1,
    I16,
    I32,
    Typed,
    Vec,
    call_ir,
    intrinsic,
    shuffle_ir,
    splat_ir,
    typed,
)

# ---------------------------------------------------------------- operators
# builder methods for signed, unsigned and float elements
Methods = tuple[str, str, str]
_OPERATORS: dict[Any, Methods] = {
    operator.add: ("add", "add", "fadd"),
    operator.sub: ("sub", "sub", "fsub"),
    operator.mul: ("mul", "mul", "fmul"),
    operator.and_: ("and_", "and_", ""),
    operator.or_: ("or_", "or_", ""),
    operator.xor: ("xor", "xor", ""),
    operator.lshift: ("shl", "shl", ""),
    operator.rshift: ("ashr", "lshr", ""),
    operator.truediv: ("", "", "fdiv"),
}
_IN_PLACE = {
    operator.add: operator.iadd,
    operator.sub: operator.isub,
    operator.mul: operator.imul,
    operator.and_: operator.iand,
    operator.or_: operator.ior,
    operator.xor: operator.ixor,
    operator.lshift: operator.ilshift,
    operator.rshift: operator.irshift,
    operator.truediv: operator.itruediv,
}


def _method(vec: Vec, names: Methods) -> str:
    """Name of the builder method for the element type; "" if there is none."""
    return names[2] if vec.is_float else names[0] if vec.is_signed else names[1]


def _register_operator(op: Any, names: Methods) -> None:
    def impl(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vec = sig.return_type
        a, b = (
            v
            if isinstance(t, Vec)
            else splat_ir(builder, vec.ir, context.cast(builder, v, t, vec.scalar))
            for v, t in zip(args, sig.args, strict=True)
        )
        # "contract" allows a * b + c as one FMA; nothing is reassociated
        flags = ("contract",) if vec.is_float else ()
        return getattr(builder, _method(vec, names))(a, b, flags=flags)

    def typer(a: Any, b: Any) -> Any:
        vec, other = (a, b) if isinstance(a, Vec) else (b, a)
        if not isinstance(vec, Vec) or not _method(vec, names):
            return None
        return vec if other == vec or isinstance(other, types.Number | types.Literal) else None

    for key in (op, _IN_PLACE[op]):
        type_callable(key)(lambda context: typer)
        for ta, tb in (
            (Vec, Vec),
            (Vec, types.Number),
            (types.Number, Vec),
            (Vec, types.IntegerLiteral),
            (types.IntegerLiteral, Vec),
        ):
            cast(Any, lower_builtin)(key, ta, tb)(impl)


for _op, _names in _OPERATORS.items():
    _register_operator(_op, _names)


# ---------------------------------------------------------------- float functions
@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Typed:
    """a * b + c with one rounding; vectors or float32."""
    if isinstance(c, Vec):
        return typed(c(c, c, c), lambda bld, args: call_ir(bld, f"llvm.fma.{c.suffix}", c.ir, args))
    f = types.float32
    return typed(f(f, f, f), lambda bld, args: call_ir(bld, "llvm.fma.f32", F32, args))


def _float_function(name: str, x: Any) -> Typed:
    suffix, irt = (x.suffix, x.ir) if isinstance(x, Vec) else ("f32", F32)
    return typed(x(x), lambda b, a: call_ir(b, f"llvm.{name}.{suffix}", irt, a))


@intrinsic
def round_even(_: Any, x: Any) -> Typed:
    """Nearest integer, ties to even."""
    return _float_function("rint", x)


@intrinsic
def fabs(_: Any, x: Any) -> Typed:
    return _float_function("fabs", x)


@intrinsic
def vsqrt(_: Any, x: Any) -> Typed:
    return _float_function("sqrt", x)


@intrinsic
def vfloor(_: Any, x: Any) -> Typed:
    return _float_function("floor", x)


@intrinsic
def vceil(_: Any, x: Any) -> Typed:
    return _float_function("ceil", x)


@intrinsic
def vtrunc(_: Any, x: Any) -> Typed:
    return _float_function("trunc", x)


# ---------------------------------------------------------------- comparison and selection
def _minmax(kind: str, a: Any) -> Typed:
    def emit(b: Any, args: Any) -> Any:
        if a.is_float:  # ordered compare and select: one vminps or vmaxps
            c = b.fcmp_ordered("<" if kind == "min" else ">", args[0], args[1])
            return b.select(c, args[0], args[1])
        name = ("s" if a.is_signed else "u") + kind
        return call_ir(b, f"llvm.{name}.{a.suffix}", a.ir, args)

    return typed(a(a, a), emit)


@intrinsic
def vmin(_: Any, a: Any, b: Any) -> Typed:
    """Smaller lanes; b's lane if either is NaN."""
    return _minmax("min", a)


@intrinsic
def vmax(_: Any, a: Any, b: Any) -> Typed:
    """Larger lanes; b's lane if either is NaN."""
    return _minmax("max", a)


@intrinsic
def select_less(_: Any, a: Any, b: Any, x: Any, y: Any) -> Typed:
    """Lanes of x where a < b, else (and where either is NaN) of y."""

    def emit(bld: Any, args: Any) -> Any:
        if a.is_float:
            c = bld.fcmp_ordered("<", args[0], args[1])
        else:
            c = (bld.icmp_signed if a.is_signed else bld.icmp_unsigned)("<", args[0], args[1])
        return bld.select(c, args[2], args[3])

    return typed(x(a, a, x, x), emit)


# ---------------------------------------------------------------- integer functions
@intrinsic
def iabs(_: Any, a: Any) -> Typed:
    """Absolute values; the smallest integer stays itself."""

    def emit(b: Any, args: Any) -> Any:
        return call_ir(b, f"llvm.abs.{a.suffix}", a.ir, [args[0], ir.Constant(I1, 0)])

    return typed(a(a), emit)


@intrinsic
def apply_sign(_: Any, x: Any, s: Any) -> Typed:
    """x negated where s < 0, and 0 where s == 0 (vpsignb)."""

    def emit(b: Any, args: Any) -> Any:
        if HAS_AVX2 and x.lanes == 32:
            return call_ir(b, "llvm.x86.avx2.psign.b", x.ir, args)
        nil = ir.Constant(x.ir, None)
        negative = b.icmp_signed("<", args[1], nil)
        flipped = b.select(negative, b.sub(nil, args[0]), args[0])
        return b.select(b.icmp_signed("==", args[1], nil), nil, flipped)

    return typed(x(x, x), emit)


def _pair_sums(b: Any, x: Any, y: Any, extend: str, lanes: int, wide: Any) -> tuple[Any, Any]:
    """Products of even and of odd lanes, in `wide` elements."""
    wv = ir.VectorType(wide, lanes)
    p = b.mul(getattr(b, extend)(x, wv), b.sext(y, wv))
    return (
        shuffle_ir(b, p, p, range(0, lanes, 2)),
        shuffle_ir(b, p, p, range(1, lanes, 2)),
    )


@intrinsic
def madd_u8i8(_: Any, u: Any, s: Any) -> Typed:
    """u8 x i8 products of neighbouring lanes added in i16, saturating (vpmaddubsw)."""
    t = Vec("i16", u.lanes // 2)

    def emit(b: Any, args: Any) -> Any:
        if HAS_AVX2 and u.lanes == 32:
            return call_ir(b, "llvm.x86.avx2.pmadd.ub.sw", t.ir, args)
        if HAS_AVX512 and u.lanes == 64:
            return call_ir(b, "llvm.x86.avx512.pmaddubs.w.512", t.ir, args)
        even, odd = _pair_sums(b, args[0], args[1], "zext", u.lanes, I32)
        # two products of at most 255 * 128 fit i32; vpmaddubsw clamps their sum to i16
        total = b.add(even, odd)
        wide = Vec("i32", t.lanes)
        low = ir.Constant(wide.ir, [-32768] * t.lanes)
        high = ir.Constant(wide.ir, [32767] * t.lanes)
        total = call_ir(b, f"llvm.smax.{wide.suffix}", wide.ir, [total, low])
        total = call_ir(b, f"llvm.smin.{wide.suffix}", wide.ir, [total, high])
        return b.trunc(total, t.ir)

    return typed(t(u, s), emit)


@intrinsic
def madd_i16(_: Any, x: Any, y: Any) -> Typed:
    """i16 x i16 products of neighbouring lanes added in i32 (vpmaddwd)."""
    t = Vec("i32", x.lanes // 2)

    def emit(b: Any, args: Any) -> Any:
        if HAS_AVX2 and x.lanes == 16:
            return call_ir(b, "llvm.x86.avx2.pmadd.wd", t.ir, args)
        if HAS_AVX512 and x.lanes == 32:
            return call_ir(b, "llvm.x86.avx512.pmaddw.d.512", t.ir, args)
        return b.add(*_pair_sums(b, args[0], args[1], "sext", x.lanes, I32))

    return typed(t(x, y), emit)


@intrinsic
def dot4(_: Any, acc: Any, u: Any, s: Any) -> Typed:
    """acc (i32) + the sums of 4 neighbouring u8 x i8 products; exact.

    One vpdpbusd with VNNI. Without it, by vpmaddubsw, whose pairs must fit i16: u <= 128.
    """

    def emit(b: Any, args: Any) -> Any:
        a, x, y = args
        n = u.lanes
        if HAS_VNNI and n == 32:
            return call_ir(b, "llvm.x86.avx512.vpdpbusd.256", acc.ir, [a, x, y])
        if HAS_VNNI and HAS_AVX512 and n == 64:
            return call_ir(b, "llvm.x86.avx512.vpdpbusd.512", acc.ir, [a, x, y])
        if HAS_AVX2 and n == 32:
            halves = ir.VectorType(I16, 16)
            pairs = call_ir(b, "llvm.x86.avx2.pmadd.ub.sw", halves, [x, y])
            ones = ir.Constant(halves, [1] * 16)
            return b.add(a, call_ir(b, "llvm.x86.avx2.pmadd.wd", acc.ir, [pairs, ones]))
        wide = ir.VectorType(I32, n)
        p = b.mul(b.zext(x, wide), b.sext(y, wide))
        for k in range(4):
            a = b.add(a, shuffle_ir(b, p, p, range(k, n, 4)))
        return a

    return typed(acc(acc, u, s), emit)


# ---------------------------------------------------------------- reductions
def _tree(v: Vec, combine: Any) -> Typed:
    """Fold the upper half of the lanes onto the lower until one is left: always this order."""

    def emit(b: Any, args: Any) -> Any:
        x, n = args[0], v.lanes
        while n > 1:
            n //= 2
            low = shuffle_ir(b, x, x, range(n))
            high = shuffle_ir(b, x, x, range(n, 2 * n))
            x = combine(b, low, high)
        return b.extract_element(x, ir.Constant(I32, 0))

    return typed(v.scalar(v), emit)


@intrinsic
def reduce_add(_: Any, v: Any) -> Typed:
    """Sum of all lanes; halves are folded: (0+4)+(2+6), (1+5)+(3+7) for 8 lanes."""
    return _tree(v, lambda b, x, y: b.fadd(x, y) if v.is_float else b.add(x, y))


@intrinsic
def reduce_max(_: Any, v: Any) -> Typed:
    """Largest lane."""

    def larger(b: Any, x: Any, y: Any) -> Any:
        if v.is_float:
            return b.select(b.fcmp_ordered(">", x, y), x, y)
        compare = b.icmp_signed if v.is_signed else b.icmp_unsigned
        return b.select(compare(">", x, y), x, y)

    return _tree(v, larger)
