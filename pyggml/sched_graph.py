"""What runs where, and why: a split graph as plain data.

Everything is a frozen record of numbers and texts, so that it can be written as JSON or drawn
after the scheduler is gone. Nodes, leafs and copies have ids (`n12`, `l3`, `c0`); the number in an
id is the position in its list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyggml.backend import Backend, buffer_of, is_weight
from pyggml.cost import Rates, expert_bytes, node_cost
from pyggml.estimate import Estimate, SplitTime, estimate
from pyggml.ops import Op, TensorFlag
from pyggml.sched import Scheduler
from pyggml.sched_cause import Placed, reason_of
from pyggml.sched_layers import Fold, Section, fold, sections_of, without_numbers
from pyggml.sched_split import Cut, Split
from pyggml.tensor import Tensor

WEIGHT, INPUT, MEMORY, LEAF = "weight", "input", "memory", "leaf"  # kinds of leafs
RESULT, EXPERTS = "result", "used experts"  # further kinds of what is copied


@dataclass(frozen=True, slots=True)
class GraphDevice:
    """A backend of the scheduler, best first, and what the graph gives it to do."""

    name: str
    description: str
    type: str  # CPU, GPU, ...
    splits: int
    nodes: int  # without views
    traffic: int  # bytes that its nodes read and write
    flops: int
    seconds: float | None  # modelled, of its nodes; None: its speed is unknown


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Bytes in one kind of memory."""

    buffer: str
    device: str
    weights: int
    memory: int  # of sequences: keys, values, states
    compute: int  # to run this graph in


@dataclass(frozen=True, slots=True)
class GraphLeaf:
    """What is there before the graph runs."""

    id: str
    name: str
    kind: str  # weight, input, memory or leaf
    type: str
    ne: tuple[int, ...]
    bytes: int
    buffer: str  # the buffer type's name; empty: not allocated yet
    backend: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class GraphCopy:
    """A tensor that is brought to another backend before a split runs."""

    id: str
    name: str
    kind: str  # result, weight, used experts, input, memory or leaf
    source: str  # id of the node or leaf
    split: int
    origin: str  # backends
    target: str
    type: str
    ne: tuple[int, ...]
    bytes: int  # of the tensor
    moved: int  # bytes, expected: of experts only those in use
    back: bool  # after the split it is copied to where it came from


@dataclass(frozen=True, slots=True)
class GraphNode:
    """An operation."""

    id: str
    name: str
    op: str
    type: str
    ne: tuple[int, ...]
    bytes: int  # of the result
    backend: str
    cause: str  # ggml's short word
    reason: str  # the same as a sentence
    split: int
    sources: tuple[str, ...]  # ids
    is_view: bool  # nothing to compute
    is_output: bool
    traffic: int  # bytes read and written
    flops: int
    seconds: float | None  # modelled; None: unknown


@dataclass(frozen=True, slots=True)
class GraphSplit:
    """Nodes `start` to `stop` - 1, which run together, after the copies."""

    index: int
    backend: str
    start: int
    stop: int
    copies: tuple[str, ...]  # ids
    copying: float | None  # modelled time of the copies; None: unknown


@dataclass(frozen=True, slots=True)
class GraphSeam:
    """All copies from one backend to another."""

    origin: str
    target: str
    copies: int
    bytes: int
    moved: int


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """One graph as its scheduler has planned it."""

    name: str  # prompt, token
    n_tokens: int
    seconds: float | None  # modelled; None: unknown
    devices: tuple[GraphDevice, ...]
    memory: tuple[GraphMemory, ...]
    seams: tuple[GraphSeam, ...]
    splits: tuple[GraphSplit, ...]
    copies: tuple[GraphCopy, ...]
    nodes: tuple[GraphNode, ...]
    leafs: tuple[GraphLeaf, ...]
    sections: tuple[Section, ...]  # layers: ranges of nodes
    folds: tuple[Fold, ...]  # ranges of alike sections


@dataclass(frozen=True, slots=True)
class SplitGraphs:
    """Graphs of one model: what a file holds."""

    model: str
    description: str
    graphs: tuple[SplitGraph, ...]


def describe(sched: Scheduler, name: str, n_tokens: int, compute: Sequence[int] = ()) -> SplitGraph:
    """The graph that a scheduler has split; `compute` are the bytes it reserves per backend."""
    assert sched.cut is not None, "no graph is split"
    return _Describer(sched, sched.cut).describe(name, n_tokens, compute)


class _Describer:
    """Turns tensors into records."""

    def __init__(self, sched: Scheduler, cut: Cut) -> None:
        self.sched = sched
        self.cut = cut
        self.names = [backend.name for backend in sched.backends]
        self.rates = [backend.device.rates() for backend in sched.backends]
        self.ids = {leaf: f"l{i}" for i, leaf in enumerate(cut.graph.leafs)}
        nodes = (node for split in cut.splits for node in split.graph.nodes)
        self.ids |= {node: f"n{i}" for i, node in enumerate(nodes)}
        self.ids |= {node: self.ids[other] for node, other in cut.stand_ins.items()}
        places = ((split, i) for split in cut.splits for i in range(len(split.inputs)))
        self.originals: dict[Tensor, Tensor] = {}
        for k, (split, i) in enumerate(places):
            copy = cut.copy_of(split, i)
            self.ids[copy] = f"c{k}"
            self.originals[copy] = split.inputs[i]

    def describe(self, name: str, n_tokens: int, compute: Sequence[int]) -> SplitGraph:
        times = self._estimate()
        splits = self._splits(times.splits if times else ())
        copies, nodes = tuple(self._copies()), tuple(self._nodes())
        leafs = tuple(self._leaf(leaf) for leaf in self.cut.graph.leafs)
        tensors = [node for split in self.cut.splits for node in split.graph.nodes]
        sections = sections_of(tensors)
        begins = {split.start: _look(copies, split) for split in splits}
        looks = [(n.op, n.backend, n.cause, begins.get(i)) for i, n in enumerate(nodes)]
        return SplitGraph(
            name,
            n_tokens,
            round(times.seconds, 9) if times else None,
            tuple(self._device(i, splits, nodes) for i in range(len(self.names))),
            tuple(self._memory(compute)),
            tuple(_seams(copies)),
            splits,
            copies,
            nodes,
            leafs,
            sections,
            fold(sections, looks),
        )

    # ------------------------------------------------------------ parts
    def _home(self, tensor: Tensor) -> Backend:
        backend = self.sched.get_tensor_backend(tensor)
        assert backend is not None, f"{tensor!r} has no backend"
        return backend

    def _reason(self, tensor: Tensor) -> tuple[str, str]:
        cause = self.sched.cause(tensor)
        sources = [src and self.originals.get(src, src) for src in tensor.src]
        return cause, reason_of(Placed(tensor, sources, self._home(tensor).name), cause)

    def _leaf(self, leaf: Tensor) -> GraphLeaf:
        return GraphLeaf(
            self.ids[leaf],
            leaf.name,
            _kind(leaf),
            leaf.type.label,
            _shape(leaf),
            leaf.nbytes,
            leaf.buffer.name if leaf.buffer is not None else "",
            self._home(leaf).name,
            *self._reason(leaf),
        )

    def _splits(self, times: Sequence[SplitTime]) -> tuple[GraphSplit, ...]:
        made: list[GraphSplit] = []
        start = 0
        for i, split in enumerate(self.cut.splits):
            stop = start + len(split.graph.nodes)
            copies = (self.cut.copy_of(split, k) for k in range(len(split.inputs)))
            ids = tuple(self.ids[copy] for copy in copies)
            copying = round(times[i].copying, 9) if times else None
            made.append(GraphSplit(i, self.names[split.backend_id], start, stop, ids, copying))
            start = stop
        return tuple(made)

    def _nodes(self) -> Iterator[GraphNode]:
        for i, split in enumerate(self.cut.splits):
            rates = self.rates[split.backend_id]
            for node in split.graph.nodes:
                yield self._node(node, i, rates)

    def _node(self, node: Tensor, split: int, rates: Rates | None) -> GraphNode:
        cost = node_cost(node)
        return GraphNode(
            self.ids[node],
            node.name,
            node.op_desc,
            node.type.label,
            _shape(node),
            node.nbytes,
            self._home(node).name,
            *self._reason(node),
            split,
            tuple(self.ids[src] for src in node.src if src is not None),
            node.is_view_op,
            TensorFlag.OUTPUT in node.flags,
            round(cost.bytes),
            round(cost.flops),
            round(rates.seconds(cost), 9) if rates is not None else None,
        )

    # ------------------------------------------------------------ copies
    def _copies(self) -> Iterator[GraphCopy]:
        for i, split in enumerate(self.cut.splits):
            for k in range(len(split.inputs)):
                yield self._copy(split, k, i)

    def _copy(self, split: Split, number: int, index: int) -> GraphCopy:
        tensor, copy = split.inputs[number], self.cut.copy_of(split, number)
        home = self._home(tensor)
        only_used = split.copies_used_experts(number)
        moved = round(expert_bytes(split.graph.nodes[0])) if only_used else tensor.nbytes
        return GraphCopy(
            self.ids[copy],
            copy.name,
            EXPERTS if only_used else _kind(tensor) if tensor.op == Op.NONE else RESULT,
            self.ids[tensor],
            index,
            home.name,
            self.names[split.backend_id],
            tensor.type.label,
            _shape(tensor),
            tensor.nbytes,
            moved,
            number in split.results,
        )

    # ------------------------------------------------------------ totals
    def _estimate(self) -> Estimate | None:
        """None: a device's speed is unknown."""
        return None if None in self.rates else estimate(self.sched)

    def _device(
        self, index: int, splits: Sequence[GraphSplit], nodes: Sequence[GraphNode]
    ) -> GraphDevice:
        device, name = self.sched.backends[index].device, self.names[index]
        mine = [s for s in splits if s.backend == name]
        work = [n for s in mine for n in nodes[s.start : s.stop] if not n.is_view]
        return GraphDevice(
            name,
            device.description,
            device.type.name,
            len(mine),
            len(work),
            sum(n.traffic for n in work),
            sum(n.flops for n in work),
            _total(n.seconds for n in work) if self.rates[index] is not None else None,
        )

    def _memory(self, compute: Sequence[int]) -> Iterator[GraphMemory]:
        """One row for each buffer type in use, those of the first backends first."""
        bufts = {buft: (0, 0, size) for buft, size in zip(self.sched.bufts, compute, strict=False)}
        for leaf in self.cut.graph.leafs:
            buffer = buffer_of(leaf)
            if buffer is not None:
                weights, memory, size = bufts.get(buffer.buft, (0, 0, 0))
                if _kind(leaf) == WEIGHT:
                    weights += leaf.nbytes
                else:
                    memory += leaf.nbytes
                bufts[buffer.buft] = weights, memory, size
        order = {backend.device.name: i for i, backend in enumerate(self.sched.backends)}
        for buft in sorted(bufts, key=lambda b: (order.get(b.device.name, len(order)), b.name)):
            yield GraphMemory(buft.name, buft.device.name, *bufts[buft])


def _kind(leaf: Tensor) -> str:
    if is_weight(leaf):
        return WEIGHT
    if TensorFlag.INPUT in leaf.flags:
        return INPUT
    return MEMORY if buffer_of(leaf) is not None else LEAF


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tensor.ne[: tensor.n_dims]


def _look(copies: Sequence[GraphCopy], split: GraphSplit) -> tuple[object, ...]:
    """What is alike in the beginnings of splits of alike layers."""
    mine = (copies[int(id[1:])] for id in split.copies)
    return tuple((c.kind, c.origin, without_numbers(c.name)) for c in mine)


def _seams(copies: Sequence[GraphCopy]) -> Iterator[GraphSeam]:
    ways = [(c.origin, c.target, c) for c in copies]
    ways += [(c.target, c.origin, c) for c in copies if c.back]
    for origin, target in sorted({way[:2] for way in ways}):
        found = [copy for *ends, copy in ways if ends == [origin, target]]
        moved = sum(c.moved for c in found)
        yield GraphSeam(origin, target, len(found), sum(c.bytes for c in found), moved)


def _total(parts: Iterator[float | None]) -> float | None:
    """The sum; None if one is unknown."""
    known = list(parts)
    return None if None in known else round(sum(s for s in known if s is not None), 9)
