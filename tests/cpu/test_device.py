"""The host as a device: names, memory and buffer types."""

import numpy as np
import pytest
from cpu_products import F32, random_weights

from pyggml import registry
from pyggml.backend import (
    DeviceType,
    Usage,
    alloc_tensors,
    tensor_copy,
    tensor_get,
    tensor_set,
    tensors_size,
)
from pyggml.backends.cpu.device import CpuDevice, CpuRegistry, host_memory
from pyggml.backends.cpu.memory import reserve
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.dtypes import GGMLType as T
from pyggml.errors import OutOfMemory
from pyggml.tensor import new_tensor


@pytest.fixture(scope="module")
def device():
    return CpuDevice()


def test_registry_ends_with_the_cpu() -> None:
    device = registry.devices()[-1]
    assert (device.name, device.type) == ("CPU", DeviceType.CPU)
    assert device is registry.cpu_device()
    assert device.description.strip()
    assert CpuRegistry().devices()[0] is not device


def test_memory() -> None:
    memory = host_memory()
    assert 0 < memory.free <= memory.total


def test_buffers_hold_bytes(device) -> None:
    a, b = new_tensor(F32, 5, 3), new_tensor(F32, 5, 3)
    buffer = alloc_tensors([a, b], device.buffer_type())
    assert buffer.name == "CPU" and buffer.buft.is_host and buffer.base % 64 == 0
    data = np.arange(15, dtype=np.float32)
    tensor_set(a, memoryview(data).cast("B"))
    tensor_copy(a, b)
    out = bytearray(8)
    tensor_get(b, memoryview(out), offset=8)
    assert np.frombuffer(out, np.float32).tolist() == [2, 3]
    buffer.clear(0)
    tensor_get(a, memoryview(out))
    assert not any(out)
    buffer.set_usage(Usage.WEIGHTS)
    assert buffer.usage == Usage.WEIGHTS
    buffer.free()


def test_mapped_memory(device) -> None:
    memory = reserve(256)
    buffer = device.buffer_from_host_ptr(memory.ctypes.data, 256, memory)
    assert buffer.name == "CPU_Mapped" and buffer.size == 256
    t = new_tensor(F32, 4)
    t.buffer, t.data = buffer, buffer.base + 64
    tensor_set(t, memoryview(np.ones(4, np.float32)).cast("B"))
    assert memory.view(np.float32)[16:20].tolist() == [1, 1, 1, 1]


def test_too_big_a_buffer_says_what_is_free(device) -> None:
    for buft in (device.buffer_type(), *device.extra_buffer_types()):
        with pytest.raises(OutOfMemory, match=rf"{buft.name} buffer of \d+.* are free"):
            buft.alloc_buffer(1 << 50)


def test_supported_buffer_types(device) -> None:
    (repack,) = device.extra_buffer_types()
    assert device.supports_buft(repack) and device.supports_buft(device.buffer_type())
    assert not device.supports_buft(CpuDevice().extra_buffer_types()[0])
    assert not repack.is_host and repack.name == "CPU_REPACK"


# Memory of panels in units of the rows': codes take more than places in a codebook or trits.
IN_CODES = dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS), 1.6)
IN_CODES |= {T.IQ3_S: 1.3, T.TQ1_0: 1.3}


@pytest.mark.parametrize("type", tuple(LAYOUTS), ids=lambda t: t.label)
def test_repacked_size(device, type) -> None:
    t = new_tensor(type, 512, 16)
    size = tensors_size([t], device.extra_buffer_types()[0])
    assert t.nbytes <= size <= IN_CODES.get(type, 1.2) * t.nbytes + 64


def test_repacked_weights_are_written_whole(device) -> None:
    t = new_tensor(T.Q4_0, 64, 8)
    buffer = alloc_tensors([t], device.extra_buffer_types()[0])
    raw = random_weights(T.Q4_0, 8, 64)
    with pytest.raises(AssertionError, match="as a whole"):
        tensor_set(t, memoryview(raw).cast("B")[:18])
    tensor_set(t, memoryview(raw.tobytes()))
    with pytest.raises(AssertionError, match="cannot be read back"):
        tensor_get(t, memoryview(bytearray(18)))
    assert not buffer.copy(t, t)
    buffer.clear(0)
    buffer.free()
