"""Lowerings of rotary positions and attention."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.backends.cpu.lowering import PlanContext, Step, lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.dtypes import GGMLType
from pyggml.formulas import rope_magnitude, rope_ramp, rope_theta_scale
from pyggml.ops import Op, RopeMode
from pyggml.params import RopeParams
from pyggml.tensor import Tensor

T = GGMLType

# ---------------------------------------------------------------- rope
# Modes as kernels/rope.py numbers them: how a pair finds its position.
POSITIONS = {RopeMode.MROPE: 1, RopeMode.IMROPE: 2, RopeMode.VISION: 3}


def _rope(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    rows = a.has_contiguous_rows and node.has_contiguous_rows
    return node.type in (T.F32, T.F16) and a.type == node.type and rows


def rope_gap(params: RopeParams) -> tuple[int, int]:
    """Pairs, and the distance between the two channels of a pair."""
    if params.mode == RopeMode.VISION:
        return params.n_dims, params.n_dims
    half = params.n_dims // 2
    return half, 1 if params.mode == RopeMode.NORMAL else half


@lowering(Op.ROPE, _rope)
def lower_rope(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    params = node.params
    assert isinstance(params, RopeParams)
    n_pairs, gap = rope_gap(params)
    floats = (
        rope_theta_scale(params),
        float(params.freq_scale),
        float(params.ext_factor),
        *rope_ramp(params),
        rope_magnitude(params),
    )
    mode = POSITIONS.get(params.mode, 0)
    ints = (n_pairs, mode, *params.sections, gap, params.n_offs)
    a, positions, factors = (*node.src, None)[:3]
    chunks = row_chunks(ctx, node.ne[2] * node.ne[3], node.ne[0] * (2 * node.ne[1] + 16))
    kernel = f"rope_{node.type.name.lower()}"
    sources = (a, positions, factors)
    yield Step(kernel, chunks, node, sources, (*floats, *ints), scratch=8 * n_pairs)
