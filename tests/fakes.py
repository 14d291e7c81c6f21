"""Devices made of NumPy arrays, with memory of their own and streams that can be late.

A fake device computes with the reference's functions in its own buffers and refuses what it does
not support. A late stream runs nothing before somebody waits for it: forgotten waits give wrong
results.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from pyggml.backend import (
    Backend,
    Buffer,
    BufferType,
    Caps,
    Device,
    DeviceType,
    Event,
    Memory,
    Status,
    buffer_of,
    is_noop,
    pad,
)
from pyggml.backends.reference.memory import write as write_values
from pyggml.backends.reference.table import REFERENCE
from pyggml.errors import OutOfMemory
from pyggml.graph import Graph
from pyggml.ops import Op, TensorFlag
from pyggml.tensor import Tensor

POISON = 0xFF  # fresh memory: NaN as F32
DEVICE_SPACE = 1 << 50  # addresses of device memory: nothing of the host is there


class FakeBuffer(Buffer):
    """An array; `base` is its true address in host memory and a made-up one elsewhere."""

    def __init__(self, buft: "FakeBufferType", size: int) -> None:
        self.buft = buft
        self.size = size
        owner = np.full(size + buft.alignment, POISON, np.uint8)
        shift = -owner.ctypes.data % buft.alignment
        self.bytes = owner[shift : shift + size]
        device = buft.device
        self.base = self.bytes.ctypes.data if buft.is_host else device.take_addresses(size)
        self.freed = False

    def window(self, tensor: Tensor, offset: int, size: int) -> np.ndarray:
        """The bytes of a tensor."""
        assert not self.freed, f"{tensor!r} lies in a freed buffer"
        assert tensor.data is not None
        start = tensor.data - self.base + offset
        assert start >= 0 and start + size <= self.size, f"{tensor!r} is outside its buffer"
        return self.bytes[start : start + size]

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self.window(tensor, offset, data.nbytes)[:] = np.frombuffer(data, np.uint8)

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        np.frombuffer(out, np.uint8)[:] = self.window(tensor, offset, out.nbytes)

    def clear(self, value: int = 0) -> None:
        self.bytes[:] = value

    def free(self) -> None:
        self.freed = True
        self.buft.device.used -= self.size


class FakeBufferType(BufferType):
    """The memory of one fake device."""

    device: "FakeDevice"

    def __init__(self, device: "FakeDevice", *, is_host: bool) -> None:
        self.name = device.name
        self.device = device
        self.is_host = is_host

    def alloc_buffer(self, size: int) -> FakeBuffer:
        if self.device.used + size > self.device.total:
            raise OutOfMemory(f"{self.name}: {size} bytes wanted")
        self.device.used += size
        return FakeBuffer(self, size)


@dataclass(eq=False)
class FakeDevice(Device):
    """Supports every operation but the `refused`; reads its own memory and that of `also_reads`."""

    name: str
    type: DeviceType = DeviceType.GPU
    refused: Collection[Op] = ()
    also_reads: list[BufferType] = field(default_factory=list)
    offloads: Callable[[Tensor], bool] = lambda node: False
    is_late: bool = False
    has_events: bool = False
    peer_copies: bool = False  # copies from another device in stream order
    total: int = 1 << 40
    description: str = "fake"
    used: int = 0
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.caps = Caps(is_async=self.is_late, events=self.has_events)
        self._buft = FakeBufferType(self, is_host=self.type == DeviceType.CPU)
        self._next_address = DEVICE_SPACE

    def take_addresses(self, size: int) -> int:
        """The start of a range that this device never uses again."""
        start = self._next_address
        self._next_address = pad(start + size + 1, 4096)
        return start

    def memory(self) -> Memory:
        return Memory(self.total - self.used, self.total)

    def init_backend(self) -> "FakeBackend":
        return FakeBackend(self)

    def buffer_type(self) -> FakeBufferType:
        return self._buft

    def supports_op(self, node: Tensor) -> bool:
        return is_noop(node) or node.op not in self.refused

    def supports_buft(self, buft: BufferType) -> bool:
        return buft is self._buft or buft in self.also_reads

    def offload_op(self, node: Tensor) -> bool:
        return self.offloads(node)

    def new_event(self) -> "FakeEvent | None":
        return FakeEvent() if self.has_events else None


class FakeEvent(Event):
    """A number of works of a stream."""

    def __init__(self) -> None:
        self.stream: FakeBackend | None = None
        self.position = 0

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.position)


class FakeBackend(Backend):
    """A queue of works; a late one waits to be waited for."""

    device: FakeDevice

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.name = device.name
        self.queue: deque[Callable[[], None]] = deque()
        self.submitted = self.done = 0
        self.graphs: list[Graph] = []
        self.status = Status.SUCCESS

    def _note(self, what: str) -> None:
        self.device.trace.append(f"{self.name} {what}")

    def submit(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.submitted += 1
        if not self.device.is_late:
            self.run_until(self.submitted)

    def run_until(self, position: int) -> None:
        while self.done < position and self.queue:
            self.queue.popleft()()
            self.done += 1

    def synchronize(self) -> None:
        if self.done < self.submitted:
            self._note("wait")
        self.run_until(self.submitted)

    def graph_compute(self, graph: Graph) -> Status:
        self.graphs.append(graph)
        self._note("run " + " ".join(n.name for n in graph.nodes if not is_noop(n)))
        nodes = [n for n in graph.nodes if TensorFlag.COMPUTE in n.flags and not is_noop(n)]
        self.submit(lambda: [self._run(node) for node in nodes] and None)
        return self.status

    def _run(self, node: Tensor) -> None:
        assert self.supports_op(node), f"{self.name} cannot run {node!r}"
        if node.is_empty:
            return
        shadow = self._on_host(node)
        shadow.src = [src and self._on_host(src) for src in node.src]
        with np.errstate(all="ignore"):
            values = REFERENCE[node.op](shadow)
            if values is not None:
                write_values(shadow, values)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """The tensor at the true address of its bytes; only of memory that this device reads."""
        buffer = buffer_of(tensor)
        assert buffer is not None, f"{tensor!r} has no memory"
        assert self.supports_buft(buffer.buft), f"{self.name} cannot read {tensor!r}"
        shadow = Tensor(
            tensor.type, tensor.ne, tensor.nb, op=tensor.op, params=tensor.params, name=tensor.name
        )
        shadow.data = 0
        if not tensor.is_empty:
            assert isinstance(buffer, FakeBuffer)
            shadow.data = buffer.window(tensor, 0, tensor.nbytes).ctypes.data
        return shadow

    def set_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self._note(f"set {tensor.name} {offset}+{data.nbytes}")
        buffer = buffer_of(tensor)
        assert isinstance(buffer, FakeBuffer) and buffer.buft.device is self.device
        self.submit(lambda: buffer.set(tensor, data, offset))

    def get_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        self._note(f"get {tensor.name}")
        buffer = buffer_of(tensor)
        assert isinstance(buffer, FakeBuffer) and self.supports_buft(buffer.buft)
        self.submit(lambda: buffer.get(tensor, out, offset))

    def copy_async(self, src_backend: Backend, src: Tensor, dst: Tensor) -> bool:
        if not (self.device.peer_copies and isinstance(src_backend, FakeBackend)):
            return False
        if not src_backend.device.peer_copies:
            return False
        self._note(f"copy {src.name}")
        bounce = bytearray(src.nbytes)
        source, target = buffer_of(src), buffer_of(dst)
        assert source is not None and target is not None

        def copy() -> None:
            source.get(src, memoryview(bounce))
            target.set(dst, memoryview(bounce))

        # as on CUDA in the source's stream: it does not wait for what else the target has to do
        src_backend.submit(copy)
        after = src_backend.submitted
        self.submit(lambda: src_backend.run_until(after))
        return True

    def event_record(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        event.stream, event.position = self, self.submitted
        self._note("record")

    def event_wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        stream, position = event.stream, event.position
        if stream is not None and stream is not self:
            self.submit(lambda: stream.run_until(position))


# ---------------------------------------------------------------- operations
def cpu(**kwargs: object) -> FakeDevice:
    """The host."""
    return FakeDevice("CPU", DeviceType.CPU, **kwargs)  # type: ignore[arg-type]  # passed on


def write(tensor: Tensor, values: object) -> None:
    """Set a tensor's elements."""
    data = np.ascontiguousarray(values, tensor.type.info.numpy)
    assert data.nbytes == tensor.nbytes
    buffer = buffer_of(tensor)
    assert buffer is not None
    buffer.set(tensor, memoryview(data.reshape(-1)).cast("B"))


def read(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's elements in NumPy's order."""
    out = np.empty(tensor.ne[::-1], tensor.type.info.numpy)
    buffer = buffer_of(tensor)
    assert buffer is not None and out.nbytes == tensor.nbytes
    buffer.get(tensor, memoryview(out.reshape(-1)).cast("B"))
    return out
