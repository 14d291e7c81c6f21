"""Tensors in buffers: bounds, copies between kinds of memory, views, defaults of the contracts."""

import numpy as np
import pytest
from fakes import FakeBackend, FakeBuffer, FakeDevice, FakeEvent, cpu, read, write

from pyggml import build
from pyggml.backend import (
    Backend,
    Buffer,
    BufferType,
    Device,
    EmptyBuffer,
    alloc_tensors,
    host_bytes,
    is_noop,
    is_weight,
    tensor_alloc,
    tensor_copy,
    tensor_copy_async,
    tensor_get,
    tensor_set,
    view_init,
)
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32


def on(device: FakeDevice, *ne: int, values: object = None) -> Tensor:
    """A tensor in a device's memory."""
    tensor = new_tensor(F32, *ne)
    alloc_tensors([tensor], device.buffer_type())
    if values is not None:
        write(tensor, values)
    return tensor


def test_set_and_get_inside_a_tensor() -> None:
    gpu = FakeDevice("CUDA0")
    x = on(gpu, 4, values=[1, 2, 3, 4])
    tensor_set(x, memoryview(np.float32([9]).tobytes()), 8)
    out = bytearray(8)
    tensor_get(x, memoryview(out), 4)
    np.testing.assert_array_equal(np.frombuffer(out, np.float32), [2, 9])


def test_views_write_into_their_source() -> None:
    x = on(cpu(), 4, values=[1, 2, 3, 4])
    view = build.view(x, (2,), offset=4)
    assert view.buffer is None
    tensor_set(view, memoryview(np.float32([7, 8]).tobytes()))
    np.testing.assert_array_equal(read(x).ravel(), [1, 7, 8, 4])


@pytest.mark.parametrize(("size", "offset"), [(20, 0), (4, 16), (4, -4)])
def test_out_of_range(size: int, offset: int) -> None:
    x = on(cpu(), 4)
    with pytest.raises(AssertionError, match="out of range"):
        tensor_set(x, memoryview(bytearray(size)), offset)


def test_nothing_is_always_possible() -> None:
    tensor_set(new_tensor(F32, 4), memoryview(b""))
    tensor_get(new_tensor(F32, 4), memoryview(bytearray()))
    with pytest.raises(AssertionError, match="not allocated"):
        tensor_get(new_tensor(F32, 4), memoryview(bytearray(4)))


@pytest.mark.parametrize("source", ["CPU", "CUDA0"])
@pytest.mark.parametrize("target", ["CPU", "CUDA0", "CUDA1"])
def test_copies_between_all_kinds_of_memory(source: str, target: str) -> None:
    devices = {"CPU": cpu(), "CUDA0": FakeDevice("CUDA0"), "CUDA1": FakeDevice("CUDA1")}
    src, dst = on(devices[source], 4, values=[1, 2, 3, 4]), on(devices[target], 4)
    tensor_copy(src, dst)
    np.testing.assert_array_equal(read(dst), read(src))
    tensor_copy(src, src)


def test_device_copies_are_asked_for_only_between_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def copy(self: Buffer, src: Tensor, dst: Tensor) -> bool:
        asked.append(f"{self.name} {src.name}")
        return True

    monkeypatch.setattr(FakeBuffer, "copy", copy)
    host, gpu = cpu(), FakeDevice("CUDA0")
    x, y = on(host, 4, values=np.ones(4)), on(gpu, 4, values=np.zeros(4))
    tensor_copy(x, y)
    tensor_copy(y, x)
    assert asked == []
    tensor_copy(y.named("y"), on(gpu, 4))
    assert asked == ["CUDA0 y"]


def test_copies_need_the_same_layout_and_memory() -> None:
    x = on(cpu(), 4, 4)
    with pytest.raises(AssertionError, match="differ in layout"):
        tensor_copy(x, build.transpose(x))
    with pytest.raises(AssertionError, match="not allocated"):
        tensor_copy(x, new_tensor(F32, 4, 4))
    tensor_copy(new_tensor(F32, 0), new_tensor(F32, 0))


def test_async_copy_without_help_waits_for_both() -> None:
    first, second = (FakeDevice(f"CUDA{i}", is_late=True) for i in range(2))
    a, b = first.init_backend(), second.init_backend()
    src, dst = on(first, 4, values=np.ones(4)), on(second, 4, values=np.zeros(4))
    for backend in (a, b):
        backend.submit(lambda: None)
    tensor_copy_async(a, b, src, dst)
    assert (first.trace, second.trace) == (["CUDA0 wait"], ["CUDA1 wait"])
    np.testing.assert_array_equal(read(dst), read(src))


def test_async_copy_with_help_waits_for_nobody() -> None:
    first, second = (FakeDevice(f"CUDA{i}", is_late=True, peer_copies=True) for i in range(2))
    a, b = first.init_backend(), second.init_backend()
    src, dst = on(first, 4, values=np.ones(4)), on(second, 4, values=np.zeros(4))
    tensor_copy_async(a, b, src, dst)
    assert not np.array_equal(read(dst), read(src))
    b.synchronize()
    np.testing.assert_array_equal(read(dst), read(src))
    tensor_copy_async(a, a, src, src)


def test_host_bytes_are_the_tensors_memory() -> None:
    x = on(cpu(), 4, values=[1, 2, 3, 4])
    view = host_bytes(build.view(x, (2,), offset=8))
    np.testing.assert_array_equal(np.frombuffer(view, np.float32), [3, 4])
    view[:4] = np.float32(5).tobytes()
    np.testing.assert_array_equal(read(x).ravel(), [1, 2, 5, 4])
    with pytest.raises(AssertionError):
        host_bytes(on(FakeDevice("CUDA0"), 4))


def test_tensors_are_placed_once_and_inside() -> None:
    buft = cpu().buffer_type()
    buffer = buft.alloc_buffer(64)
    x = new_tensor(F32, 16)
    with pytest.raises(AssertionError):
        tensor_alloc(buffer, x, buffer.base + 4)
    tensor_alloc(buffer, x, buffer.base)
    with pytest.raises(AssertionError):
        tensor_alloc(buffer, x, buffer.base)
    view = build.view(x, (4,), offset=16)
    view_init(view)
    assert (view.buffer, view.data) == (buffer, buffer.base + 16)
    with pytest.raises(AssertionError):
        view_init(view)


def test_hook_sees_every_placed_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(FakeBuffer, "init_tensor", lambda self, tensor: seen.append(tensor))
    x = new_tensor(F32, 4)
    view = build.view(x, (2,))
    alloc_tensors([x, view], cpu().buffer_type())
    assert seen == [x, view]


def test_empty_buffer() -> None:
    buffer = EmptyBuffer(cpu().buffer_type())
    nothing = new_tensor(F32, 0)
    buffer.set(nothing, memoryview(b""))
    buffer.get(nothing, memoryview(b""))
    buffer.clear()
    assert (buffer.size, buffer.name) == (0, "CPU")
    with pytest.raises(AssertionError):
        buffer.set(nothing, memoryview(b"x"))


def test_work_and_weights() -> None:
    x = new_tensor(F32, 4)
    assert is_noop(x) and is_noop(build.reshape(x, 2, 2)) and not is_noop(build.sqr(x))
    assert not is_weight(x)


class Plain(FakeBackend):
    """A backend with the contract's defaults."""

    set_async = Backend.set_async
    get_async = Backend.get_async
    copy_async = Backend.copy_async
    event_record = Backend.event_record
    event_wait = Backend.event_wait


def test_defaults_of_a_backend() -> None:
    device = cpu()
    backend = Plain(device)
    x = on(device, 2)
    backend.set_async(x, memoryview(np.float32([1, 2]).tobytes()))
    out = bytearray(4)
    backend.get_async(x, memoryview(out), 4)
    assert np.frombuffer(out, np.float32) == 2
    assert backend.copy_async(backend, x, x) is False
    backend.event_wait(FakeEvent())
    with pytest.raises(NotImplementedError, match="CPU has no events"):
        backend.event_record(FakeEvent())


def test_defaults_of_a_device() -> None:
    device = cpu()
    assert Device.offload_op(device, new_tensor(F32, 1)) is False
    assert Device.new_event(device) is None
    assert Device.host_buffer_type(device) is None
    assert list(Device.extra_buffer_types(device)) == []
    assert Device.buffer_from_host_ptr(device, 0, 0, None) is None
    assert BufferType.alloc_size(device.buffer_type(), new_tensor(F32, 3)) == 12
