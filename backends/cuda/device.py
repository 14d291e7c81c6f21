"""A card as a device of pyggml, written once over a driver."""

from __future__ import annotations

from functools import cached_property

from pyggml import env
from pyggml.backend import (
    Backend,
    BufferType,
    Caps,
    Device,
    DeviceType,
    Event,
    Memory,
    buffer_of,
)
from pyggml.backends.cuda.backend import CudaBackend, CudaEvent, Executor
from pyggml.backends.cuda.buffers import CudaBufferType, CudaHostBufferType
from pyggml.backends.cuda.driver import Driver, DriverStream
from pyggml.backends.cuda.support import batch_of, supports
from pyggml.cost import Rates
from pyggml.tensor import Tensor


class CudaDevice(Device):
    """Number `index` of a driver's cards."""

    type = DeviceType.GPU
    caps = Caps(is_async=True, host_buffer=True, events=True)

    def __init__(self, driver: Driver, index: int, executor: Executor, host: Device) -> None:
        """`host`: the CPU, whose memory is used where there is no pinned memory."""
        self.driver = driver
        self.index = index
        self.executor = executor
        self.props = driver.props(index)
        self.name = f"CUDA{index}"
        self.description = self.props.name
        self.min_batch = env.integer("GGML_OP_OFFLOAD_MIN_BATCH")
        self._buft = CudaBufferType(self)
        self.host_buft: BufferType = CudaHostBufferType(self, driver, host)

    @cached_property
    def copies(self) -> DriverStream:
        """The stream of blocking copies."""
        return self.driver.stream(self.index)

    def memory(self) -> Memory:
        return self.driver.memory(self.index)

    def init_backend(self) -> Backend:
        return CudaBackend(self)

    def buffer_type(self) -> BufferType:
        return self._buft

    def host_buffer_type(self) -> BufferType | None:
        return self.host_buft

    def supports_buft(self, buft: BufferType) -> bool:
        return buft is self._buft

    def supports_op(self, node: Tensor) -> bool:
        return (
            supports(node)
            and not any(s is not None and self._is_on_other_card(s) for s in node.src)
            and self.executor.supports(node)
        )

    def _is_on_other_card(self, tensor: Tensor) -> bool:
        buffer = buffer_of(tensor)
        if buffer is None:
            return False
        buft = buffer.buft
        return isinstance(buft, CudaBufferType) and buft is not self._buft

    def offload_op(self, node: Tensor) -> bool:
        return batch_of(node) >= self.min_batch

    def new_event(self) -> Event | None:
        return CudaEvent(self.driver.event(self.index))

    def rates(self) -> Rates | None:
        return self.executor.rates
