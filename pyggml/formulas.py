"""Numbers that operations derive from their parameters: one formula for all backends.

Computed in float32 where ggml does so, since exponents magnify the last bit.
"""

import math

import numpy as np

from pyggml.params import RopeParams


def rope_theta_scale(params: RopeParams) -> float:
    """What the angle of a pair is multiplied with to get the next pair's: a float32 value."""
    exponent = np.float32(-2.0) / np.float32(params.n_dims)
    return float(np.float32(np.float64(np.float32(params.freq_base)) ** np.float64(exponent)))


def rope_ramp(params: RopeParams) -> tuple[float, float]:
    """YaRN: pairs below the first number extrapolate, those above the second interpolate."""

    def pair(rotations: float) -> float:
        n = params.n_ctx_orig / (rotations * 2 * math.pi)
        return params.n_dims * math.log(n) / (2 * math.log(params.freq_base))

    if params.ext_factor == 0:
        return 0.0, 0.0
    low, high = math.floor(pair(params.beta_fast)), math.ceil(pair(params.beta_slow))
    return float(max(0, low)), float(min(params.n_dims - 1, high))


def rope_magnitude(params: RopeParams) -> float:
    """Factor of cosine and sine: a float32 value."""
    m = np.float32(params.attn_factor)
    if params.ext_factor != 0:
        m *= np.float32(1 + np.float32(0.1) * np.float32(math.log(1 / params.freq_scale)))
    return float(m)


def alibi_slopes(n_head: int, max_bias: float) -> list[float]:
    """Factor of the mask for each head; 1 without ALiBi."""
    if max_bias <= 0:
        return [1.0] * n_head
    n = 1 << (n_head.bit_length() - 1)  # the largest power of two within n_head
    m0, m1 = np.float32(2.0 ** (-max_bias / n)), np.float32(2.0 ** (-max_bias / 2 / n))
    return [
        float(m0) ** (h + 1) if h < n else float(m1) ** (2 * (h - n) + 1) for h in range(n_head)
    ]
