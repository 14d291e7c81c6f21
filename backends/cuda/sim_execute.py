"""Who computes for simulated cards: our CPU kernels on the simulated memory, or nobody.

The CPU's kernels add in one order, whatever the layout and the number of threads, so a graph gives
the same bits here as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pyggml.backend import buffer_of, is_noop
from pyggml.backends.cpu.device import CpuBackend
from pyggml.backends.cpu.lowering import find_lowering
from pyggml.backends.cuda.driver import DeviceError, Launch
from pyggml.cost import Rates, node_cost
from pyggml.graph import Graph
from pyggml.ops import TensorFlag
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from pyggml.backends.cuda.device import CudaDevice

_COMPUTE = int(TensorFlag.COMPUTE)


def work_of(graph: Graph) -> list[Tensor]:
    """The nodes that have something to do."""
    return [
        node
        for node in graph.nodes
        if int(node.flags) & _COMPUTE and not is_noop(node) and not node.is_empty
    ]


class SimExecutor:
    """Modelled launches; with an engine the last of them also computes what all should have."""

    def __init__(self, rates: Rates, engine: Callable[[], CpuBackend] | None) -> None:
        self.rates: Rates | None = rates
        self._engine = engine

    def supports(self, node: Tensor) -> bool:
        return self._engine is None or is_noop(node) or find_lowering(node) is not None

    def prepare(self, graph: Graph) -> None:
        if self._engine is not None:
            self._engine().prepare(graph)

    def launches(self, device: CudaDevice, graph: Graph) -> Sequence[Launch]:
        nodes = work_of(graph)
        _check_places(device, nodes)
        made = [Launch(f"{node.op_desc} {node.name}", node_cost(node)) for node in nodes]
        if made and self._engine is not None:
            engine = self._engine()
            # holds the plan, not the graph: plans are dropped with their graphs
            emulate = partial(engine.run, engine.plan(graph))
            made[-1] = Launch(made[-1].name, made[-1].cost, emulate)
        return made


def _check_places(device: CudaDevice, nodes: Sequence[Tensor]) -> None:
    """Raises DeviceError for what a kernel would fault on: here all addresses can be read."""
    mine = device.buffer_type()
    for node in nodes:
        for tensor in (node, *node.src):
            if tensor is None or tensor.is_empty:
                continue
            buffer = buffer_of(tensor)
            if buffer is not None and buffer.buft is not mine:
                raise DeviceError(
                    f"{device.name}: {node!r} uses {tensor!r}, which lies in {buffer.name}"
                )
