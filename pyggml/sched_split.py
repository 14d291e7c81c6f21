"""Cuts an assigned graph into splits of one backend each, with copies of what they read elsewhere.

Pass 5 and later of the scheduler. The nodes' `src` are rewritten to the copies, so that a graph
can be cut only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyggml.backend import is_weight
from pyggml.graph import Graph, next_uid
from pyggml.ops import Op, TensorFlag
from pyggml.sched_assign import VIEW_OPS, Assignment
from pyggml.tensor import MAX_SRC, Tensor

_KEPT = TensorFlag.INPUT | TensorFlag.OUTPUT


@dataclass(slots=True)
class Split:
    """Consecutive nodes that run on one backend, and the tensors copied there first."""

    backend_id: int
    start: int
    stop: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    copies: list[list[Tensor]] = field(default_factory=list)  # of each input, n_copies
    results: list[int] = field(default_factory=list)  # numbers of inputs that are copied back
    away: Tensor | None = None  # the node whose result they are
    graph: Graph = field(default_factory=Graph)
    # until this node has run, these tensors keep their memory
    alloc_deps: dict[Tensor, list[Tensor]] = field(default_factory=dict)

    def copies_used_experts(self, index: int) -> bool:
        """Whether an input holds experts, in host memory, of which only the used ones are copied.

        It is for the first node alone, whose ids are then known.
        """
        node, tensor = self.graph.nodes[0], self.inputs[index]
        return (
            node.op == Op.MUL_MAT_ID
            and any(node.src[0] is copy for copy in self.copies[index])
            and tensor.buffer is not None
            and is_weight(tensor)
            and tensor.buffer.buft.is_host
        )

    def add_alloc_dep(self, tensor: Tensor, until: Tensor) -> None:
        """Keep a tensor's memory until the node `until` has run."""
        kept = self.alloc_deps.setdefault(until, [])
        if tensor not in kept:
            kept.append(tensor)


@dataclass(slots=True)
class Layout:
    """What the allocator sees: all splits' nodes, copies and lifetimes, with backend ids."""

    graph: Graph
    node_ids: list[int]
    leaf_ids: list[int]
    splits: list[Split] = field(default_factory=list)

    def add(self, node: Tensor, backend_id: int) -> None:
        """Append one node."""
        self.graph.nodes.append(node)
        self.node_ids.append(backend_id)


class Cut:
    """The splits of one graph."""

    def __init__(
        self, assignment: Assignment, graph: Graph, *, copy: int = 0, n_copies: int = 1
    ) -> None:
        self.assignment = assignment
        self.graph = graph
        self.copy = copy  # which of the n_copies this evaluation uses
        self.n_copies = n_copies
        self.splits: list[Split] = []
        self.copies: dict[tuple[Tensor, int], list[Tensor]] = {}  # latest of (tensor, backend id)
        self._copied: dict[Tensor, list[tuple[Tensor, int]]] = {}  # keys of `copies` by root
        self.graph_inputs: list[Tensor] = []
        self.stand_ins: dict[Tensor, Tensor] = {}  # for nodes that write away from their memory
        self.shares_memory = False  # a backend reads in place what another one computes
        self._cut()
        if n_copies > 1:
            self._copy_graph_inputs()

    def copy_of(self, split: Split, index: int) -> Tensor:
        """The copy of a split's input that this evaluation uses."""
        return split.copies[index][self.copy]

    # ------------------------------------------------------------ pass 5
    def _cut(self) -> None:
        nodes, ids = self.graph.nodes, self.assignment.ids
        work = [i for i, node in enumerate(nodes) if node.op not in VIEW_OPS]
        if not nodes:
            return
        split = Split(ids[nodes[work[0] if work else 0]], 0)
        self.splits.append(split)
        for i in work:
            node = nodes[i]
            ended = ids[node] != split.backend_id or split.results
            if ended or self._reads_new_weights(node, split):
                split.stop = i
                split = Split(ids[node], i)
                self.splits.append(split)
            if node.view_src is None:
                self._replace_sources(node, split)
            elif self.assignment.can_read(node.view_src, split.backend_id):
                self._write_to(node, node.view_src, split)
            else:
                self._write_away(i, split)
        split.stop = len(nodes)

    def _is_elsewhere(self, tensor: Tensor, backend_id: int) -> bool:
        home = self.assignment.ids[tensor]
        return home != backend_id and not self.assignment.can_read(tensor, backend_id)

    def _reads_new_weights(self, node: Tensor, split: Split) -> bool:
        """Whether copied weights are better off in a split of their own.

        The memory of the weights copied for this split can then be used again.
        """
        return bool(split.inputs) and any(
            src is not None and is_weight(src) and self._is_elsewhere(src, split.backend_id)
            for src in node.src
        )

    def _replace_sources(self, node: Tensor, split: Split) -> None:
        for j, src in enumerate(node.src):
            if src is None or self.assignment.ids[src] == split.backend_id:
                continue
            if self.assignment.can_read(src, split.backend_id):
                self.shares_memory = self.shares_memory or not is_weight(src)
                continue
            if (src, split.backend_id) not in self.copies:
                self._copy_input(src, split)
            node.src[j] = self.copies[src, split.backend_id][self.copy]

    def _write_to(self, node: Tensor, root: Tensor, split: Split) -> None:
        """Copies of memory that a node writes into are out of date from then on."""
        self._replace_sources(node, split)
        for key in self._copied.pop(root, ()):
            self.copies.pop(key, None)

    def _write_away(self, i: int, split: Split) -> None:
        """Let node number i write to a copy of the memory, which ends the split and is copied back.

        Another node stands in for it; the node itself only says where the result is afterwards.
        """
        node, ids = self.graph.nodes[i], self.assignment.ids
        root = node.view_src
        assert root is not None
        slots = [j for j, s in enumerate(node.src) if s is not None and _root(s) is root]
        target = node.src[slots[-1]]
        assert target is not None
        self._copy_input(target, split)  # a fresh one, even if there is another
        split.results.append(len(split.inputs) - 1)
        other = Tensor(
            node.type, node.ne, node.nb, op=node.op, src=tuple(node.src), params=node.params
        ).named(node.name)
        other.flags = node.flags
        self._write_to(other, root, split)
        other.src[slots[-1]] = other.view_src = self.copy_of(split, split.results[-1])
        other.view_offs = node.view_offs - target.view_offs
        self.assignment.set(other, split.backend_id, self.assignment.causes[node])
        ids[node] = ids[target]
        self.graph.nodes[i] = self.stand_ins[node] = other
        self.graph.use_counts[other] = self.graph.use_counts[node]
        split.away = node

    def _copy_input(self, tensor: Tensor, split: Split) -> None:
        to, n = split.backend_id, self.n_copies
        made = [self._duplicate(tensor, to, c, "4.cpy") for c in range(n)]
        if n > 1:  # the allocator must neither free nor reuse them
            for duplicate in made:
                duplicate.flags |= _KEPT
        self.copies[tensor, to] = made
        self._copied.setdefault(_root(tensor), []).append((tensor, to))
        split.inputs.append(tensor)
        split.copies.append(made)

    def _duplicate(self, tensor: Tensor, backend_id: int, copy: int, cause: str) -> Tensor:
        """A tensor of the same layout; it has a cause but no backend id of its own."""
        backend = self.assignment.backends[backend_id]
        duplicate = Tensor(tensor.type, tensor.ne, tensor.nb)
        duplicate.named(f"{backend.name}#{tensor.name}#{copy}")
        self.assignment.causes[duplicate] = cause
        return duplicate

    # ------------------------------------------------------------ pass 6
    def _copy_graph_inputs(self) -> None:
        """Let the evaluations in flight have inputs of their own, used by a node or not."""
        for leaf in self.graph.leafs:
            home = self.assignment.ids[leaf]
            if TensorFlag.INPUT not in leaf.flags or (leaf, home) in self.copies:
                continue
            self.copies[leaf, home] = [
                leaf if c == self.copy else self._duplicate(leaf, home, c, "6.cpy")
                for c in range(self.n_copies)
            ]
            for tensor in self.copies[leaf, home]:
                tensor.flags |= _KEPT
            self.graph_inputs.append(leaf)

    # ------------------------------------------------------------ after the passes
    def optimize(self) -> None:
        """Give every split its graph, in the order that its backend prefers."""
        for split in self.splits:
            split.graph = self.graph.view(split.start, split.stop)
            backend = self.assignment.backends[split.backend_id]
            backend.graph_optimize(split.graph, split.add_alloc_dep)
            self.graph.nodes[split.start : split.stop] = split.graph.nodes
            split.graph.uid = next_uid()

    def layout(self) -> Layout:
        """The graph to allocate memory for."""
        ids = self.assignment.ids
        layout = Layout(Graph(), [], [], self.splits)
        for split in self.splits:
            for i, tensor in enumerate(split.inputs):
                layout.add(_dependency([tensor]), ids[tensor])  # it lives until it is copied
                layout.add(self.copy_of(split, i), split.backend_id)
            _add_nodes(layout, split, ids)
            if split.away is not None:  # afterwards nobody needs what was written to the copy
                layout.add(_dependency([self.stand_ins[split.away]]), split.backend_id)
                layout.add(split.away, ids[split.away])
        if self.n_copies > 1:
            homes = [(self.copies[t, ids[t]], ids[t]) for t in self.graph_inputs]
            homes += [(made, split.backend_id) for split in self.splits for made in split.copies]
            for made, home in homes:
                layout.graph.leafs += made
                layout.leaf_ids += [home] * self.n_copies
        layout.graph.leafs += self.graph.leafs
        layout.leaf_ids += [ids[leaf] for leaf in self.graph.leafs]
        return layout


def _root(tensor: Tensor) -> Tensor:
    """The owner of a tensor's memory."""
    return tensor.view_src or tensor


def _add_nodes(layout: Layout, split: Split, ids: dict[Tensor, int]) -> None:
    if not split.alloc_deps:
        layout.graph.nodes += split.graph.nodes
        layout.node_ids += [ids[node] for node in split.graph.nodes]
        return
    missing = set(split.alloc_deps)
    for node in split.graph.nodes:
        layout.add(node, ids[node])
        kept = split.alloc_deps.get(node, [])
        for i in range(0, len(kept), MAX_SRC):
            layout.add(_dependency(kept[i : i + MAX_SRC]), split.backend_id)
        missing.discard(node)
    assert not missing, f"memory kept until {missing}, which are not nodes of the split"


def _dependency(kept: list[Tensor]) -> Tensor:
    """A node without work that keeps the memory of its sources up to its place."""
    first = kept[0]
    node = Tensor(first.type, first.ne, first.nb, src=tuple(kept))
    node.view_src = first.view_src or first
    node.view_offs = first.view_offs
    return node
