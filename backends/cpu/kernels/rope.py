"""Rotary positions: cosine and sine once per token, then all heads are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import float32, float64, int32, types

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    dst_nb,
    dst_ne,
    inline,
    param_float,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.block_writers import WRITERS
from pyggml.backends.cpu.kernels.emit import V, repeated
from pyggml.backends.cpu.kernels.faults import report_id
from pyggml.backends.cpu.kernels.gather import PLAIN, load_index
from pyggml.backends.cpu.kernels.norms import normed, rms_factor, sum_of_squares
from pyggml.backends.cpu.kernels.rows import LANE, LANES, STORED, Row, Stored, element, for_lanes
from pyggml.backends.cpu.kernels.simd import Typed, intrinsic, load, store, typed
from pyggml.backends.cpu.kernels.stored_rows import row_writer

ZERO = float32(0)
FLOAT = STORED["f32"]
# Modes, as the kernels number them.
ONE, MROPE, IMROPE, VISION = 0, 1, 2, 3


# ---------------------------------------------------------------- angles
@inline
def section_of(mode: int, sector: int, s0: int, s1: int, s2: int) -> int:
    """Which of the positions t, h, w, e turns a pair."""
    if mode == IMROPE:
        kind = sector % 3
        limit = s0 if kind == 0 else (s1 if kind == 1 else s2)
        return kind if sector < 3 * limit else 3
    if sector < s0:
        return 0
    if sector < s0 + s1:
        return 1
    return 2 if sector < s0 + s1 + s2 else 3


@inline
def yarn_angle(node: int, j: int, theta: float) -> Any:
    """Interpolated, extrapolated or between. Parameters 1 to 4: see the kernel."""
    interpolated = param_float(node, 1) * theta
    ext = param_float(node, 2)
    if ext == float32(0):
        return interpolated
    low, high = param_float(node, 3), param_float(node, 4)
    y = (float32(j) - low) / max(float32(0.001), high - low)
    mix = (float32(1) - min(float32(1), max(float32(0), y))) * ext
    return interpolated * (float32(1) - mix) + theta * mix


@inline
def angles(node: int, target: int, token: int, n_tokens: int) -> None:
    """The angle of each pair; theta is multiplied up from pair to pair in float32."""
    n_pairs, mode = param_int(node, 6), param_int(node, 7)
    s0, s1, s2, s3 = (
        param_int(node, 8),
        param_int(node, 9),
        param_int(node, 10),
        param_int(node, 11),
    )
    theta_scale = param_float(node, 0)
    position, factors = src_data(node, 1), src_data(node, 2)
    t = float32(load(int32, position + 4 * token))
    h, w, e = t, t, t
    if mode != ONE:
        h = float32(load(int32, position + 4 * (n_tokens + token)))
        w = float32(load(int32, position + 4 * (2 * n_tokens + token)))
        e = float32(load(int32, position + 4 * (3 * n_tokens + token)))
    t0, h0, w0, e0 = t, h, w, e
    for j in range(n_pairs):
        section = 0
        if mode != ONE:
            sector = j % (s0 + s1 + s2 + s3)
            section = section_of(mode, sector, s0, s1, s2)
            if mode == VISION:  # each section starts over
                if sector == 0:
                    t = t0
                elif sector == s0:
                    h = h0
                elif sector == s0 + s1:
                    w = w0
                elif sector == s0 + s1 + s2:
                    e = e0
        theta = t if section == 0 else (h if section == 1 else (w if section == 2 else e))
        if factors != 0:
            theta = theta / load(float32, factors + 4 * j)
        store(target + 4 * j, yarn_angle(node, j, theta))
        t, h, w, e = t * theta_scale, h * theta_scale, w * theta_scale, e * theta_scale


def _tables(b: Any, args: Any) -> None:
    """Operation (cosines, sines, n, magnitude); the angles are where the sines will be."""
    cos, sin, n, magnitude = args
    factor = repeated(b, LANE, magnitude)

    def step(i: Any, rest: Any) -> None:
        angle = FLOAT.load(b, element(b, sin, i, 4), LANES, rest)
        sine, cosine = f.sin_cos(angle)
        FLOAT.store(b, element(b, cos, i, 4), cosine * factor, rest)
        FLOAT.store(b, element(b, sin, i, 4), sine * factor, rest)

    for_lanes(b, n, step)


@intrinsic
def tables(_: Any, cos: Any, sin: Any, n: Any, magnitude: Any) -> Typed:
    i = types.intp
    return typed(types.void(i, i, i, types.float32), _tables)


# ---------------------------------------------------------------- rotation
def _turn(x0: V, x1: V, c: V, s: V) -> tuple[V, V]:
    return x0 * c - x1 * s, x0 * s + x1 * c


def _rotate_apart(kind: Stored) -> Any:
    """Operation (target, source, cosines, sines, n_pairs, gap): pairs are `gap` bytes apart."""

    def emit(b: Any, args: Any) -> None:
        target, source, cos, sin, n_pairs, gap = args

        def step(i: Any, n: Any) -> None:
            d, x = element(b, target, i, kind.size), element(b, source, i, kind.size)
            c, s = (FLOAT.load(b, element(b, a, i, 4), LANES, n) for a in (cos, sin))
            x0, x1 = kind.load(b, x, LANES, n), kind.load(b, b.add(x, gap), LANES, n)
            y0, y1 = _turn(x0, x1, c, s)
            kind.store(b, d, y0, n)
            kind.store(b, b.add(d, gap), y1, n)

        for_lanes(b, n_pairs, step)

    return _operation(emit)


def _rotate_adjacent(kind: Stored) -> Any:
    """The same for pairs of neighbours."""
    wide = 2 * LANES
    mixed = [i // 2 + i % 2 * LANES for i in range(wide)]

    def emit(b: Any, args: Any) -> None:
        target, source, cos, sin, n_pairs, _ = args

        def step(i: Any, n: Any) -> None:
            d, x = element(b, target, i, 2 * kind.size), element(b, source, i, 2 * kind.size)
            c, s = (FLOAT.load(b, element(b, a, i, 4), LANES, n) for a in (cos, sin))
            both = None if n is None else b.add(n, n)
            pairs = kind.load(b, x, wide, both)
            y0, y1 = _turn(pairs.pick(range(0, wide, 2)), pairs.pick(range(1, wide, 2)), c, s)
            kind.store(b, d, y0.pick(mixed, y1), both)

        for_lanes(b, n_pairs, step)

    return _operation(emit)


def _operation(emit: Any) -> Any:
    def rotate(_: Any, d: Any, x: Any, cos: Any, sin: Any, n: Any, gap: Any) -> Typed:
        i = types.intp
        return typed(types.void(i, i, i, i, i, i), emit)

    return intrinsic(rotate)


@inline
def _as_it_is(node: int, x: int, n: int, row: int) -> int:
    """Heads without a norm."""
    return x


@inline
def _normed_head(node: int, x: int, n: int, row: int) -> int:
    """The head as it is, or, with weights (source 4; parameter 15: eps), its RMS norm at `row`."""
    weights = src_data(node, 4)
    if weights == 0:
        return x
    squares = sum_of_squares(0, x, 0, n, ZERO, ZERO, ZERO, ZERO)
    factor = rms_factor(squares, n, float64(param_float(node, 15)))
    normed(row, x, weights, n, factor, ZERO, ZERO, ZERO)
    return row


@dataclass(frozen=True, slots=True)
class Target:
    """Where rotated heads go, as inline functions."""

    begin: Any  # (node, token, plane, staged) -> address of the first head
    stride: Any  # (node, n) -> bytes from head to head
    end: Any  # (node, index of the token, staged, n values)


@inline
def _dst_begin(node: int, token: int, q: int, staged: int) -> Any:
    return dst_data(node) + token * dst_nb(node, 2) + q * dst_nb(node, 3)


@inline
def _dst_stride(node: int, n: int) -> Any:
    return dst_nb(node, 1)


@inline
def _dst_end(node: int, i: int, staged: int, n: int) -> None:
    """They are where they belong."""


@inline
def _staged_begin(node: int, token: int, q: int, staged: int) -> int:
    return staged


@inline
def _staged_stride(node: int, n: int) -> int:
    return 4 * n


def _set_row(write_row: Any) -> Any:
    """All heads of a token become row ids[i] of dst. Source 3: ids; parameter 14: their bytes."""

    @inline
    def set_row(node: int, i: int, staged: int, n: int) -> None:
        k = load_index(src_data(node, 3) + i * src_nb(node, 3, 0), param_int(node, 14))
        if 0 <= k < dst_ne(node, 1):
            write_row(dst_data(node) + k * dst_nb(node, 1), staged, n)
        else:
            report_id(node, k)

    return set_row


IN_DST = Target(_dst_begin, _dst_stride, _dst_end)


def _rope_kernel(name: str, stored: str, target: Target = IN_DST) -> None:
    """Rotate channel pairs and copy the other channels. A chunk is a range of tokens.

    Parameters: theta scale, frequency scale, YaRN's factor and ramp (low, high), magnitude;
    pairs, mode, sections[4], channels from the first to the second of a pair (1: neighbours),
    first rotated channel. Sources: a, positions, frequency factors, and what is fused with it.
    Scratch: cosines and sines of a token, a head, and for rows all heads.
    """
    kind = STORED[stored]
    size = kind.size
    copy = Row(lambda x, c: x[0], sources=(stored,), target=stored, unroll=4).operation()
    rotate_apart, rotate_adjacent = _rotate_apart(kind), _rotate_adjacent(kind)
    begin, stride, end = target.begin, target.stride, target.end
    head = _normed_head if stored == "f32" else _as_it_is

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, n_heads, n_tokens = src_ne(node, 0, 0), src_ne(node, 0, 1), src_ne(node, 0, 2)
        n_pairs, total = param_int(node, 6), n_tokens * src_ne(node, 0, 3)
        gap, first = size * param_int(node, 12), size * param_int(node, 13)
        cos = scratch(node, ith)
        sin = cos + 4 * n_pairs
        row = sin + 4 * n_pairs
        staged = row + 4 * n
        magnitude = param_float(node, 5)
        for i in range(
            chunk_start(total, chunk, n_chunks), chunk_start(total, chunk + 1, n_chunks)
        ):
            token, q = i % n_tokens, i // n_tokens
            angles(node, sin, token, n_tokens)
            tables(cos, sin, n_pairs, magnitude)
            d = begin(node, token, q, staged)
            a = src_data(node, 0) + token * src_nb(node, 0, 2) + q * src_nb(node, 0, 3)
            for _ in range(n_heads):
                x = head(node, a, n, row)
                if d != x and 2 * n_pairs < n:
                    copy(d, x, 0, n, ZERO, ZERO, ZERO, ZERO)
                if gap == size:
                    rotate_adjacent(d + first, x + first, cos, sin, n_pairs, gap)
                else:
                    rotate_apart(d + first, x + first, cos, sin, n_pairs, gap)
                d += stride(node, n)
                a += src_nb(node, 0, 1)
            end(node, i, staged, n * n_heads)

    register_kernel(name, kernel)


_rope_kernel("rope_f32", "f32")
_rope_kernel("rope_f16", "f16")
for _name in (*PLAIN, *WRITERS):
    _target = Target(_staged_begin, _staged_stride, _set_row(row_writer(_name)))
    _rope_kernel(f"rope_set_rows_{_name}", "f32", _target)
