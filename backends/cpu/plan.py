"""Plans: a graph as an array of node descriptors that compiled code runs by itself."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyggml.backend import is_noop
from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.fusion import Fusion
from pyggml.backends.cpu.library import KernelLibrary
from pyggml.backends.cpu.lowering import PlanContext, Step, Work, find_lowering
from pyggml.backends.cpu.memory import ALIGNMENT, aligned_words
from pyggml.backends.cpu.pool import Pool, Words
from pyggml.graph import Graph
from pyggml.ids import IdsUse, ids_use
from pyggml.ops import TensorFlag
from pyggml.tensor import Tensor

_COMPUTE = int(TensorFlag.COMPUTE)
_OPERAND = struct.Struct(f"{layout.OPERAND_WORDS}q")
_HEAD = struct.Struct("6q")


@dataclass(frozen=True, slots=True)
class Label:
    """What a step is, for people."""

    node: str  # name of the (last) tensor
    op: str  # with "+" between those of several nodes
    kernel: str


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a step took."""

    label: Label
    nanoseconds: int


class Plan:
    """Node descriptors, the memory they use and what they are called."""

    def __init__(
        self, graph: Graph, library: KernelLibrary, n_threads: int, *, fuse: bool = True
    ) -> None:
        self.n_threads = n_threads
        steps: list[Step] = []
        self.labels: list[Label] = []
        self._ids: dict[int, IdsUse] = {}  # by step
        for nodes, step in _lower(graph, n_threads, fuse):
            for use in filter(None, map(ids_use, nodes)):
                self._ids[len(steps)] = use
            steps.append(step)
            ops = "+".join(node.op_desc for node in nodes)
            self.labels.append(Label(nodes[-1].name, ops, step.kernel))
        addresses = library.addresses({step.kernel for step in steps})
        places, work_bytes = _place(steps)
        stride = _aligned(max((step.scratch for step in steps), default=0))
        self.memory = aligned_words((work_bytes + stride * n_threads) // 8)
        self.work_bytes, self.scratch_bytes = work_bytes, stride * n_threads
        base = self.memory.ctypes.data
        self._faults = aligned_words(2)
        self.nodes = aligned_words((len(steps) + 1) * layout.WORDS)
        writer = _Writer(self.nodes.data.cast("B"), places, base)
        for i, step in enumerate(steps):
            code, faults = addresses[step.kernel], self._faults.ctypes.data
            head = (code, step.n_chunks, base + work_bytes, stride, faults, i)
            writer.write(i * layout.BYTES, head, step)

    def __len__(self) -> int:
        return len(self.labels)

    def run(self, pool: Pool, n_threads: int) -> None:
        """Compute everything. Raises IdError if a node read an id that names nothing."""
        pool.run(self.nodes, n_threads)
        if self._faults[0]:
            step, id = self._faults.tolist()
            self._faults[:] = 0
            raise self._ids[step - 1].error(id)

    def profile(self, pool: Pool, n_threads: int) -> list[Timing]:
        """Compute everything one step at a time."""
        single = aligned_words(2 * layout.WORDS)
        timings = []
        for label, row in zip(self.labels, self.nodes.reshape(-1, layout.WORDS), strict=False):
            single[: layout.WORDS] = row
            start = time.perf_counter_ns()
            pool.run(single, n_threads)
            timings.append(Timing(label, time.perf_counter_ns() - start))
        return timings

    def describe(self) -> str:
        """One line per step: kernel, chunks, destination and sources."""
        width = max((16, *(len(label.op) for label in self.labels)))
        lines = [f"{len(self)} steps, work {self.work_bytes} B, scratch {self.scratch_bytes} B"]
        for label, row in zip(self.labels, self.nodes.reshape(-1, layout.WORDS), strict=False):
            operands = [
                _shape(row[start : start + layout.OPERAND_WORDS])
                for start in range(layout.DST, layout.PARAMS, layout.OPERAND_WORDS)
                if row[start]
            ]
            chunks = int(row[layout.N_CHUNKS])
            shapes = f"{operands[0]} <- {' '.join(operands[1:])}" if operands else ""
            lines.append(
                f"{label.kernel:24} x{chunks:<4} {label.op:{width}} {shapes}  {label.node}"
            )
        return "\n".join(lines)


def kernel_names(graph: Graph, n_threads: int, *, fuse: bool = True) -> set[str]:
    """The kernels that a plan of the graph would call; nodes of other devices have none.

    Also those of nodes that addresses or callbacks may keep from being fused: every node is
    lowered by itself, and with those that follow it.
    """
    context = PlanContext(n_threads)
    todo = [node for node in graph.nodes if _has_work(node) and find_lowering(node) is not None]
    fusion = Fusion(graph, todo, context) if fuse else None
    names: set[str] = set()
    for i, node in enumerate(todo):
        names.update(step.kernel for step in _lower_node(node, context))
        fused = fusion.find(i) if fusion else None
        if fused:
            names.add(fused[1].kernel)
    return names


def _shape(operand: Words) -> str:
    ne = operand[1:5].tolist()
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return str(ne).replace(" ", "")


def _has_work(node: Tensor) -> bool:
    return bool(int(node.flags) & _COMPUTE) and not is_noop(node) and not node.is_empty


def _lower_node(node: Tensor, context: PlanContext) -> Iterator[Step]:
    """The steps of one node."""
    lower = find_lowering(node)
    if lower is None:
        sources = ", ".join(repr(s) for s in node.src if s is not None)
        raise NotImplementedError(f"the CPU backend has no kernel for {node!r} of {sources}")
    yield from lower(node, context)
    context.written(node)


def _lower(graph: Graph, n_threads: int, fuse: bool) -> Iterator[tuple[Sequence[Tensor], Step]]:
    """The steps of a graph in order, and the nodes of each step."""
    context = PlanContext(n_threads)
    todo = list(filter(_has_work, graph.nodes))
    fusion = Fusion(graph, todo, context) if fuse else None
    i = 0
    while i < len(todo):
        fused = fusion.find(i) if fusion else None
        if fusion and fused:
            yield fused
            fusion.done(*fused)
            i += len(fused[0])
            continue
        node = todo[i]
        i += 1
        for step in _lower_node(node, context):
            yield (node,), step


# ---------------------------------------------------------------- memory
def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _place(steps: Sequence[Step]) -> tuple[dict[Work, int], int]:
    """Offsets of all pieces of plan memory, and its size; steps run strictly one after another,
    so pieces whose first to last steps do not overlap may share memory."""
    life: dict[Work, tuple[int, int]] = {}
    for i, step in enumerate(steps):
        for operand in (step.dst, *step.sources):
            if isinstance(operand, Work):
                life[operand] = (life.get(operand, (i, i))[0], i)
    places: dict[Work, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last step
    size = 0
    for work, (first, last) in life.items():  # in the order of their first steps
        live = sorted(piece for piece in live if piece[2] >= first)
        offset = 0
        for start, end, _ in live:
            if offset + work.nbytes <= start:
                break
            offset = max(offset, end)
        end = offset + _aligned(work.nbytes)
        places[work] = offset
        live.append((offset, end, last))
        size = max(size, end)
    return places, size


# ---------------------------------------------------------------- descriptors
class _Writer:
    """Writes steps as node descriptors."""

    def __init__(self, out: memoryview, places: dict[Work, int], base: int) -> None:
        self.out, self.places, self.base = out, places, base

    def write(self, offset: int, head: tuple[int, ...], step: Step) -> None:
        _HEAD.pack_into(self.out, offset, *head)
        at = offset + 8 * layout.DST
        assert len(step.sources) <= layout.MAX_SOURCES and len(step.params) <= layout.N_PARAMS
        for operand in (step.dst, *step.sources):
            if operand is not None:
                self._operand(at, operand)
            at += 8 * layout.OPERAND_WORDS
        at = offset + 8 * layout.PARAMS
        for value in step.params:
            struct.pack_into("d" if isinstance(value, float) else "q", self.out, at, value)
            at += 8

    def _operand(self, at: int, operand: Tensor | Work) -> None:
        record: tuple[int, ...]
        if isinstance(operand, Work):
            n = operand.nbytes
            shape = (*(operand.ne or (n, 1, 1, 1)), *(operand.nb or (1, n, n, n)))
            record = (self.base + self.places[operand], *shape)
        else:
            assert operand.data is not None or operand.is_empty, f"{operand!r} is not allocated"
            record = (operand.data or 0, *operand.ne, *operand.nb)
        _OPERAND.pack_into(self.out, at, *record)
