"""From graph nodes to plan steps: registering a lowering is declaring support.

A lowering is a function that yields the steps of one node; each step is one call of a compiled
kernel, cut into chunks. The table below is what `CpuDevice.supports_op` looks at.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache

from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.tensor import Shape, Tensor, dense_strides

# Starting a chunk costs about as much as reading 15 KB.
CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of the plan's own memory (quantized activations); compared by identity.

    It gets its place when the plan is laid out, and keeps it from the first to the last step
    that names it.
    """

    nbytes: int
    ne: Shape | None = None  # if it is shaped like a tensor
    nb: Shape | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call: operands become records of the node descriptor (see node.py)."""

    kernel: str  # name of the kernel function
    n_chunks: int
    dst: Tensor | Work | None
    sources: tuple[Tensor | Work | None, ...]
    params: tuple[int | float, ...] = ()
    scratch: int = 0  # bytes of scratch memory per thread


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """The rows of a node as quantized columns, in one plane."""

    form: Hashable  # as for `quantized`
    kernel: str  # that would make them
    nbytes: int
    params: tuple[int, int, int, int]  # group, blocks, zero point, columns with padding


@dataclass(slots=True)
class PlanContext:
    """What lowerings may ask of the plan under construction."""

    n_threads: int
    # activations already quantized in this plan: root tensor -> (view, format) -> where
    _quantized: dict[Tensor, dict[object, Work]] = field(default_factory=dict)
    # forms in which later products want a node's rows, for steps that can add them (fusion.py)
    wanted: dict[Tensor, WantedColumns] = field(default_factory=dict)

    def work(self, nbytes: int) -> Work:
        """Plan memory (64-byte aligned)."""
        return Work(nbytes)

    def work_tensor(self, type: GGMLType, ne: Shape) -> Work:
        """Plan memory with the shape of a packed tensor."""
        nb = dense_strides(type, ne)
        return Work(nb[3] * ne[3], ne, nb)

    def quantized(self, tensor: Tensor, form: Hashable) -> Work | None:
        """What an earlier node kept of these values in a form; None: nothing, or out of date."""
        kept = self._quantized.get(tensor.view_src or tensor, {})
        return kept.get((tensor.view_offs, tensor.ne, tensor.nb, form))

    def keep_quantized(self, tensor: Tensor, form: Hashable, work: Work) -> None:
        """Offer a converted copy of a tensor to later nodes."""
        kept = self._quantized.setdefault(tensor.view_src or tensor, {})
        kept[tensor.view_offs, tensor.ne, tensor.nb, form] = work

    def written(self, node: Tensor) -> None:
        """A node has written to the memory of node.view_src: copies of it are out of date."""
        if node.view_src is not None:
            self._quantized.pop(node.view_src, None)

    def chunks(self, n_items: int, per_thread: int = 4, nbytes: int | None = None) -> int:
        """How many chunks to cut n_items of equal work into.

        `nbytes` that they read in all: more chunks than threads only if each is worth its start.
        """
        if n_items <= 0:
            return 0
        most = per_thread * self.n_threads if self.n_threads > 1 else 1
        if nbytes is not None:
            most = min(most, max(self.n_threads, nbytes // CHUNK_BYTES))
        return min(n_items, most)


Lower = Callable[[Tensor, PlanContext], Iterator[Step]]
Supports = Callable[[Tensor], bool]

# Modules whose import fills the table.
MODULES = (
    "pyggml.backends.cpu.lower_elementwise",
    "pyggml.backends.cpu.lower_rows",
    "pyggml.backends.cpu.lower_attention",
    "pyggml.backends.cpu.lower_recurrent",
    "pyggml.backends.cpu.lower_matmul",
    "pyggml.backends.cpu.lower_matmul_id",
)

_TABLE: dict[Op, list[tuple[Supports, Lower]]] = {}


def lowering(op: Op, when: Supports) -> Callable[[Lower], Lower]:
    """Register how a node of `op` for which `when` holds becomes steps; first match wins."""

    def register(lower: Lower) -> Lower:
        _TABLE.setdefault(op, []).append((when, lower))
        return lower

    return register


@cache
def table() -> dict[Op, list[tuple[Supports, Lower]]]:
    """All lowerings."""
    for name in MODULES:
        importlib.import_module(name)
    return _TABLE


def find_lowering(node: Tensor) -> Lower | None:
    """The lowering for a node; None: not supported."""
    for when, lower in table().get(node.op, ()):  # asked for every node of every graph
        if when(node):
            return lower
    return None
