"""Transcendental functions and activations of float vectors, as emitted code.

Each takes and gives vectors of float32 lanes (`emit.V`) and keeps within 2 to 3 units in the last
place. The polynomials were fitted here: weighted least squares on Chebyshev points, the weights
raised where the error was largest. NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pyggml.backends.cpu.kernels.emit import V
from pyggml.backends.cpu.kernels.simd import FEATURES, I32, IS_X86, Vec, call_ir

HAS_FMA = not IS_X86 or "fma" in FEATURES
LOG2_E = 1.4426950408889634
# ln 2 in two parts: multiples of the first below 2**9 are exact
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4

# (e**r - 1 - r) / r**2 for |r| <= ln(2) / 2
EXP = (1.3814219e-3, 8.3688991e-3, 4.1668408e-2, 0.1666652, 0.49999994)
# (tanh(x) / x - 1) / x**2 by x**2, for x <= 0.625
TANH = (-5.7170363e-3, 2.0650579e-2, -5.3743497e-2, 0.13331491, -0.33333284)
# (log(1 + f) - f + f**2 / 2) / f**3 for 1 + f between sqrt(1/2) and sqrt(2)
LOG = (
    *(6.7466013e-2, -0.11675641, 0.11888175, -0.12405591, 0.14219551),
    *(-0.16667996, 0.20002119, -0.25000009, 0.33333313),
)
# erf(t) / t by t**2, for t <= 1
ERF = (
    *(7.8891193e-5, -8.0208411e-4, 5.1895352e-3, -2.6854444e-2),
    *(0.1128360, -0.37612626, 1.1283791),
)
# erfc(t) * e**(t**2) by (t - 2) / (t + 2), for 1 <= t <= 10
ERFC = (
    *(3.1598093e-4, -1.0822193e-3, -8.8037027e-4, 7.0219263e-3, 3.7325083e-3),
    *(-7.8980073e-2, 0.2416583, -0.42718583, 0.25539568),
)
# (sin(r) / r - 1) / r**2 and (cos(r) - 1 + r**2 / 2) / r**4 by r**2, for |r| <= 0.9
SIN = (-1.9388570e-4, 8.3310055e-3, -0.1666663)
COS = (2.4325795e-5, -1.3886273e-3, 4.1666623e-2)

Function = Callable[[V], V]


# ---------------------------------------------------------------- building blocks
def const(like: V, value: float) -> V:
    """A number in every lane."""
    return V(like.b, like.vec, ir.Constant(like.vec.ir, [value] * like.vec.lanes))


def mad(a: V, b: V, c: V) -> V:
    """a * b + c, rounded once where the CPU can."""
    return a.fma(b, c) if HAS_FMA else a * b + c


def polynomial(x: V, coefficients: Sequence[float]) -> V:
    """Highest power first."""
    value = const(x, coefficients[0])
    for c in coefficients[1:]:
        value = mad(value, x, const(x, c))
    return value


def divide(a: V, b: V) -> V:
    return V(a.b, a.vec, a.b.fdiv(a.value, b.value))


def less(a: V, b: V) -> Any:
    """Mask of the lanes where a < b."""
    return a.b.fcmp_ordered("<", a.value, b.value)


def select(mask: Any, a: V, b: V) -> V:
    """Lanes of a where the mask is set, else of b."""
    return V(a.b, a.vec, a.b.select(mask, a.value, b.value))


def at_least(x: V, low: V) -> V:
    return select(less(x, low), low, x)


def at_most(x: V, high: V) -> V:
    return select(less(high, x), high, x)


def _llvm(name: str) -> Function:
    return lambda x: V(x.b, x.vec, call_ir(x.b, f"llvm.{name}.{x.vec.suffix}", x.vec.ir, [x.value]))


magnitude, floor, ceil, trunc = _llvm("fabs"), _llvm("floor"), _llvm("ceil"), _llvm("trunc")
sqrt, nearest = _llvm("sqrt"), _llvm("rint")


def with_sign(x: V, sign: V) -> V:
    """|x| with the sign of another value."""
    args = [x.value, sign.value]
    return V(x.b, x.vec, call_ir(x.b, f"llvm.copysign.{x.vec.suffix}", x.vec.ir, args))


def _integer(x: V) -> V:
    vec = Vec("i32", x.vec.lanes)
    return V(x.b, vec, x.b.fptosi(x.value, vec.ir))


def _power_of_two(n: V) -> V:
    """2**n for i32 n within -126 ... 127."""
    bias = V(n.b, n.vec, ir.Constant(n.vec.ir, [127] * n.vec.lanes))
    return ((n + bias) << 23).cast("f32")


def _reduced(x: V) -> tuple[V, V]:
    """n and r with x = n ln2 + r, |r| <= ln2 / 2."""
    n = nearest(x * const(x, LOG2_E))
    r = mad(n, const(x, -LN2_HIGH), x)
    return n, mad(n, const(x, -LN2_LOW), r)


# ---------------------------------------------------------------- exponential and logarithm
def exp(x: V) -> V:
    """e**x with its whole range: 0 below -104, infinity above 88.7."""
    x = at_most(at_least(x, const(x, -105.0)), const(x, 89.0))
    n, r = _reduced(x)
    p = mad(polynomial(r, EXP), r * r, r) + const(x, 1.0)
    whole = _integer(n)
    half = whole >> 1  # 2**n in two factors: alone it can be too large or too small
    return p * _power_of_two(half) * _power_of_two(whole - half)


def expm1(x: V) -> V:
    """e**x - 1, accurate near 0."""
    x = at_most(at_least(x, const(x, -25.0)), const(x, 89.0))
    n, r = _reduced(x)
    p = mad(polynomial(r, EXP), r * r, r)  # e**r - 1
    one = V(
        x.b, Vec("i32", x.vec.lanes), ir.Constant(Vec("i32", x.vec.lanes).ir, [1] * x.vec.lanes)
    )
    half = _power_of_two(_integer(n) - one)  # 2**n / 2: 2**128 would not fit
    sum_ = mad(half, p, half - const(x, 0.5))
    return sum_ + sum_


def log(x: V) -> V:
    """Natural logarithm of positive, normal numbers."""
    bits = x.cast("i32")
    i = bits.vec

    def whole(value: int) -> V:
        return V(x.b, i, ir.Constant(i.ir, [value] * i.lanes))

    # exponent and mantissa such that the mantissa lies between sqrt(1/2) and sqrt(2)
    e = (bits - whole(0x3F3504F3)) >> 23
    f = (bits - (e << 23)).cast("f32") - const(x, 1.0)
    n = e.to_float()
    y = polynomial(f, LOG) * f * f * f
    y = y + n * const(x, LN2_LOW) - f * f * const(x, 0.5) + f
    return mad(n, const(x, LN2_HIGH), y)


def log1p(u: V) -> V:
    """log(1 + u) for u >= 0: the rounding of 1 + u is made up for by a factor."""
    one = const(u, 1.0)
    w = u + one
    lost = w - one
    is_tiny = u.b.fcmp_ordered("==", lost.value, const(u, 0.0).value)
    return select(is_tiny, u, divide(log(w) * u, lost))


# ---------------------------------------------------------------- sine and cosine
def sin_cos(x: V) -> tuple[V, V]:
    """Sine and cosine for |x| below 2**20.

    The multiple of pi/2 is taken away in float64: positions reach hundreds of thousands, and a
    float32 product would leave nothing of the angle.
    """
    b, lanes = x.b, x.vec.lanes
    double = ir.VectorType(ir.DoubleType(), lanes)
    wide = b.fpext(x.value, double)
    quarters = b.fmul(wide, ir.Constant(double, [2 / math.pi] * lanes))
    quarters = call_ir(b, f"llvm.rint.v{lanes}f64", double, [quarters])
    rest = b.fsub(wide, b.fmul(quarters, ir.Constant(double, [math.pi / 2] * lanes)))
    r = V(b, x.vec, b.fptrunc(rest, x.vec.ir))
    quadrant = V(b, Vec("i32", lanes), b.fptosi(quarters, ir.VectorType(I32, lanes)))
    z = r * r
    sine = mad(polynomial(z, SIN) * z, r, r)
    cosine = mad(polynomial(z, COS) * z, z, mad(z, const(x, -0.5), const(x, 1.0)))
    nil = quadrant ^ quadrant
    is_odd = b.icmp_signed("!=", (quadrant & 1).value, nil.value)
    sign_of_sine = (quadrant & 2) << 30
    one = V(b, quadrant.vec, ir.Constant(quadrant.vec.ir, [1] * lanes))
    sign_of_cosine = ((quadrant + one) & 2) << 30
    s, c = select(is_odd, cosine, sine), select(is_odd, sine, cosine)
    return (
        (s.cast("i32") ^ sign_of_sine).cast("f32"),
        (c.cast("i32") ^ sign_of_cosine).cast("f32"),
    )


# ---------------------------------------------------------------- activations
def sigmoid_times(x: V, slope: V) -> V:
    """x / (1 + e**(-slope x))"""
    return divide(x, const(x, 1.0) + exp(-(slope * x)))


def sigmoid(x: V) -> V:
    return divide(const(x, 1.0), const(x, 1.0) + exp(-x))


def silu(x: V) -> V:
    return divide(x, const(x, 1.0) + exp(-x))


def tanh(x: V) -> V:
    z = x * x
    small = mad(polynomial(z, TANH) * z, x, x)
    a = magnitude(x)
    large = const(x, 1.0) - divide(const(x, 2.0), exp(a + a) + const(x, 1.0))
    return select(less(a, const(x, 0.625)), small, with_sign(large, x))


def gelu(x: V) -> V:
    """The tanh form. ggml looks it up in a table of F16 values; this is the formula itself.

    x (1 + tanh(u)) / 2 = x / (1 + e**(-2u)): nothing cancels for negative x.
    """
    k = 2 * 0.79788456080286535588
    return sigmoid_times(x, mad(x * x, const(x, 0.044715 * k), const(x, k)))


def gelu_quick(x: V) -> V:
    return sigmoid_times(x, const(x, 1.702))


def erfc_positive(t: V) -> V:
    """1 - erf(t) for t >= 1."""
    t = at_most(t, const(t, 10.0))
    s = divide(t - const(t, 2.0), t + const(t, 2.0))
    return polynomial(s, ERFC) * exp(-(t * t))


def gelu_erf(x: V) -> V:
    """x (1 + erf(x / sqrt(2))) / 2"""
    t = x * const(x, math.sqrt(0.5))
    a = magnitude(t)
    near = const(x, 1.0) + t * polynomial(t * t, ERF)
    tail = erfc_positive(a)
    far = select(less(t, const(x, 0.0)), tail, const(x, 2.0) - tail)
    return x * const(x, 0.5) * select(less(a, const(x, 1.0)), near, far)


def softplus(x: V) -> V:
    """log(1 + e**x)"""
    limit = const(x, 20.0)
    return select(less(limit, x), x, log1p(exp(at_most(x, limit))))


def hardsigmoid(x: V) -> V:
    y = divide(x + const(x, 3.0), const(x, 6.0))
    return at_most(at_least(y, const(x, 0.0)), const(x, 1.0))


def relu(x: V) -> V:
    return at_least(x, const(x, 0.0))


def elu(x: V) -> V:
    return select(less(const(x, 0.0), x), x, expm1(x))


def sign(x: V) -> V:
    nil, one = const(x, 0.0), const(x, 1.0)
    return select(less(nil, x), one, select(less(x, nil), const(x, -1.0), nil))


def step(x: V) -> V:
    return select(less(const(x, 0.0), x), const(x, 1.0), const(x, 0.0))


def half_away(x: V) -> V:
    """Nearest integer, halves away from zero; adding 0.5 itself would round 0.49999997 up."""
    return trunc(x + with_sign(const(x, 0.49999997), x))


def xielu(x: V, alpha_n: V, alpha_p: V, beta: V, eps: V) -> V:
    above = mad(alpha_p * x, x, beta * x)
    below = mad(expm1(at_most(x, eps)) - x, alpha_n, beta * x)
    return select(less(const(x, 0.0), x), above, below)


# By the names of UnaryOp.
UNARY: dict[str, Function] = {
    "abs": magnitude,
    "sgn": sign,
    "neg": lambda x: -x,
    "step": step,
    "tanh": tanh,
    "elu": elu,
    "relu": relu,
    "sigmoid": sigmoid,
    "gelu": gelu,
    "gelu_quick": gelu_quick,
    "silu": silu,
    "hardswish": lambda x: x * hardsigmoid(x),
    "hardsigmoid": hardsigmoid,
    "exp": exp,
    "expm1": expm1,
    "softplus": softplus,
    "gelu_erf": gelu_erf,
    "floor": floor,
    "ceil": ceil,
    "round": half_away,
    "trunc": trunc,
}
