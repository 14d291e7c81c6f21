"""Reference: rotary positions, softmax and attention."""

import numpy as np
from numpy.typing import NDArray

from pyggml.backends.reference.memory import Array, Floats, floats, integers
from pyggml.formulas import alibi_slopes, rope_magnitude, rope_ramp, rope_theta_scale
from pyggml.ops import RopeMode
from pyggml.params import FlashAttnParams, RopeParams, SoftMaxParams
from pyggml.tensor import Tensor

Double = NDArray[np.float64]
MULTI = 8  # bit of the modes whose positions come in four sections


# ---------------------------------------------------------------- softmax
def soft_max(node: Tensor) -> Array:
    """softmax(a * scale + slope * mask) over dimension 0, per head a slope and a sink."""
    params = node.params
    assert isinstance(params, SoftMaxParams)
    a = floats(node.src[0]).astype(np.float64)  # [ne3, heads, rows, ne0]
    mask, sinks = (*node.src[1:], None, None)[:2]
    scores = a * np.float32(params.scale) + _bias(mask, a.shape, params.max_bias)
    return _softmax(scores, sinks)


def _bias(mask: Tensor | None, shape: tuple[int, ...], max_bias: float) -> Double | float:
    """slope * mask, the mask's dimensions 2 and 3 repeated: [ne3, heads, rows, columns]."""
    if mask is None:
        return 0.0
    m = floats(mask).astype(np.float64)[:, :, : shape[2]]
    m = np.tile(m, (shape[0] // m.shape[0], shape[1] // m.shape[1], 1, 1))
    out: Double = m * np.array(alibi_slopes(shape[1], max_bias))[:, None, None]
    return out


def _softmax(scores: Double, sinks: Tensor | None) -> Double:
    """Rows to probabilities; a sink takes its share of the total and gives no column."""
    top = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else floats(sinks).reshape(-1, 1, 1).astype(np.float64)
    if sink is not None:
        top = np.maximum(top, sink)
    e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    out: Double = e / total
    return out


def flash_attn_ext(node: Tensor) -> Array:
    """softmax(scale * q k + slope * mask) v; a row without any key is 0."""
    params = node.params
    assert isinstance(params, FlashAttnParams)
    q, k, v = (floats(t).astype(np.float64) for t in node.src[:3])
    k, v = (
        a.repeat(q.shape[1] // a.shape[1], 1).repeat(q.shape[0] // a.shape[0], 0) for a in (k, v)
    )
    mask, sinks = (*node.src[3:], None, None)[:2]
    scores = np.matmul(q, k.swapaxes(-1, -2)) * np.float32(params.scale)
    if params.logit_softcap:
        cap = np.float32(params.logit_softcap)
        scores = cap * np.tanh(scores / cap)
    scores = scores + _bias(mask, scores.shape, params.max_bias)
    seen = np.isfinite(scores).any(axis=-1, keepdims=True)
    p = np.where(seen, _softmax(scores, sinks), 0)
    out: Array = np.matmul(p, v).swapaxes(1, 2)  # [ne3, n_batch, n_head, dv]
    return out


# ---------------------------------------------------------------- rotary positions
def rope(node: Tensor) -> Array:
    """Rotate pairs of channels: (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)."""
    params = node.params
    assert isinstance(params, RopeParams)
    out = floats(node.src[0]).astype(np.float64)  # [ne3, tokens, heads, ne0]
    factors = node.src[2] if len(node.src) > 2 else None
    angle = angles(
        params,
        integers(node.src[1]).reshape(-1),
        out.shape[1],
        None if factors is None else floats(factors).reshape(-1),
    )
    m = rope_magnitude(params)
    cos = (np.float32(m) * np.cos(angle, dtype=np.float64))[:, None]
    sin = (np.float32(m) * np.sin(angle, dtype=np.float64))[:, None]
    first, second = pairs(params)
    x0, x1 = out[..., first], out[..., second]
    out[..., first], out[..., second] = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    return out


def pairs(params: RopeParams) -> tuple[Array, Array]:
    """The two channels of each rotated pair."""
    if params.mode == RopeMode.VISION:
        j = np.arange(params.n_dims)
        return j, j + params.n_dims
    j = np.arange(params.n_dims // 2)
    if params.mode == RopeMode.NORMAL:
        return params.n_offs + 2 * j, params.n_offs + 2 * j + 1
    return params.n_offs + j, params.n_offs + j + params.n_dims // 2


def angles(params: RopeParams, positions: Array, n_tokens: int, factors: Floats | None) -> Floats:
    """Angle of each token's pairs in float32, multiplied up pair by pair: [tokens, pairs]."""
    n_pairs = len(pairs(params)[0])
    theta_scale = np.float32(rope_theta_scale(params))
    base = positions.reshape(-1, n_tokens).astype(np.float32)  # one row, or t, h, w, e
    running = base.copy()
    out = np.empty((n_tokens, n_pairs), np.float32)
    for j in range(n_pairs):
        section = 0
        if params.mode & MULTI:
            section, is_start = _section(params, j)
            if params.mode == RopeMode.VISION and is_start:  # each section starts over
                running[section] = base[section]
        theta = running[section]
        out[:, j] = _yarn(params, j, theta if factors is None else theta / factors[j])
        running *= theta_scale
    return out


def _section(params: RopeParams, j: int) -> tuple[int, bool]:
    """Which of the positions t, h, w, e turns pair j; whether a section starts there."""
    s0, s1, s2, s3 = params.sections
    sector = j % (s0 + s1 + s2 + s3)
    if params.mode == RopeMode.IMROPE:
        kind = sector % 3
        return (kind if sector < 3 * params.sections[kind] else 3), False
    starts = (0, s0, s0 + s1, s0 + s1 + s2)
    section = max(i for i in range(4) if sector >= starts[i])
    return section, sector == starts[section]


def _yarn(params: RopeParams, j: int, theta: Floats) -> Floats:
    """Scaled for longer contexts: high frequencies keep their angle, low ones are stretched."""
    interpolated = np.float32(params.freq_scale) * theta
    if params.ext_factor == 0:
        return interpolated
    low, high = rope_ramp(params)
    y = np.float32((j - low) / max(np.float32(0.001), np.float32(high - low)))
    mix = np.float32(
        (1 - min(np.float32(1), max(np.float32(0), y))) * np.float32(params.ext_factor)
    )
    return interpolated * (1 - mix) + theta * mix
