"""The CPU backend for tests of operations: the kernels of all cases are compiled at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cases import CASES
from op_case import F32, Array, Case, Leafs, Placed, place

from pyggml.backend import is_noop
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.lowering import PlanContext, Step, find_lowering
from pyggml.dtypes import GGMLType
from pyggml.graph import build_graph
from pyggml.tensor import Tensor, new_tensor

DEVICE = CpuDevice()


def placed(case: Case) -> Placed:
    """The case in the backend's memory."""
    return place(case, DEVICE.buffer_type())


class Shapes(Leafs):
    """Makes leafs without values, which take long to quantize."""

    def given(self, values: Array, type: GGMLType = F32) -> Tensor:
        return new_tensor(type, *values.shape[::-1])


def supports(case: Case) -> bool:
    """Whether the backend has every operation of a case."""
    return all(DEVICE.supports_op(t) for t in build_graph([case.build(Shapes(0))]).nodes)


ON_CPU = [case for case in CASES if supports(case)]


def steps(found: Placed) -> Iterator[Step]:
    """What the backend runs."""
    for t in found.graph.nodes:
        lower = None if is_noop(t) or t.is_empty else find_lowering(t)
        if lower is not None:
            yield from lower(t, PlanContext(n_threads=2))


def ready_backend(device: CpuDevice = DEVICE, cases: Sequence[Case] = tuple(ON_CPU)) -> CpuBackend:
    """A backend that compiles nothing any more while the cases run; to be closed."""
    device.library.addresses({s.kernel for case in cases for s in steps(placed(case))})
    return CpuBackend(device, n_threads=2)
