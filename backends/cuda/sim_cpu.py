"""The CPU beside simulated cards: the same kernels, and its share of the modelled time."""

from __future__ import annotations

import weakref
from functools import cached_property

from pyggml.backend import Backend, Buffer, BufferType, Device, Status
from pyggml.backends.cpu.buffers import RepackBufferType
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.library import KernelLibrary, usable_cores
from pyggml.backends.cpu.memory import ALIGNMENT, as_bytes
from pyggml.backends.cuda.buffers import CudaHostBufferType
from pyggml.backends.cuda.driver import Driver
from pyggml.backends.cuda.sim_clock import Clock
from pyggml.backends.cuda.sim_execute import work_of
from pyggml.backends.cuda.sim_memory import fake_address
from pyggml.cost import Rates, node_cost
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.threads import ThreadParams


class SimCpuDevice(CpuDevice):
    """The host, whose work takes virtual time; dry: nothing is allocated or computed.

    All its backends, and the simulated cards, compute with the threads of one engine, one after
    the other.
    """

    def __init__(
        self, library: KernelLibrary, clock: Clock, rates: Rates | None, *, dry: bool
    ) -> None:
        """`rates`: what it reaches; None: what is measured on this machine."""
        super().__init__(library)
        self.clock = clock
        self.dry = dry
        self._real = CpuDevice(library)
        self._given = rates
        self._measured: dict[ThreadParams, Rates] = {}
        if dry:
            self._plain = _DryHostBufferType(self)
            self._repack = _DryRepackBufferType(self)

    @cached_property
    def engine(self) -> CpuBackend:
        """What computes; made when it is known how memory nodes are used."""
        return CpuBackend(self)

    def init_backend(self) -> SimCpuBackend:  # type: ignore[override]  # it has such an engine
        return SimCpuBackend(self)

    def rates(self, threads: ThreadParams | None = None) -> Rates:
        if self._given is not None:
            return self._given
        threads = threads or ThreadParams(usable_cores())
        if threads not in self._measured:
            self._measured[threads] = self._real.rates(threads)
        return self._measured[threads]


class SimCpuBackend(Backend):
    """Computes at once, as the host does, and tells the clock how long that would have taken."""

    name = "CPU"

    def __init__(self, device: SimCpuDevice) -> None:
        self.device: SimCpuDevice = device
        self._shares: weakref.WeakKeyDictionary[Graph, _Share] = weakref.WeakKeyDictionary()

    def prepare(self, graph: Graph) -> None:
        if not self.device.dry:
            self.device.engine.prepare(graph)

    def set_n_threads(self, n: int) -> None:
        self.device.engine.set_n_threads(n)

    def set_threads(self, params: ThreadParams) -> None:
        self.device.engine.set_threads(params)

    def graph_compute(self, graph: Graph) -> Status:
        status = Status.SUCCESS
        if not self.device.dry:
            status = self.device.engine.graph_compute(graph)
        self._share(graph).spend(self.device.clock)
        return status

    def _share(self, graph: Graph) -> _Share:
        share = self._shares.get(graph)
        if share is None or share.uid != graph.uid or not graph.uid:
            share = _Share(graph, self.device.rates(self.device.engine.threads))
            self._shares[graph] = share
        return share

    def close(self) -> None:
        """End the threads; they start again if another backend needs them."""
        self.device.engine.close()
        self._shares.clear()


class _Share:
    """The modelled time of one graph."""

    def __init__(self, graph: Graph, rates: Rates) -> None:
        self.uid = graph.uid
        nodes = work_of(graph)
        costs = [node_cost(node) for node in nodes]
        self._nodes = [
            (f"{node.op_desc} {node.name}", rates.seconds(cost), cost.weight_bytes)
            for node, cost in zip(nodes, costs, strict=True)
        ]
        self._seconds = sum(seconds for _, seconds, _ in self._nodes)
        self._bytes = sum(nbytes for _, _, nbytes in self._nodes)

    def spend(self, clock: Clock) -> None:
        """Let the host compute."""
        if clock.trace is None:
            clock.compute("graph", self._seconds, self._bytes)
            return
        for name, seconds, nbytes in self._nodes:
            clock.compute(name, seconds, nbytes)


# ---------------------------------------------------------------- memory that is not there
class _DryBuffer(Buffer):
    """Addresses only; what is read is zero."""

    def __init__(self, buft: BufferType, base: int, size: int, owner: object = None) -> None:
        self.buft = buft
        self.base = base
        self.size = size
        self._owner = owner  # of the addresses

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        pass

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        as_bytes(out)[:] = 0

    def clear(self, value: int = 0) -> None:
        pass


class _DryHostBufferType(BufferType):
    """Host memory that takes none."""

    name = "CPU"
    alignment = ALIGNMENT
    is_host = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def alloc_buffer(self, size: int) -> Buffer:
        return _DryBuffer(self, fake_address(size), size)


class DryPinnedBufferType(_DryHostBufferType):
    """The same that copies reach without a detour."""

    name = CudaHostBufferType.name

    def __init__(self, device: Device, driver: Driver) -> None:
        super().__init__(device)
        self._driver = driver  # a dry one

    def alloc_buffer(self, size: int) -> Buffer:
        addresses = self._driver.pinned(size)
        return _DryBuffer(self, addresses.ctypes.data, size, addresses)


class _DryRepackBufferType(RepackBufferType):
    """The sizes of repacked weights without the weights."""

    def alloc_buffer(self, size: int) -> Buffer:
        return _DryBuffer(self, fake_address(size), size)
