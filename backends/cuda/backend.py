"""A stream of work on a card: launches, copies in their order, events, captured graphs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pyggml import env
from pyggml.backend import Backend, Event, Status, buffer_of
from pyggml.backends.cpu.memory import as_bytes
from pyggml.backends.cuda.buffers import CudaBuffer, copy_on_devices
from pyggml.backends.cuda.driver import Capture, DriverEvent, DriverStream, Launch
from pyggml.cost import Rates
from pyggml.graph import Graph
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from pyggml.backends.cuda.device import CudaDevice

VOLTA = 70  # the first cards for which graphs are captured


class Executor(Protocol):
    """Turns the nodes of a graph into launches for one device."""

    @property
    def rates(self) -> Rates | None:
        """What the device reaches, if that is known."""

    def supports(self, node: Tensor) -> bool:
        """Whether it can compute a node that CUDA has a kernel for."""

    def prepare(self, graph: Graph) -> None:
        """Do what graphs like this need once."""

    def launches(self, device: CudaDevice, graph: Graph) -> Sequence[Launch]:
        """The work of an allocated graph, in order. Raises DeviceError."""


class CudaEvent(Event):
    """A point in the stream of a backend."""

    def __init__(self, event: DriverEvent) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()


@dataclass(slots=True)
class _Known:
    """What is kept of a graph that has a number."""

    uid: int
    launches: Sequence[Launch]
    capture: Capture | None = None


class CudaBackend(Backend):
    """One stream. A graph that comes again is captured and from then on takes one call."""

    def __init__(self, device: CudaDevice) -> None:
        self.device: CudaDevice = device
        self.name = device.name
        self.driver = device.driver
        self.stream: DriverStream = self.driver.stream(device.index)
        self._copied: DriverEvent = self.driver.event(device.index)
        capable = device.props.compute_capability >= VOLTA
        self.captures = capable and not env.integer("GGML_CUDA_DISABLE_GRAPHS")
        self._known: weakref.WeakKeyDictionary[Graph, _Known] = weakref.WeakKeyDictionary()

    def prepare(self, graph: Graph) -> None:
        self.device.executor.prepare(graph)

    # ------------------------------------------------------------ work
    def graph_compute(self, graph: Graph) -> Status:
        known = self._known.get(graph) if graph.uid else None
        if known is None or known.uid != graph.uid:
            known = _Known(graph.uid, self.device.executor.launches(self.device, graph))
            if graph.uid:
                self._known[graph] = known
            self._launch(known.launches)
            return Status.SUCCESS
        if not self.captures:
            self._launch(known.launches)
            return Status.SUCCESS
        if known.capture is None:
            self.stream.begin_capture()
            try:
                self._launch(known.launches)
            finally:
                capture = self.stream.end_capture()
            known.capture = capture
        known.capture.launch(self.stream)
        return Status.SUCCESS

    def _launch(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self.driver.launch(self.device.index, launch, self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    # ------------------------------------------------------------ copies
    def set_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        assert tensor.data is not None and self._owns(tensor)
        address = tensor.data + offset
        self.driver.h2d(self.device.index, address, as_bytes(data), self.stream)

    def get_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        assert tensor.data is not None and self._owns(tensor)
        address = tensor.data + offset
        self.driver.d2h(self.device.index, as_bytes(out), address, self.stream)

    def _owns(self, tensor: Tensor) -> bool:
        buffer = buffer_of(tensor)
        return isinstance(buffer, CudaBuffer) and buffer.buft.device is self.device

    def copy_async(self, src_backend: Backend, src: Tensor, dst: Tensor) -> bool:
        if not isinstance(src_backend, CudaBackend) or src_backend.driver is not self.driver:
            return False
        if not src_backend._owns(src) or not self._owns(dst):
            return False
        copy_on_devices(src, dst, src_backend.stream)
        if src_backend is not self:
            src_backend._copied.record(src_backend.stream)
            self.stream.wait(src_backend._copied)
        return True

    # ------------------------------------------------------------ events
    def event_record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)

    def event_wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait(event.event)

    def close(self) -> None:
        """Forget all graphs."""
        self._known.clear()
