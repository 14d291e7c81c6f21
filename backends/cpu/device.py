"""The host as a device: registry, memory, and the backend that runs graphs as compiled plans."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyggml import env
from pyggml.backend import (
    Backend,
    Buffer,
    BufferType,
    Caps,
    CompileProgress,
    Device,
    DeviceType,
    Memory,
    Registry,
    Status,
    is_noop,
)
from pyggml.backends.cpu.buffers import (
    HostBuffer,
    HostBufferType,
    RepackBufferType,
    is_repacked,
)
from pyggml.backends.cpu.library import KernelLibrary, no_progress, usable_cores
from pyggml.backends.cpu.lowering import find_lowering
from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cpu.numa import Numa, find_numa
from pyggml.backends.cpu.placement import Placement
from pyggml.backends.cpu.plan import Plan, kernel_names
from pyggml.backends.cpu.pool import ENTRY_POINTS, Pool
from pyggml.graph import Graph
from pyggml.tensor import Tensor
from pyggml.threads import ThreadParams

if TYPE_CHECKING:
    from pyggml.cost import Rates


class CpuDevice(Device):
    """The cores and the memory of this machine."""

    name = "CPU"
    type = DeviceType.CPU
    caps = Caps(buffer_from_host_ptr=True)

    def __init__(self, library: KernelLibrary | None = None) -> None:
        self.library = library or KernelLibrary()
        self._plain: BufferType = HostBufferType("CPU", self)
        self._mapped = HostBufferType("CPU_Mapped", self)
        self._repack: RepackBufferType = RepackBufferType(self)
        self.numa: Numa | None = None  # of what is loaded and made next
        self._numa_mode = ""

    @cached_property
    def description(self) -> str:  # type: ignore[override]  # read when first asked for
        return _cpu_name()

    def memory(self) -> Memory:
        return host_memory()

    def init_backend(self) -> CpuBackend:
        return CpuBackend(self)

    def buffer_type(self) -> BufferType:
        return self._plain

    def extra_buffer_types(self) -> Sequence[BufferType]:
        return (self._repack,)

    def buffer_from_host_ptr(self, address: int, size: int, owner: object) -> Buffer:
        return HostBuffer(self._mapped, at_address(address, size), owner)

    def mapped_buffer_type(self) -> BufferType:
        return self._mapped

    def supports_buft(self, buft: BufferType) -> bool:
        return buft.is_host or buft is self._repack

    def supports_op(self, node: Tensor) -> bool:
        if is_noop(node):
            return True
        for source in node.src:
            if source is not None and is_repacked(source):
                return self._repack.supports_op(node)
        return find_lowering(node) is not None

    def rates(self, threads: ThreadParams | None = None) -> Rates:
        """Measured with as many threads as there are cores, if no others are given."""
        from pyggml.backends.cpu.calibrate import cpu_rates

        return cpu_rates(self, threads or ThreadParams(usable_cores()))

    def use_numa(self, mode: str) -> None:
        if mode != self._numa_mode:
            self.numa, self._numa_mode = find_numa(mode), mode

    def watch_compiling(self, progress: CompileProgress | None) -> None:
        self.library.progress = progress or no_progress

    def compile_kernels(self) -> None:
        self.library.compile_all()


@dataclass(slots=True)
class _Plans:
    """The plans of one graph, by their number of threads; void when it gets another number."""

    uid: int
    by_threads: dict[int, Plan] = field(default_factory=dict)


class CpuBackend(Backend):
    """Runs graphs on a pool of threads; the plans of a graph are kept as long as the graph."""

    name = "CPU"

    def __init__(self, device: CpuDevice, n_threads: int | None = None) -> None:
        self.device: CpuDevice = device
        self.threads = ThreadParams(n_threads or usable_cores())
        self.fuse = not env.integer("GGML_CPU_DISABLE_FUSION")  # in plans made from now on
        self.abort: Callable[[], bool] = lambda: False  # asked before every graph
        self._placement = Placement(device.numa)
        self._pool: Pool | None = None
        self._plans: weakref.WeakKeyDictionary[Graph, _Plans] = weakref.WeakKeyDictionary()

    def set_n_threads(self, n: int) -> None:
        """Threads, the caller included, that the next graphs use."""
        self.threads = replace(self.threads, n_threads=max(1, n))

    def set_threads(self, params: ThreadParams) -> None:
        self.threads = params

    @property
    def n_threads(self) -> int:
        return self.threads.n_threads

    def prepare(self, graph: Graph) -> None:
        kernels = kernel_names(graph, self.n_threads, fuse=self.fuse)
        self.device.library.addresses({*ENTRY_POINTS, *kernels})

    def graph_compute(self, graph: Graph) -> Status:
        if self.abort():
            return Status.ABORTED
        self.run(self.plan(graph))
        return Status.SUCCESS

    def run(self, plan: Plan) -> None:
        """Compute a plan of this backend. Raises IdError."""
        plan.run(self._ready_pool(plan.n_threads), plan.n_threads)

    def plan(self, graph: Graph) -> Plan:
        """The plan of a graph, kept if the graph has a number."""
        kept = self._plans.get(graph) if graph.uid else None
        if kept is None or kept.uid != graph.uid:
            kept = _Plans(graph.uid)
            if graph.uid:
                self._plans[graph] = kept
        plan = kept.by_threads.get(self.n_threads)
        if plan is None:
            plan = Plan(graph, self.device.library, self.n_threads, fuse=self.fuse)
            kept.by_threads[self.n_threads] = plan
        return plan

    def profile(self, graph: Graph) -> str:
        """Run a graph step by step; a table of where the time went, longest first."""
        plan = self.plan(graph)
        total: dict[tuple[str, str], list[int]] = {}
        for t in plan.profile(self._ready_pool(self.n_threads), self.n_threads):
            total.setdefault((t.label.op, t.label.kernel), []).append(t.nanoseconds)
        rows = sorted(((sum(ns), len(ns), key) for key, ns in total.items()), reverse=True)
        width = max((16, *(len(op) for op, _ in total)))
        return "\n".join(
            f"{ns / 1e3:10.1f} us  {n:5} x  {op:{width}} {kernel}" for ns, n, (op, kernel) in rows
        )

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._plans.clear()

    def _ready_pool(self, n_threads: int) -> Pool:
        if self._pool is None or self._pool.n_threads < n_threads:
            if self._pool is not None:
                self._pool.close()
            self._pool = Pool(n_threads, self.device.library, placement=self._placement)
        self._pool.use(self.threads)
        return self._pool


class CpuRegistry(Registry):
    """One device: the host."""

    name = "CPU"

    def __init__(self) -> None:
        self._devices = (CpuDevice(),)

    def devices(self) -> Sequence[Device]:
        return self._devices


def registry() -> Registry:
    """What `pyggml.registry` asks every backend module for."""
    return CpuRegistry()


# ---------------------------------------------------------------- the host
def _cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def host_memory() -> Memory:
    """What is available without swapping, and what is built in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in map(_partition, lines)}
        return Memory(sizes["MemAvailable"], sizes["MemTotal"])
    except (OSError, KeyError, ValueError, IndexError):
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return Memory(pages * size, pages * size)


def _partition(line: str) -> tuple[str, str, str]:
    return line.partition(":")
