"""Arithmetic on SIMD vectors: operators, float functions and reductions.

All of it is target-independent LLVM vector IR. The integer dot products, whose instructions LLVM
does not find by itself, are in emit.py.
"""

from __future__ import annotations

import operator
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, type_callable

from pyggml.backends.cpu.kernels.simd import (
    F32,
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
def vmax(_: Any, a: Any, b: Any) -> Typed:
    """Larger lanes; b's lane if either is NaN."""

    def emit(builder: Any, args: Any) -> Any:
        if a.is_float:  # ordered compare and select: one vmaxps
            larger = builder.fcmp_ordered(">", args[0], args[1])
            return builder.select(larger, args[0], args[1])
        name = "smax" if a.is_signed else "umax"
        return call_ir(builder, f"llvm.{name}.{a.suffix}", a.ir, args)

    return typed(a(a, a), emit)


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
