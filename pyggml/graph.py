"""Graphs: an ordered list of nodes, found depth-first from the results that are wanted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from pyggml.ops import Op, TensorFlag
from pyggml.tensor import Tensor

_uids = itertools.count(1)
_COMPUTE = int(TensorFlag.COMPUTE)  # tests on plain integers: IntFlag's operators are slow


def next_uid() -> int:
    """A number that no other graph of this process has."""
    return next(_uids)


class Graph:
    """Nodes in execution order, leafs, and how often each tensor is used.

    Only `src` edges are followed: every view has its source in src[0].
    """

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.use_counts: dict[Tensor, int] = {}
        self.uid = 0  # 0: unknown; equal non-zero uids promise an identical graph

    def expand(self, tensor: Tensor, *, compute: bool = True) -> None:
        """Add everything that `tensor` needs, sources first."""
        self._visit(tensor, compute)

    def _visit(self, root: Tensor, compute: bool) -> None:
        # An explicit stack: deep models would pass Python's recursion limit.
        stack: list[tuple[Tensor, int]] = []
        if self._enter(root, compute):
            stack.append((root, 0))
        while stack:
            node, slot = stack.pop()
            while slot < len(node.src):
                child = node.src[slot]
                slot += 1
                if child is None:
                    continue
                fresh = self._enter(child, compute)
                self.use_counts[child] += 1
                if fresh:
                    stack.append((node, slot))
                    stack.append((child, 0))
                    break
            else:
                self._append(node)

    def _enter(self, tensor: Tensor, compute: bool) -> bool:
        """Mark as visited; True if its sources are still to be visited."""
        if compute and tensor.op != Op.NONE and not (flags := int(tensor.flags)) & _COMPUTE:
            tensor.flags = tensor.flags | TensorFlag.COMPUTE if flags else TensorFlag.COMPUTE
        if tensor not in self.use_counts:
            self.use_counts[tensor] = 0
            return True
        if compute:
            self._spread_compute(tensor)
        return False

    @staticmethod
    def _spread_compute(tensor: Tensor) -> None:
        """Let a branch that was added without COMPUTE be executed after all."""
        stack = [tensor]
        while stack:
            for src in stack.pop().src:
                if src is not None and src.op != Op.NONE and not int(src.flags) & _COMPUTE:
                    src.flags |= TensorFlag.COMPUTE
                    stack.append(src)

    def _append(self, tensor: Tensor) -> None:
        if tensor.op == Op.NONE and TensorFlag.PARAM not in tensor.flags:
            tensor.name = tensor.name or f"leaf_{len(self.leafs)}"
            self.leafs.append(tensor)
        else:
            tensor.name = tensor.name or f"node_{len(self.nodes)}"
            self.nodes.append(tensor)

    def view(self, start: int, stop: int) -> Graph:
        """The nodes start..stop-1 as a graph of their own; use counts are shared."""
        part = Graph()
        part.nodes = self.nodes[start:stop]
        part.use_counts = self.use_counts
        return part

    def find(self, name: str) -> Tensor | None:
        """The first leaf or node with that name."""
        return next((t for t in itertools.chain(self.leafs, self.nodes) if t.name == name), None)

    def node_has_n_uses(self, node: Tensor, n: int) -> bool:
        """Used exactly n times, not a view and not an output: safe to fuse away."""
        return (
            self.use_counts.get(node, 0) == n
            and not node.is_view
            and TensorFlag.OUTPUT not in node.flags
        )

    def dump_dot(self) -> str:
        """The graph in Graphviz' language."""
        ids = {t: f"t{i}" for i, t in enumerate(itertools.chain(self.leafs, self.nodes))}
        lines = ["digraph G {", "  rankdir = TB;"]
        for t, key in ids.items():
            shape = "box" if t.op == Op.NONE else "ellipse"
            label = f"{t.name}\\n{t.op_desc} {t.type.label} {list(t.ne)}"
            lines.append(f'  {key} [shape={shape}, label="{label}"];')
        for t, key in ids.items():
            lines += [f"  {ids[s]} -> {key};" for s in t.src if s is not None and s in ids]
        return "\n".join([*lines, "}"]) + "\n"


def build_graph(results: Iterable[Tensor]) -> Graph:
    """A graph that computes all of `results`, in their order."""
    graph = Graph()
    for tensor in results:
        graph.expand(tensor)
    return graph
