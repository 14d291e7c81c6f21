"""Transcendental functions of 8 floats."""

from __future__ import annotations

from typing import Any

from numba import float32

from pyggml.backends.cpu.kernels.access import inline
from pyggml.backends.cpu.kernels.simd import bitcast, convert, f32x8, i32x8, splat
from pyggml.backends.cpu.kernels.simd_ops import fma, round_even, vmax, vmin


@inline
def c8(x: float) -> Any:
    """A constant in every lane."""
    return splat(f32x8, float32(x))


@inline
def vexp(x: Any) -> Any:
    """e**x, about 2 ulp; x is limited to -87.3 .. 88, where the result is a normal float.

    exp(n ln2 + r) = 2**n * p(r) with |r| <= ln2 / 2; ln2 in two parts keeps r exact.
    """
    x = vmin(vmax(x, c8(-87.3)), c8(88.0))
    n = round_even(x * c8(1.4426950408889634))
    r = fma(n, c8(-0.693359375), x)
    r = fma(n, c8(2.12194440e-4), r)
    p = fma(r, c8(1.9875691500e-4), c8(1.3981999507e-3))
    p = fma(p, r, c8(8.3334519073e-3))
    p = fma(p, r, c8(4.1665795894e-2))
    p = fma(p, r, c8(1.6666665459e-1))
    p = fma(p, r, c8(5.0000001201e-1))
    p = fma(p, r * r, r + c8(1.0))
    return p * bitcast(f32x8, (convert(i32x8, n) + 127) << 23)


@inline
def vsigmoid(x: Any) -> Any:
    """1 / (1 + e**-x)."""
    return c8(1.0) / (c8(1.0) + vexp(c8(0.0) - x))


@inline
def vsilu(x: Any) -> Any:
    """x / (1 + e**-x)."""
    return x / (c8(1.0) + vexp(c8(0.0) - x))


@inline
def vtanh(x: Any) -> Any:
    """Hyperbolic tangent, as 1 - 2 / (e**2x + 1): absolute error about 1e-7."""
    return c8(1.0) - c8(2.0) / (vexp(x + x) + c8(1.0))
