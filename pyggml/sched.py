"""The scheduler: runs a graph on several backends (ggml_backend_sched).

Assign every tensor a backend, cut the graph into splits, copy what crosses, give everything
memory, run. Splitting and allocating happen once per graph; computing it again repeats neither.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from pyggml import env
from pyggml.alloc import GraphAllocator
from pyggml.backend import Backend, Buffer, BufferType, DeviceType, Event, Status
from pyggml.errors import ConfigError
from pyggml.graph import Graph, next_uid
from pyggml.sched_assign import Assignment
from pyggml.sched_dump import NODES, Dump
from pyggml.sched_run import EvalCallback, Run
from pyggml.sched_split import Cut, Layout, Split
from pyggml.tensor import Tensor

log = logging.getLogger("pyggml.sched")

MAX_BACKENDS = 16


class UnexpectedReallocation(RuntimeError):
    """GGML_SCHED_DEBUG_REALLOC found a graph that needed new buffers."""


class Scheduler:
    """Backends in order of priority, the CPU last.

    Use: `reset`, build a graph, `alloc_graph`, write the inputs, `graph_compute` as often as the
    graph stays the same. `reserve` a largest graph first, and later ones need no new buffers.

    With `parallel` up to GGML_SCHED_MAX_COPIES evaluations may be in flight, each with inputs and
    copies of its own: the host prepares the next one while devices work on the last.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        bufts: Sequence[BufferType] | None = None,
        *,
        parallel: bool = False,
        op_offload: bool = True,
        no_alloc: bool = False,
        stream: TextIO | None = None,
        debug: int | None = None,
    ) -> None:
        """`no_alloc`: only sizes are wanted; what is reserved cannot be run.

        `debug`: 1 splits, 2 nodes as well, 0 nothing is printed; None: as GGML_SCHED_DEBUG says.
        """
        self.backends = tuple(backends)
        self.bufts = tuple(bufts or (b.device.buffer_type() for b in self.backends))
        _check(self.backends, self.bufts)
        self.n_copies = _max_copies() if parallel else 1
        self.n_splits = 0
        self.eval_callback: EvalCallback | None = None
        self._stream = stream  # of the debug text; None: stderr
        self._debug = env.integer("GGML_SCHED_DEBUG") if debug is None else debug
        self._debug_realloc = env.integer("GGML_SCHED_DEBUG_REALLOC")
        self._events: list[list[Event | None]] = [
            [b.device.new_event() if self.n_copies > 1 else None for b in self.backends]
            for _ in range(self.n_copies)
        ]
        self._assignment = Assignment(self.backends, self.bufts, op_offload=op_offload)
        # other backends were promised that a node lies in the memory of its own backend; ggml lets
        # it inherit, say, host memory that only its backend reads
        self._allocator = GraphAllocator(self.bufts, stay_in_buffer=True, no_alloc=no_alloc)
        self._copy, self._next_copy = 0, 0
        self._cut: Cut | None = None
        self._run: Run | None = None  # of the allocated graph
        self._layout = Layout(Graph(), [], [])
        self._is_reset, self._is_alloc = True, False

    # ------------------------------------------------------------ planning
    def reset(self) -> None:
        """Forget the graph and all assignments; call it before allocating a new graph."""
        self._assignment.clear()
        self._cut = self._run = None
        self._is_reset, self._is_alloc = True, False

    def set_tensor_backend(self, tensor: Tensor, backend: Backend) -> None:
        """Decide a tensor's backend before its graph is allocated."""
        self._assignment.set(tensor, self.backends.index(backend), "usr")

    def get_tensor_backend(self, tensor: Tensor) -> Backend | None:
        """Where a tensor lives or is computed; None: unknown since the last reset."""
        backend_id = self._assignment.ids.get(tensor)
        return None if backend_id is None else self.backends[backend_id]

    def cause(self, tensor: Tensor) -> str:
        """Why a tensor is where it is, in ggml's short words: `1.wgt0`, `2.sup`; empty: unknown."""
        return self._assignment.causes.get(tensor, "")

    def reserve(self, graph: Graph) -> None:
        """Allocate buffers for a graph without running it. Raises OutOfMemory."""
        self.synchronize()
        try:
            self._split(graph)
            self._reserve()
        finally:
            self.reset()

    def reserve_size(self, graph: Graph) -> list[int]:
        """Bytes per backend that `reserve` would need; allocates nothing."""
        if self._cut is not None:  # else decisions of set_tensor_backend are for this graph
            self.reset()
        self.synchronize()
        self._split(graph)
        layout = self._layout
        return self._allocator.reserve_size(layout.graph, layout.node_ids, layout.leaf_ids)

    def alloc_graph(self, graph: Graph) -> None:
        """Split a graph and give its tensors memory. Raises OutOfMemory."""
        assert not self._is_alloc, "a graph is allocated: call reset() first"
        self._copy = self._next_copy
        self._next_copy = (self._next_copy + 1) % self.n_copies
        previous = self._layout
        cut = self._split(graph)
        self._alloc_splits(previous)
        self._run = Run(self.backends, cut, self._events[self._copy])
        self._is_alloc = True

    def _split(self, graph: Graph) -> Cut:
        self._is_reset = False
        graph.uid = next_uid()
        self._assignment.assign(graph)
        self._cut = cut = Cut(self._assignment, graph, copy=self._copy, n_copies=self.n_copies)
        self.n_splits = len(cut.splits)
        if self._debug > 0:
            text = Dump(self._assignment).text(graph, cut.splits, self._debug)
            print(text, end="", file=self._stream or sys.stderr, flush=True)
        cut.optimize()
        self._layout = cut.layout()
        return cut

    def _reserve(self) -> None:
        layout = self._layout
        self._allocator.reserve_n(layout.graph, layout.node_ids, layout.leaf_ids)

    def _alloc_splits(self, previous: Layout) -> None:
        moved = self._has_moved(previous)
        if not moved and self._allocator.alloc_graph(self._layout.graph):
            return
        if self._debug_realloc > 0:
            self._check_reallocation(previous, moved)
        # inputs of work in flight may move to another address; unlike synchronize() this keeps
        # the copy in use
        for backend in self.backends:
            backend.synchronize()
        self._reserve()
        assert self._allocator.alloc_graph(self._layout.graph)

    def _has_moved(self, previous: Layout) -> bool:
        """Whether a node or leaf changed to a backend with other memory."""
        pairs = (
            (previous.node_ids, self._layout.node_ids),
            (previous.leaf_ids, self._layout.leaf_ids),
        )
        return any(
            self.bufts[a] is not self.bufts[b]
            for old, new in pairs
            if old != new
            for a, b in zip(old, new, strict=False)
        )

    def _check_reallocation(self, previous: Layout, moved: bool) -> None:
        size, before = (len(g.nodes) + len(g.leafs) for g in (self._layout.graph, previous.graph))
        unexpected = not moved and size == before
        if unexpected or self._debug_realloc > 1:
            kind = "unexpected " if unexpected else ""
            raise UnexpectedReallocation(
                f"{kind}graph reallocation (graph size {size}, before {before}, "
                f"backends changed: {moved})"
            )

    # ------------------------------------------------------------ running
    def graph_compute(self, graph: Graph) -> Status:
        """Run a graph and wait for it."""
        status = self.graph_compute_async(graph)
        self.synchronize()
        return status

    def graph_compute_async(self, graph: Graph) -> Status:
        """Run a graph, allocating it first if need be. Raises OutOfMemory."""
        if not self._is_alloc:
            if not self._is_reset:
                self.reset()
            self.alloc_graph(graph)
        run = self._run
        assert run is not None and run.cut.graph is graph, (
            "another graph is allocated: call reset()"
        )
        return run.run(self.eval_callback)

    def synchronize(self) -> None:
        """Wait for all backends."""
        for backend in self.backends:
            backend.synchronize()
        if not self._is_alloc:
            # token by token always uses copy 0, so that captured graphs stay valid
            self._next_copy = 0

    # ------------------------------------------------------------ reports
    @property
    def splits(self) -> Sequence[Split]:
        """The splits of the present graph; empty after a reset."""
        return tuple(self._cut.splits) if self._cut is not None else ()

    @property
    def cut(self) -> Cut | None:
        """The present graph with its splits and copies; None after a reset."""
        return self._cut

    @property
    def layout(self) -> Layout:
        """What memory was planned for last: nodes, copies and leafs with their backend ids."""
        return self._layout

    def buffer_size(self, backend: Backend) -> int:
        """Bytes allocated for a backend's tensors (0 if an earlier one shares its memory)."""
        return self._allocator.buffer_size(self.backends.index(backend))

    def buffers(self, backend: Backend) -> Sequence[Buffer]:
        """What was allocated for a backend's tensors (none if an earlier one shares its memory)."""
        return self._allocator.buffers(self.backends.index(backend))

    def dump(self, *, level: int = NODES) -> str:
        """The text of GGML_SCHED_DEBUG for the present graph."""
        if self._cut is None:
            return ""
        return Dump(self._assignment).text(self._cut.graph, self._cut.splits, level)


def _max_copies() -> int:
    """How many evaluations may be in flight. Raises ConfigError."""
    n = env.integer("GGML_SCHED_MAX_COPIES")
    if n < 1:
        raise ConfigError(f"GGML_SCHED_MAX_COPIES={n}: at least one evaluation has to run")
    return n


def _check(backends: Sequence[Backend], bufts: Sequence[BufferType]) -> None:
    if not 1 <= len(backends) <= MAX_BACKENDS:
        raise ConfigError(f"{len(backends)} backends: a scheduler takes 1 to {MAX_BACKENDS}")
    if backends[-1].device.type != DeviceType.CPU:
        raise ConfigError(f"the last backend has to be a CPU, not {backends[-1].name}")
    if len(bufts) != len(backends):
        raise ConfigError(f"{len(bufts)} buffer types for {len(backends)} backends")
    for backend, buft in zip(backends, bufts, strict=True):
        if not backend.supports_buft(buft):
            raise ConfigError(f"{backend.name} cannot use buffers of type {buft.name}")
