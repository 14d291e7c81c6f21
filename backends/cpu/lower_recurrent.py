"""Lowerings of what layers with a recurrent state compute."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pyggml.backends.cpu.lower_elementwise import plain
from pyggml.backends.cpu.lowering import PlanContext, Step, lowering
from pyggml.backends.cpu.work import row_chunks
from pyggml.ops import Op
from pyggml.params import DeltaNetParams
from pyggml.tensor import Tensor

ROWS = 4  # rows of a state that pass over the tokens together, as in kernels/recurrent.py


def _ssm_conv(node: Tensor) -> bool:
    return plain(node, *node.src)


@lowering(Op.SSM_CONV, _ssm_conv)
def lower_ssm_conv(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    x, kernel = node.src
    assert x is not None and kernel is not None
    channels = node.ne[0] * node.ne[2]
    chunks = row_chunks(ctx, channels, 2 * node.ne[1] * kernel.ne[0])
    yield Step("ssm_conv", chunks, node, (x, kernel))


def _gated_delta_net(node: Tensor) -> bool:
    return plain(*node.src) and node.is_contiguous


@lowering(Op.GATED_DELTA_NET, _gated_delta_net)
def lower_gated_delta_net(node: Tensor, ctx: PlanContext) -> Iterator[Step]:
    assert isinstance(node.params, DeltaNetParams)
    v, gate = node.src[2], node.src[3]
    assert v is not None and gate is not None
    n, n_head, n_tokens, n_seqs = v.ne
    kernel = "gated_delta_net" if gate.ne[0] == 1 else "gated_delta_net_keys"
    chunks = row_chunks(ctx, n_seqs * n_head * -(-n // ROWS), 4 * ROWS * n * n_tokens)
    params = (node.params.n_snapshots, 1 / math.sqrt(n))
    yield Step(kernel, chunks, node, tuple(node.src), params, scratch=4 * n)
