"""Fusion: neighbouring nodes of a graph that one step computes.

A pattern is a chain of operations, each of which reads the one before as its first source. What
lies between may go only if nobody else sees it, and the step may write only where it does not
overwrite what it still reads: the allocator has planned for one node after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.backends.cpu.lower_fused import PATTERNS, Pattern
from pyggml.backends.cpu.lower_matmul import wanted_columns
from pyggml.backends.cpu.lower_matmul_id import wanted_expert_columns
from pyggml.backends.cpu.lowering import PlanContext, Step, Work
from pyggml.graph import Graph
from pyggml.ops import Op, TensorFlag
from pyggml.tensor import Tensor

_OUTPUT = int(TensorFlag.OUTPUT)
WANTED = {Op.MUL_MAT: wanted_columns, Op.MUL_MAT_ID: wanted_expert_columns}


class Fusion:
    """Finds the patterns in the nodes of a plan."""

    def __init__(self, graph: Graph, nodes: Sequence[Tensor], context: PlanContext) -> None:
        self.graph, self.nodes, self.context = graph, nodes, context
        self._patterns: dict[Op, list[Pattern]] = {}
        for pattern in PATTERNS:
            self._patterns.setdefault(pattern.ops[0], []).append(pattern)
        for node in nodes:
            wanted = WANTED[node.op](node) if node.op in WANTED else None
            if wanted is not None and node.src[1] is not None:
                context.wanted.setdefault(_whole(node.src[1]), wanted)

    def find(self, i: int) -> tuple[Sequence[Tensor], Step] | None:
        """The step of the longest chain that starts with node i, and its nodes."""
        for pattern in self._patterns.get(self.nodes[i].op, ()):
            nodes = self.nodes[i : i + len(pattern.ops)]
            if tuple(n.op for n in nodes) == pattern.ops and self._is_chain(nodes, pattern.kept):
                step = pattern.lower(nodes, self.context)
                if step is not None and _is_safe(nodes, pattern.kept, step):
                    return nodes, step
        return None

    def done(self, nodes: Sequence[Tensor], step: Step) -> None:
        """The step is part of the plan: offer the columns that it makes."""
        for node in nodes:
            self.context.written(node)
        for work in step.sources:
            if isinstance(work, Work):
                self.context.keep_quantized(nodes[-1], self.context.wanted[nodes[-1]].form, work)

    def _is_chain(self, nodes: Sequence[Tensor], kept: int | None) -> bool:
        """Each node reads the one before, which is kept or which nobody else needs."""
        for i, (node, reader) in enumerate(zip(nodes, nodes[1:], strict=False)):
            source = reader.src[0]
            while source is not node and source is not None and self._is_passing(source):
                source = source.src[0]
            if source is not node:
                return False
            if i != kept and not self.graph.node_has_n_uses(node, 1):
                return False
        return True

    def _is_passing(self, view: Tensor) -> bool:
        """Another shape of a whole packed tensor, with a single reader."""
        whole = view.src[0] if view.is_view_op else None
        return (
            whole is not None
            and view.is_contiguous
            and whole.is_contiguous
            and view.nbytes == whole.nbytes
            and self.graph.use_counts.get(view) == 1
            and not int(view.flags) & _OUTPUT
        )


def _whole(x: Tensor) -> Tensor:
    """The node whose values a view of the same shape shows."""
    source = x.view_src
    same = source is not None and not x.view_offs and source.same_layout(x)
    return source if source is not None and same else x


def _is_safe(nodes: Sequence[Tensor], kept: int | None, step: Step) -> bool:
    """Whether all that is written lies apart from what is read, or row on row."""
    assert isinstance(step.dst, Tensor)
    written = [step.dst] if kept is None else [step.dst, nodes[kept]]
    read = [s for s in step.sources if isinstance(s, Tensor)]
    return all(_apart(w, r) for w in written for r in read if w is not r)


def _apart(w: Tensor, r: Tensor) -> bool:
    if w.data is None or r.data is None:  # only the kernels are asked for
        return True
    if w.data == r.data and w.same_layout(r):
        return True
    return w.data + w.nbytes <= r.data or r.data + r.nbytes <= w.data
