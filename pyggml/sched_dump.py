"""The text of GGML_SCHED_DEBUG: splits with their inputs, nodes with their backends."""

from __future__ import annotations

from pyggml.graph import Graph
from pyggml.ops import TensorFlag
from pyggml.sched_assign import VIEW_OPS, Assignment
from pyggml.sched_split import Split
from pyggml.tensor import Tensor

SPLITS, NODES = 1, 2  # levels of detail


def _size(tensor: Tensor) -> str:
    n = tensor.nbytes
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"


class Dump:
    """Prints as ggml does, with the causes that its normal builds leave blank in the same width."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def _tensor(self, tensor: Tensor) -> str:
        """Name, size, backend and cause."""
        backend_id = self._assignment.ids.get(tensor)
        backend = "NULL" if backend_id is None else self._assignment.backends[backend_id].name
        cause = self._assignment.causes.get(tensor, "")
        return f"{tensor.name:>20.20} ({_size(tensor):>5.5}) [{backend:>5.5} {cause:>8.8}]"

    def _split(self, index: int, split: Split) -> str:
        backend = self._assignment.backends[split.backend_id].name
        inputs = "".join(f"[{t.name} ({_size(t):>5.5})] " for t in split.inputs)
        return (
            f"\n## SPLIT #{index}: {backend} # {len(split.inputs)} inputs"
            f"{': ' if inputs else ''}{inputs}\n"
        )

    def _node(self, index: int, node: Tensor, graph: Graph) -> str:
        computed = int(TensorFlag.COMPUTE in node.flags)
        sources = "".join(" " + self._tensor(src) for src in node.src if src is not None)
        return (
            f"node #{index:3d} ({node.op.name:>10.10}): {self._tensor(node)} "
            f"use={graph.use_counts[node]},c={computed}:{sources}\n"
        )

    def text(self, graph: Graph, splits: list[Split], level: int) -> str:
        """All splits of a graph."""
        parts: list[str] = []
        for i, split in enumerate(splits):
            parts.append(self._split(i, split))
            if level >= NODES:
                parts += [
                    self._node(j, graph.nodes[j], graph)
                    for j in range(split.start, split.stop)
                    if graph.nodes[j].op not in VIEW_OPS
                ]
        return "".join(parts)
