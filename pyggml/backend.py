"""The contracts: registry, device, buffer type, buffer, backend (ggml-backend's five nouns).

What is not abstract is optional; its docstring names the default.
"""

from __future__ import annotations

import ctypes
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyggml.errors import OutOfMemory
from pyggml.graph import Graph
from pyggml.ops import Op
from pyggml.tensor import Tensor
from pyggml.threads import ThreadParams

if TYPE_CHECKING:
    from pyggml.cost import Rates

NO_LIMIT = 1 << 62
CompileProgress = Callable[[int, int, str], None]  # kernels done, kernels in all, the latest

# add_alloc_dep(tensor, until): keep the tensor's memory until the node `until` has run
AddAllocDep = Callable[[Tensor, Tensor], None]


class DeviceType(enum.IntEnum):
    """Kind of a device; the scheduler's last backend must be a CPU."""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


class Usage(enum.IntEnum):
    """What a buffer holds; WEIGHTS drives the scheduler's placement."""

    ANY = 0
    WEIGHTS = 1
    COMPUTE = 2


class Status(enum.IntEnum):
    """Result of running a graph."""

    ALLOC_FAILED = -2
    FAILED = -1
    SUCCESS = 0
    ABORTED = 1


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device can do beyond the required."""

    is_async: bool = False
    host_buffer: bool = False
    buffer_from_host_ptr: bool = False
    events: bool = False
    mmap_support: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device."""

    free: int
    total: int


class Registry(ABC):
    """All devices of one kind of backend."""

    name: str

    @abstractmethod
    def devices(self) -> Sequence[Device]: ...


class Device(ABC):
    """Something that holds buffers and runs graphs."""

    name: str
    description: str
    type: DeviceType
    caps: Caps = Caps()

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def init_backend(self) -> Backend: ...

    @abstractmethod
    def buffer_type(self) -> BufferType:
        """The default buffer type."""

    @abstractmethod
    def supports_op(self, node: Tensor) -> bool: ...

    @abstractmethod
    def supports_buft(self, buft: BufferType) -> bool: ...

    def host_buffer_type(self) -> BufferType | None:
        """Host memory that this device reads quickly (pinned); None: plain memory will do."""
        return None

    def extra_buffer_types(self) -> Sequence[BufferType]:
        """Further layouts for weights, best first (CPU_REPACK); none."""
        return ()

    def buffer_from_host_ptr(self, address: int, size: int, owner: object) -> Buffer | None:
        """Wrap host memory (a file mapping kept alive by `owner`); None: not possible."""
        return None

    def mapped_buffer_type(self) -> BufferType:
        """The type of buffers that wrap host memory, if there can be any; the default one."""
        return self.buffer_type()

    def offload_op(self, node: Tensor) -> bool:
        """Worth copying host weights here for this op; False."""
        return False

    def use_numa(self, mode: str) -> None:
        """How weights loaded and backends made from now on use memory nodes; has none."""

    def watch_compiling(self, progress: CompileProgress | None) -> None:
        """Tell `progress`, or nobody, while kernels are compiled; nothing is compiled."""

    def compile_kernels(self) -> None:
        """Compile all kernels ahead of their first use; there are none."""

    def rates(self) -> Rates | None:
        """What the device reaches, to model its time; None: unknown."""
        return None

    def new_event(self) -> Event | None:
        """None: the device has no events, callers synchronize instead."""
        return None


class BufferType(ABC):
    """A kind of memory of a device; compared by identity."""

    name: str
    device: Device
    alignment: int = 32
    max_size: int = NO_LIMIT
    is_host: bool = False

    @abstractmethod
    def alloc_buffer(self, size: int) -> Buffer:
        """At least one byte; raises OutOfMemory."""

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes a tensor takes here; its nbytes."""
        return tensor.nbytes

    def footprint(self, size: int) -> int:
        """What a buffer of so many bytes takes of the device's memory; no more than that."""
        return size

    def alloc_size_n(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that `alloc_buffer_n` would take, allocating nothing; those of the usual plan."""
        return sum(size for size, _ in _plan_buffers(tensors, self))

    def alloc_buffer_n(self, tensors: Sequence[Tensor]) -> Buffer | None:
        """Allocate and place the tensors without memory; the usual plan, one after the other.

        None if there is nothing to allocate. Raises OutOfMemory; then nothing stays allocated.
        """
        return alloc_planned(tensors, self, self.alloc_buffer)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


class Buffer(ABC):
    """A piece of memory. `base` is an address in the device's address space."""

    buft: BufferType
    base: int
    size: int
    usage: Usage = Usage.ANY

    @property
    def name(self) -> str:
        return self.buft.name

    @abstractmethod
    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Write bytes at an offset inside the tensor."""

    @abstractmethod
    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Read bytes from an offset inside the tensor."""

    @abstractmethod
    def clear(self, value: int = 0) -> None:
        """Set every byte."""

    def init_tensor(self, tensor: Tensor) -> None:
        """Called once for each tensor placed here; does nothing."""

    def prepare(self) -> None:
        """Compile what writing the tensors placed here needs; nothing to compile."""

    def copy(self, src: Tensor, dst: Tensor) -> bool:
        """Copy inside the device; False: go through host memory."""
        return False

    def reset(self) -> None:
        """Called before tensors are placed here anew; does nothing."""

    def free(self) -> None:
        """Give the memory back now; dropping the last reference does the same."""

    def set_usage(self, usage: Usage) -> None:
        self.usage = usage


class Event(ABC):
    """A point in a backend's stream of work."""

    @abstractmethod
    def synchronize(self) -> None: ...


class Backend(ABC):
    """A stream of work on a device."""

    name: str
    device: Device

    @abstractmethod
    def graph_compute(self, graph: Graph) -> Status:
        """Run the COMPUTE nodes in order; an async device may return before they are done."""

    def synchronize(self) -> None:
        """Wait for all work; nothing to wait for."""

    def set_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Write when earlier work is done; blocking."""
        tensor_set(tensor, data, offset)

    def get_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Read when earlier work is done; blocking."""
        tensor_get(tensor, out, offset)

    def copy_async(self, src_backend: Backend, src: Tensor, dst: Tensor) -> bool:
        """Copy from another backend's memory in stream order; False: synchronize and copy."""
        return False

    def event_record(self, event: Event) -> None:
        """Only called for events of this device."""
        raise NotImplementedError(f"{self.name} has no events")

    def event_wait(self, event: Event) -> None:
        """Let later work wait for an event; waits on the host."""
        event.synchronize()

    def prepare(self, graph: Graph) -> None:
        """Do what graphs like this need once, such as compiling kernels; nothing to do."""

    def set_n_threads(self, n: int) -> None:
        """How many threads the next graphs use; devices without threads ignore it."""

    def set_threads(self, params: ThreadParams) -> None:
        """How the threads of the next graphs run; devices without a choice see their number."""
        self.set_n_threads(params.n_threads)

    def graph_optimize(self, graph: Graph, add_alloc_dep: AddAllocDep) -> None:
        """Reorder a split's nodes and ask for memory to be kept longer; leaves everything."""

    def supports_op(self, node: Tensor) -> bool:
        return self.device.supports_op(node)

    def supports_buft(self, buft: BufferType) -> bool:
        return self.device.supports_buft(buft)

    def close(self) -> None:
        """Stop threads and give resources back; nothing to do."""


class EmptyBuffer(Buffer):
    """No memory: where tensors without elements lie."""

    def __init__(self, buft: BufferType) -> None:
        self.buft = buft
        self.base = 0
        self.size = 0

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        assert data.nbytes == 0

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        assert out.nbytes == 0

    def clear(self, value: int = 0) -> None:
        pass


class MultiBuffer(Buffer):
    """Several buffers of one type that belong together (a context above max_size)."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)
        self.buft = buffers[0].buft
        self.base = 0
        self.size = sum(b.size for b in buffers)

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        raise AssertionError("tensors belong to the parts of a multi-buffer")

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        raise AssertionError("tensors belong to the parts of a multi-buffer")

    def clear(self, value: int = 0) -> None:
        for b in self.buffers:
            b.clear(value)

    def free(self) -> None:
        for b in self.buffers:
            b.free()

    def set_usage(self, usage: Usage) -> None:
        self.usage = usage
        for b in self.buffers:
            b.set_usage(usage)


# ---------------------------------------------------------------- tensors in buffers
def buffer_of(tensor: Tensor) -> Buffer | None:
    """The buffer that holds a tensor's data, also for views."""
    return tensor.view_src.buffer if tensor.view_src is not None else tensor.buffer


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in a host buffer, for reading and writing in place."""
    buffer = buffer_of(tensor)
    assert buffer is not None and buffer.buft.is_host and tensor.data is not None
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data)).cast("B")


def _data_buffer(tensor: Tensor, nbytes: int, offset: int) -> Buffer:
    buffer = buffer_of(tensor)
    assert buffer is not None and tensor.data is not None, f"{tensor!r} is not allocated"
    assert offset >= 0 and offset + nbytes <= tensor.nbytes, f"{tensor!r}: out of range"
    return buffer


def tensor_set(tensor: Tensor, data: memoryview, offset: int = 0) -> None:
    """Write bytes into a tensor."""
    if data.nbytes:
        _data_buffer(tensor, data.nbytes, offset).set(tensor, data, offset)


def tensor_get(tensor: Tensor, out: memoryview, offset: int = 0) -> None:
    """Read bytes from a tensor."""
    if out.nbytes:
        _data_buffer(tensor, out.nbytes, offset).get(tensor, out, offset)


def copier(src: Tensor, dst: Tensor) -> Callable[[], None]:
    """What copies between two tensors of the same layout as often as they stay where they are."""
    assert src.same_layout(dst), f"{src!r} and {dst!r} differ in layout"
    if src is dst or src.nbytes == 0:
        return lambda: None
    source, target = _data_buffer(src, src.nbytes, 0), _data_buffer(dst, dst.nbytes, 0)
    if source.buft.is_host:
        return partial(target.set, dst, host_bytes(src))
    if target.buft.is_host:
        return partial(source.get, src, host_bytes(dst))
    return partial(_copy_through_host, source, src, target, dst)


def _copy_through_host(source: Buffer, src: Tensor, target: Buffer, dst: Tensor) -> None:
    if not target.copy(src, dst):
        bounce = memoryview(bytearray(src.nbytes))
        source.get(src, bounce)
        target.set(dst, bounce)


def tensor_copy(src: Tensor, dst: Tensor) -> None:
    """Copy between tensors of the same layout, wherever they lie."""
    copier(src, dst)()


def tensor_copy_async(src_backend: Backend, dst_backend: Backend, src: Tensor, dst: Tensor) -> None:
    """Copy in the order of both backends' work, blocking if they cannot do better."""
    assert src.same_layout(dst), f"{src!r} and {dst!r} differ in layout"
    if src is dst or dst_backend.copy_async(src_backend, src, dst):
        return
    src_backend.synchronize()
    dst_backend.synchronize()
    tensor_copy(src, dst)


def tensor_alloc(buffer: Buffer, tensor: Tensor, address: int) -> None:
    """Place a tensor at an address inside a buffer."""
    assert tensor.buffer is None and tensor.data is None and tensor.view_src is None
    size = buffer.buft.alloc_size(tensor)
    assert buffer.base <= address and address + size <= buffer.base + buffer.size
    tensor.buffer = buffer
    tensor.data = address
    buffer.init_tensor(tensor)


def view_init(tensor: Tensor) -> None:
    """Give a view the address of its allocated source."""
    root = tensor.view_src
    assert root is not None and root.buffer is not None and root.data is not None
    assert tensor.buffer is None
    tensor.buffer = root.buffer
    tensor.data = root.data + tensor.view_offs
    tensor.buffer.init_tensor(tensor)


def pad(n: int, alignment: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // alignment) * alignment


def _plan_buffers(tensors: Sequence[Tensor], buft: BufferType) -> list[tuple[int, list[Tensor]]]:
    """Group tensors into buffers of at most max_size bytes (one oversized tensor stays whole)."""
    groups: list[tuple[int, list[Tensor]]] = []
    size, members = 0, list[Tensor]()
    for t in tensors:
        is_new = t.data is None and t.view_src is None
        need = pad(buft.alloc_size(t), buft.alignment) if is_new else 0
        if size > 0 and size + need > buft.max_size:
            groups.append((size, members))
            size, members = 0, []
        size += need
        members.append(t)
    if size > 0:
        groups.append((size, members))
    return groups


def tensors_size(tensors: Sequence[Tensor], buft: BufferType) -> int:
    """Bytes that `alloc_tensors` would take; allocates nothing."""
    return buft.alloc_size_n(tensors)


def alloc_tensors(tensors: Sequence[Tensor], buft: BufferType) -> Buffer | None:
    """Allocate all tensors that have no memory yet; None if there is nothing to allocate.

    Raises OutOfMemory; then nothing stays allocated.
    """
    return buft.alloc_buffer_n(tensors)


def alloc_planned(
    tensors: Sequence[Tensor], buft: BufferType, new: Callable[[int], Buffer]
) -> Buffer | None:
    """The usual plan with buffers of `new`, which is given their size. Raises OutOfMemory."""
    buffers: list[Buffer] = []
    groups = _plan_buffers(tensors, buft)
    try:
        for size, _ in groups:
            buffers.append(new(size))
    except OutOfMemory:
        for b in buffers:
            b.free()
        raise
    for buffer, (_, members) in zip(buffers, groups, strict=True):
        _fill_buffer(buffer, members)
    if len(buffers) > 1:
        return MultiBuffer(buffers)
    return buffers[0] if buffers else None


def _fill_buffer(buffer: Buffer, tensors: Sequence[Tensor]) -> None:
    buft = buffer.buft
    address = pad(buffer.base, buft.alignment)
    for t in tensors:
        if t.view_src is not None:
            if t.buffer is None and t.view_src.buffer is not None:
                view_init(t)
        elif t.data is None:
            tensor_alloc(buffer, t, address)
            address += pad(buft.alloc_size(t), buft.alignment)


def is_weight(tensor: Tensor) -> bool:
    """Whether the tensor itself lies in a buffer of weights (a view's own field counts)."""
    return tensor.buffer is not None and tensor.buffer.usage == Usage.WEIGHTS


def is_noop(node: Tensor) -> bool:
    """Nodes that need no work."""
    return node.op == Op.NONE or node.is_view_op
