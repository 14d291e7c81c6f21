"""Buffers of cards and pinned host memory: padding, limits, copies, falling back."""

import gc
import logging

import numpy as np
import pytest
from simulated import as_bytes, read, simulation, weight, write

from pyggml.backend import (
    MultiBuffer,
    Usage,
    alloc_tensors,
    tensor_alloc,
    tensor_copy,
    tensors_size,
    view_init,
)
from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cuda.driver import DeviceError
from pyggml.build import view
from pyggml.dtypes import GGMLType
from pyggml.errors import OutOfMemory
from pyggml.tensor import new_tensor

T = GGMLType
MIB = 1 << 20
SPEC = "rtx3060:64MiB"


@pytest.mark.parametrize(
    ("type", "ne0", "padding"),
    [
        (T.F32, 100, 0),
        (T.F16, 100, 0),
        (T.Q8_0, 512, 0),
        (T.Q8_0, 1024, 0),
        (T.Q8_0, 32, 480 // 32 * 34),
        (T.Q4_0, 576, 448 // 32 * 18),
        (T.Q4_K, 256, 144),
        (T.Q4_K, 768, 144),
        (T.MXFP4, 2880, 192 // 32 * 17),
    ],
)
def test_quantized_rows_are_padded(type: GGMLType, ne0: int, padding: int) -> None:
    buft = simulation(SPEC).devices[0].buffer_type()
    for rows in (1, 3):
        tensor = new_tensor(type, ne0, rows)
        assert buft.alloc_size(tensor) == tensor.nbytes + padding
    assert buft.alloc_size(new_tensor(type, ne0, 0)) == 0
    assert buft.alignment == 128 and buft.name == "CUDA0" and not buft.is_host


def padding_after(usage: Usage) -> np.ndarray:
    device = simulation(SPEC).devices[0]
    tensor = new_tensor(T.Q8_0, 96, 3)
    buft = device.buffer_type()
    buffer = buft.alloc_buffer(buft.alloc_size(tensor))
    buffer.set_usage(usage)
    tensor_alloc(buffer, tensor, buffer.base)
    part = view(tensor, (96, 2))
    view_init(part)
    assert part.data is not None
    return at_address(buffer.base, buffer.size).copy()[tensor.nbytes :]


def test_padding_is_zero_where_rows_stay() -> None:
    for usage in (Usage.ANY, Usage.WEIGHTS):
        assert not padding_after(usage).any()
    assert (padding_after(Usage.COMPUTE) == 0xFF).all()  # written anew by every graph


def test_tensors_above_the_largest_buffer_get_several() -> None:
    sim = simulation(f"{SPEC},buffer=4MiB")
    device = sim.devices[0]
    buft = device.buffer_type()
    assert buft.max_size == 4 * MIB
    tensors = [new_tensor(T.F32, 1 << 18, 3) for _ in range(3)]  # 3 MiB each
    tensors.append(new_tensor(T.F32, 1 << 18, 5))  # alone too large: stays whole
    before, size = device.memory().free, tensors_size(tensors, buft)
    buffer = alloc_tensors(tensors, buft)
    assert isinstance(buffer, MultiBuffer) and len(buffer.buffers) == 4
    assert buffer.size == size == 14 * MIB
    assert before - device.memory().free == 3 * 4 * MIB + 6 * MIB
    buffer.set_usage(Usage.WEIGHTS)
    assert {t.buffer.usage for t in tensors if t.buffer} == {Usage.WEIGHTS}
    buffer.free()
    assert device.memory().free == before


def test_what_does_not_fit_leaves_nothing_behind() -> None:
    device = simulation(f"{SPEC},buffer=16MiB").devices[0]
    before = device.memory().free
    tensors = [new_tensor(T.F32, 15 << 18) for _ in range(5)]
    with pytest.raises(OutOfMemory, match=r"CUDA0: a CUDA0 buffer of 15.0 MiB does not fit: 8"):
        alloc_tensors(tensors, device.buffer_type())
    assert device.memory().free == before


def test_memory_is_given_back_with_the_last_reference() -> None:
    device = simulation(SPEC).devices[0]
    before = device.memory().free
    tensor = weight(device, 64, 64, seed=0)
    assert device.memory().free < before
    del tensor
    gc.collect()
    assert device.memory().free == before


def test_data_goes_in_and_out_at_offsets() -> None:
    device = simulation(SPEC).devices[0]
    tensor = new_tensor(T.F32, 16, 4)
    buffer = alloc_tensors([tensor], device.buffer_type())
    assert buffer is not None
    assert np.isnan(read(tensor)).all()
    values = np.arange(64, dtype=np.float32).reshape(1, 1, 4, 16)
    write(tensor, values)
    assert (read(tensor) == values).all()
    part = np.empty(3, np.float32)
    buffer.get(tensor, as_bytes(part), 40)
    assert part.tolist() == [10, 11, 12]
    buffer.set(tensor, as_bytes(-part), 40)
    assert read(tensor).ravel()[9:14].tolist() == [9, -10, -11, -12, 13]
    buffer.clear(0)
    assert not read(tensor).any()
    with pytest.raises(DeviceError):
        buffer.set(tensor, as_bytes(values), 4)


@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_tensors_are_copied_between_all_devices(source: int, target: int) -> None:
    sim = simulation(SPEC, SPEC)
    src = weight(sim.devices[source], 64, 8, seed=1)
    dst = weight(sim.devices[target], 64, 8, seed=2)
    want = read(src)
    tensor_copy(src, dst)
    assert (read(dst) == want).all()
    peer = sim.driver.cards[source].counters.peer_bytes if source < 2 else 0
    assert peer == (src.nbytes if {source, target} == {0, 1} else 0)


def test_machines_do_not_share_memory() -> None:
    """Two simulations have two drivers: what goes from one to the other goes through the host."""
    src = weight(simulation(SPEC).devices[0], 64, seed=1)
    other = simulation(SPEC)
    dst = weight(other.devices[0], 64, seed=2)
    tensor_copy(src, dst)
    assert (read(dst) == read(src)).all()
    assert other.driver.cards[0].counters.d2d_bytes == 0


# ---------------------------------------------------------------- pinned memory
def test_pinned_memory_is_host_memory() -> None:
    sim = simulation(SPEC)
    card, cpu = sim.devices
    buft = card.host_buffer_type()
    assert buft is not None and buft.is_host and buft.name == "CUDA_Host"
    tensor = new_tensor(T.F32, 64)
    buffer = alloc_tensors([tensor], buft)
    assert buffer is not None and buffer.name == "CUDA_Host" and cpu.supports_buft(buft)
    write(tensor, np.ones((1, 1, 1, 64), np.float32))
    assert (read(tensor) == 1).all()
    assert sim.driver.is_pinned(at_address(buffer.base, buffer.size))
    buffer.free()
    assert not sim.driver._pinned


def test_without_pinned_memory_plain_memory_is_used(caplog: pytest.LogCaptureFixture) -> None:
    sim = simulation(SPEC, pinned_limit=4096)
    buft = sim.devices[0].host_buffer_type()
    assert buft is not None
    caplog.set_level(logging.WARNING)
    names = [buft.alloc_buffer(size).name for size in (4096, 8192, 1 << 20)]
    assert names == ["CUDA_Host", "CPU", "CPU"]
    (record,) = caplog.records
    assert "plain memory is used" in record.message


def test_pinned_memory_can_be_turned_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_CUDA_NO_PINNED", "1")
    buft = simulation(SPEC).devices[0].host_buffer_type()
    assert buft is not None and buft.alloc_buffer(4096).name == "CPU"
    assert not caplog.records


def test_dry_buffers_take_no_memory() -> None:
    sim = simulation("h200", execute="dry")
    card, cpu = sim.devices
    pinned = card.host_buffer_type()
    assert pinned is not None
    for buft in (card.buffer_type(), cpu.buffer_type(), pinned, *cpu.extra_buffer_types()):
        tensor = new_tensor(T.Q4_0, 1 << 20, 1 << 17)  # 64 GiB
        buffer = alloc_tensors([tensor], buft)
        assert buffer is not None and buffer.buft is buft and buffer.size >= 64 << 30
        part, out = np.ones(64, np.uint8), np.ones(64, np.uint8)
        buffer.clear(1)
        if buft.name != "CPU_REPACK":
            buffer.set(tensor, as_bytes(part))
            buffer.get(tensor, as_bytes(out))
            assert not out.any()
