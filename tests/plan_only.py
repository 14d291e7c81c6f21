"""Memory that is only numbers: what the allocator's tests plan in."""

from pyggml.backend import (
    NO_LIMIT,
    Backend,
    Buffer,
    BufferType,
    Device,
    DeviceType,
    Memory,
    Status,
)
from pyggml.errors import OutOfMemory
from pyggml.graph import Graph
from pyggml.tensor import Tensor

BASE = 16  # every buffer starts here


class PlanBuffer(Buffer):
    """A size; nothing can be read or written."""

    def __init__(self, buft: "PlanBufferType", size: int) -> None:
        self.buft = buft
        self.base = BASE
        self.size = size
        self.freed = False
        self.resets = 0

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        raise NotImplementedError

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        raise NotImplementedError

    def clear(self, value: int = 0) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        self.resets += 1

    def free(self) -> None:
        self.freed = True


class PlanBufferType(BufferType):
    """Hands out sizes up to `room` bytes in all."""

    def __init__(
        self,
        max_size: int = NO_LIMIT,
        alignment: int = 8,
        *,
        name: str = "plan",
        room: int = NO_LIMIT,
        device: Device | None = None,
    ) -> None:
        self.name = name
        self.device = device or PlanDevice(self)
        self.max_size = max_size
        self.alignment = alignment
        self.is_host = True
        self.room = room
        self.buffers: list[PlanBuffer] = []

    def alloc_buffer(self, size: int) -> PlanBuffer:
        assert size > 0
        if size > self.room - self.total:
            raise OutOfMemory(f"{self.name}: {size} bytes wanted, {self.room - self.total} free")
        self.buffers.append(PlanBuffer(self, size))
        return self.buffers[-1]

    @property
    def total(self) -> int:
        """Bytes in buffers that are not freed."""
        return sum(b.size for b in self.buffers if not b.freed)


class PlanDevice(Device):
    """Accepts everything, computes nothing."""

    name = "plan"
    description = "numbers only"
    type = DeviceType.CPU

    def __init__(self, buft: PlanBufferType | None = None) -> None:
        self._buft = buft or PlanBufferType(device=self)

    def memory(self) -> Memory:
        return Memory(self._buft.room - self._buft.total, self._buft.room)

    def init_backend(self) -> "PlanBackend":
        return PlanBackend(self)

    def buffer_type(self) -> PlanBufferType:
        return self._buft

    def supports_op(self, node: Tensor) -> bool:
        return True

    def supports_buft(self, buft: BufferType) -> bool:
        return buft.is_host


class PlanBackend(Backend):
    """Runs nothing."""

    name = "plan"

    def __init__(self, device: PlanDevice) -> None:
        self.device = device

    def graph_compute(self, graph: Graph) -> Status:
        return Status.SUCCESS
