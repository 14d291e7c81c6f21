"""What a node moves and computes, by its shapes alone, and how long a device takes for it.

One model for the clock of simulated devices, the estimate of a schedule and the planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.tensor import Tensor


class Work(IntEnum):
    """Which of a device's units a node keeps busy."""

    PLAIN = 0
    PRODUCT = 1  # of matrices
    ATTENTION = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read and written, those of the weights among them, and operations on numbers.

    Weights are the matrix of a product, whoever computed it. Costs of nodes on average may be
    fractions: how many experts a batch uses is an expectation.
    """

    bytes: float = 0.0
    flops: float = 0.0
    weight_bytes: float = 0.0
    weight_type: GGMLType | None = None
    work: Work = Work.PLAIN
    repacked: bool = False  # the weights are not laid out as in the file

    @property
    def is_free(self) -> bool:
        """Whether there is nothing to do (a view, an empty tensor)."""
        return self.bytes == 0 and self.flops == 0


FREE = Cost()


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches in practice: GB/s (1e9 bytes), GFLOP/s, and latencies in seconds."""

    gbs: float  # its own memory
    gflops: float
    tensor_gflops: float = 0.0  # products and attention of many columns; 0: as `gflops`
    attention_gflops: float = 0.0  # 0: as `tensor_gflops`
    gbs_of: Mapping[GGMLType, float] = field(default_factory=dict)  # weights of a product
    gflops_of: Mapping[GGMLType, float] = field(default_factory=dict)  # products, by weights
    # the same for repacked weights, in bytes of the file; what is missing is as above
    repacked_gbs_of: Mapping[GGMLType, float] = field(default_factory=dict)
    repacked_gflops_of: Mapping[GGMLType, float] = field(default_factory=dict)
    node_latency: float = 0.0  # on the device, for each node that does work
    submit: float = 0.0  # of the host, for each asynchronous call
    sync: float = 0.0  # of the host, for each wait
    h2d_gbs: float = 0.0  # from pinned host memory; 0: it is host memory
    d2h_gbs: float = 0.0
    pageable: float = 1.0  # share of these for memory that is not pinned
    peer_gbs: float = 0.0  # to a device of the same kind; 0: through host memory
    copy_latency: float = 0.0
    measured: bool = False  # on this machine; else by published figures
    # called with the types of weights that will be asked for: what measuring takes is compiled
    expect: Callable[[Collection[GGMLType]], None] | None = field(default=None, compare=False)

    def seconds(self, cost: Cost) -> float:
        """How long a node takes: memory or arithmetic, whichever is slower, and its start."""
        if cost.is_free:
            return 0.0
        weights = self.weight_gbs(cost)
        memory = cost.weight_bytes / weights + (cost.bytes - cost.weight_bytes) / self.gbs
        return self.node_latency + 1e-9 * max(memory, cost.flops / self.arithmetic(cost))

    def copy_seconds(self, nbytes: float, gbs: float, *, pinned: bool = True) -> float:
        """How long a copy from or to other memory takes at `gbs`, and its start."""
        return self.copy_latency + 1e-9 * nbytes / (gbs if pinned else gbs * self.pageable)

    def weight_gbs(self, cost: Cost) -> float:
        """GB/s of the weights while they are multiplied."""
        return _of_type(cost, self.gbs_of, self.repacked_gbs_of, self.gbs)

    def arithmetic(self, cost: Cost) -> float:
        """GFLOP/s of this kind of work."""
        matrix = self.tensor_gflops or self.gflops
        if cost.work == Work.ATTENTION:
            return self.attention_gflops or matrix
        if cost.work == Work.PRODUCT:
            return _of_type(cost, self.gflops_of, self.repacked_gflops_of, matrix)
        return self.gflops


def _of_type(
    cost: Cost,
    plain: Mapping[GGMLType, float],
    repacked: Mapping[GGMLType, float],
    default: float,
) -> float:
    if cost.weight_type is None:
        return default
    if cost.repacked and cost.weight_type in repacked:
        return repacked[cost.weight_type]
    return plain.get(cost.weight_type, default)


def expected_experts(n_expert: int, n_used: int, n_tokens: int) -> float:
    """Distinct experts that tokens touch if each chooses `n_used` different ones uniformly."""
    if n_expert <= 0:
        return 0.0
    return n_expert * (1.0 - (1.0 - min(1.0, n_used / n_expert)) ** n_tokens)


def expert_bytes(node: Tensor) -> float:
    """Bytes of the experts that a MUL_MAT_ID is expected to use."""
    weights, ids = _source(node, 0), _source(node, 2)
    used = expected_experts(weights.ne[2], ids.ne[0], ids.ne[1])
    return used * weights.type.row_size(weights.ne[0]) * weights.ne[1]


def dense_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, without gaps between its rows."""
    return tensor.type.row_size(tensor.ne[0]) * tensor.nrows


def node_cost(node: Tensor) -> Cost:
    """The cost of computing one node."""
    if node.op == Op.NONE or node.is_view_op or node.is_empty:
        return FREE
    return _COSTS.get(node.op, _elementwise)(node)


def _source(node: Tensor, slot: int) -> Tensor:
    src = node.src[slot]
    assert src is not None, f"{node!r} lacks source {slot}"
    return src


def _read(node: Tensor) -> int:
    return sum(dense_bytes(src) for src in node.src if src is not None)


# ---------------------------------------------------------------- one function per kind of node
def _elementwise(node: Tensor) -> Cost:
    """All sources once, the result once; some operations for each element of the result."""
    return Cost(_read(node) + dense_bytes(node), _PER_ELEMENT.get(node.op, 1) * node.nelements)


def _by_source(node: Tensor) -> Cost:
    """As many operations as the first source has elements (sums, choices)."""
    n = _source(node, 0).nelements
    return Cost(_read(node) + dense_bytes(node), _PER_ELEMENT.get(node.op, 1) * n)


def _fill(node: Tensor) -> Cost:
    """The source only gives the shape."""
    return Cost(dense_bytes(node), 0.0)


def _sort(node: Tensor) -> Cost:
    a = _source(node, 0)
    steps = max(1.0, math.log2(max(1, a.ne[0])))
    return Cost(_read(node) + dense_bytes(node), steps * a.nelements)


def _copy(node: Tensor) -> Cost:
    """The second source, if any, is the target: it is not read."""
    return Cost(dense_bytes(_source(node, 0)) + dense_bytes(node), 0.0)


def _get_rows(node: Tensor) -> Cost:
    a, ids = _source(node, 0), _source(node, 1)
    read = a.type.row_size(a.ne[0]) * node.nrows + dense_bytes(ids)
    return Cost(read + dense_bytes(node), node.nelements)


def _set_rows(node: Tensor) -> Cost:
    """The result is the whole table; only the rows that are set are written."""
    b, ids = _source(node, 0), _source(node, 1)
    written = node.type.row_size(node.ne[0]) * b.nrows
    return Cost(dense_bytes(b) + dense_bytes(ids) + written, b.nelements)


def _product(node: Tensor) -> Cost:
    a, b = _source(node, 0), _source(node, 1)
    weights = dense_bytes(a)
    moved = weights + dense_bytes(b) + dense_bytes(node)
    return _multiplied(node, a, moved, weights)


def _expert_product(node: Tensor) -> Cost:
    """Only the experts in use are read. What is cold is not in the shapes: it counts as used."""
    a, rest = _source(node, 0), node.src[1:]
    weights = expert_bytes(node)
    moved = weights + sum(dense_bytes(src) for src in rest if src is not None) + dense_bytes(node)
    return _multiplied(node, a, moved, weights)


def _multiplied(node: Tensor, a: Tensor, moved: float, weights: float) -> Cost:
    flops = 2.0 * a.ne[0] * node.nelements
    repacked = a.buffer is not None and not a.buffer.buft.is_host
    return Cost(moved, flops, weights, a.type, Work.PRODUCT, repacked)


def _attention(node: Tensor) -> Cost:
    """Every query with all keys and values, masked or not."""
    q, k, v = (_source(node, slot) for slot in range(3))
    pairs = q.ne[1] * q.ne[2] * q.ne[3] * k.ne[1]
    moved = _read(node) + dense_bytes(node)
    return Cost(moved, 2.0 * (k.ne[0] + v.ne[0]) * pairs, work=Work.ATTENTION)


def _convolution(node: Tensor) -> Cost:
    """SSM_CONV: each result is a sum over the kernel's width."""
    width = _source(node, 1).ne[0]
    return Cost(_read(node) + dense_bytes(node), 2.0 * width * node.nelements)


def _delta_net(node: Tensor) -> Cost:
    """Per token and head: decay the state, compare it with the key, correct it, ask it."""
    n, n_head, n_tokens, n_seqs = _source(node, 2).ne
    flops = 7.0 * n * n * n_head * n_tokens * n_seqs
    return Cost(_read(node) + dense_bytes(node), flops)


# operations for each element where it is not one; functions as exp count as eight
_PER_ELEMENT: dict[Op, float] = {
    Op.SCALE: 2,
    Op.CLAMP: 2,
    Op.NORM: 6,
    Op.RMS_NORM: 3,
    Op.L2_NORM: 3,
    Op.SOFT_MAX: 12,
    Op.ROPE: 3,
    Op.UNARY: 9,
    Op.GLU: 11,
    Op.CONCAT: 0,
    Op.REPEAT: 0,
}
_COSTS: dict[Op, Callable[[Tensor], Cost]] = {
    **dict.fromkeys((Op.SUM, Op.SUM_ROWS, Op.MEAN, Op.ARGMAX, Op.CUMSUM), _by_source),
    **dict.fromkeys((Op.ARGSORT, Op.TOP_K), _sort),
    **dict.fromkeys((Op.CPY, Op.CONT, Op.DUP), _copy),
    **dict.fromkeys((Op.MUL_MAT_ID, Op.MUL_MAT_ID_COLD), _expert_product),
    Op.FILL: _fill,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
    Op.MUL_MAT: _product,
    Op.FLASH_ATTN_EXT: _attention,
    Op.SSM_CONV: _convolution,
    Op.GATED_DELTA_NET: _delta_net,
}
