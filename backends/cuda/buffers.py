"""Memory of a card (CUDA0) and pinned host memory (CUDA_Host)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyggml import env
from pyggml.backend import Buffer, BufferType, Device, Usage, buffer_of
from pyggml.backends.cpu.buffers import HostBuffer
from pyggml.backends.cpu.memory import ALIGNMENT, as_bytes
from pyggml.backends.cuda.driver import DeviceError, Driver, DriverStream, footprint
from pyggml.backends.cuda.support_attention import attention_scratch
from pyggml.errors import OutOfMemory
from pyggml.ops import Op
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from pyggml.backends.cuda.device import CudaDevice

log = logging.getLogger("pyggml.cuda")

# kernels read rows of quantized weights in steps of this many values
ROW_PADDING = 512


def padding_bytes(tensor: Tensor) -> int:
    """Bytes behind a quantized tensor, so that its last row can be read in whole steps."""
    rest = tensor.ne[0] % ROW_PADDING
    if not tensor.type.is_quantized or not rest or tensor.is_empty:
        return 0
    return tensor.type.row_size(ROW_PADDING - rest)


class CudaBufferType(BufferType):
    """The memory of one device."""

    alignment = 128

    def __init__(self, device: CudaDevice) -> None:
        self.device: CudaDevice = device
        self.name = device.name
        self.max_size = device.props.max_buffer

    def alloc_buffer(self, size: int) -> Buffer:
        return CudaBuffer(self, size)

    def footprint(self, size: int) -> int:
        return footprint(size)

    def alloc_size(self, tensor: Tensor) -> int:
        if tensor.op == Op.FLASH_ATTN_EXT:
            capability = self.device.props.compute_capability
            return tensor.nbytes + attention_scratch(tensor, capability)
        return tensor.nbytes + padding_bytes(tensor)


class CudaBuffer(Buffer):
    """One allocation. Reading and writing here block; the backend's stream does not know of it."""

    buft: CudaBufferType

    def __init__(self, buft: CudaBufferType, size: int) -> None:
        self.buft = buft
        self.size = size
        self._device = buft.device
        label = f"a {buft.name} buffer"
        self.base = self.driver.alloc(self._device.index, size, label)
        self._is_freed = False

    @property
    def driver(self) -> Driver:
        return self._device.driver

    def init_tensor(self, tensor: Tensor) -> None:
        padding = padding_bytes(tensor)
        if padding and not tensor.is_view and self.usage != Usage.COMPUTE:
            assert tensor.data is not None
            self._fill(tensor.data + tensor.nbytes, 0, padding)

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        assert tensor.data is not None
        stream = self._device.copies
        self.driver.h2d(self._device.index, tensor.data + offset, as_bytes(data), stream)
        stream.synchronize()

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        assert tensor.data is not None
        stream = self._device.copies
        self.driver.d2h(self._device.index, as_bytes(out), tensor.data + offset, stream)
        stream.synchronize()

    def copy(self, src: Tensor, dst: Tensor) -> bool:
        source = buffer_of(src)
        if not isinstance(source, CudaBuffer) or source.driver is not self.driver:
            return False
        stream = source.buft.device.copies
        copy_on_devices(src, dst, stream)
        stream.synchronize()
        return True

    def clear(self, value: int = 0) -> None:
        self._fill(self.base, value, self.size)

    def free(self) -> None:
        if not self._is_freed:
            self._is_freed = True
            self.driver.free(self._device.index, self.base)

    def __del__(self) -> None:
        if hasattr(self, "_is_freed"):  # else it was never allocated
            self.free()

    def _fill(self, address: int, value: int, nbytes: int) -> None:
        stream = self._device.copies
        self.driver.memset(self._device.index, address, value, nbytes, stream)
        stream.synchronize()


def copy_on_devices(src: Tensor, dst: Tensor, stream: DriverStream) -> None:
    """Copy between tensors on devices of one driver, in the order of a stream of the source's."""
    source, target = buffer_of(src), buffer_of(dst)
    assert isinstance(source, CudaBuffer) and isinstance(target, CudaBuffer)
    assert src.data is not None and dst.data is not None
    driver, here, there = source.driver, source.buft.device.index, target.buft.device.index
    if here == there:
        driver.d2d(here, dst.data, src.data, src.nbytes, stream)
    else:
        driver.peer(there, dst.data, here, src.data, src.nbytes, stream)


class CudaHostBufferType(BufferType):
    """Pinned host memory: the copy engines read and write it directly, and so does the CPU.

    Where there is none (left) a plain buffer of the CPU takes its place.
    """

    name = "CUDA_Host"
    alignment = ALIGNMENT  # of the CPU's kernels, which read it too
    is_host = True

    def __init__(self, device: Device, driver: Driver, host: Device) -> None:
        self.device = device
        self._driver = driver
        self._host = host  # the CPU
        self._off = bool(env.integer("GGML_CUDA_NO_PINNED"))
        self._warned = False

    def alloc_buffer(self, size: int) -> Buffer:
        if not self._off:
            try:
                return HostBuffer(self, self._driver.pinned(size))
            except (DeviceError, OutOfMemory) as e:
                self._warn(e)
        return self._host.buffer_type().alloc_buffer(size)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning("no pinned memory (%s): plain memory is used, copies are slower", error)
            self._warned = True
