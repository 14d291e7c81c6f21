"""Memory of simulated cards: capacity, poison, checked addresses."""

import ctypes

import numpy as np
import pytest
from simulated import sim_driver

from pyggml.backend import Memory
from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cuda import sim_memory
from pyggml.backends.cuda.driver import LARGE, SMALL, DeviceError
from pyggml.backends.cuda.sim_memory import FAKE_SPACE, FILLED, MIB, STAMP
from pyggml.errors import OutOfMemory

SPEC = "rtx3060:64MiB"  # 8 MiB of them are the driver's


def floats(address: int, nbytes: int) -> np.ndarray:
    return at_address(address, nbytes).view(np.float32)


@pytest.mark.parametrize("dry", [False, True])
def test_capacity_is_hard(dry: bool) -> None:
    driver = sim_driver(SPEC, dry=dry)
    memory = driver.memory(0)
    assert (memory.total, memory.free) == (64 * MIB, 56 * MIB)
    first = driver.alloc(0, 40 * MIB, "weights")
    with pytest.raises(OutOfMemory) as error:
        driver.alloc(0, 20 * MIB, "a CUDA0 buffer")
    assert str(error.value) == (
        "CUDA0: a CUDA0 buffer of 20.0 MiB does not fit: 16.0 MiB of 64.0 MiB are free, "
        "4.0 MiB are missing"
    )
    assert driver.memory(0).free == 16 * MIB
    driver.free(0, first)
    assert driver.memory(0).free == 56 * MIB
    driver.alloc(0, 56 * MIB)
    assert driver.memory(0).free == 0
    with pytest.raises(OutOfMemory):
        driver.alloc(0, 1)


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [(0, SMALL), (1, SMALL), (SMALL + 1, 2 * SMALL), (MIB, LARGE), (LARGE + 1, 2 * LARGE)],
)
def test_allocations_take_whole_pieces(nbytes: int, taken: int) -> None:
    driver = sim_driver(SPEC)
    before = driver.memory(0).free
    driver.alloc(0, nbytes)
    assert before - driver.memory(0).free == taken


@pytest.mark.parametrize("nbytes", [4096, FILLED + 3 * STAMP + 4096])
def test_fresh_memory_is_full_of_nan(nbytes: int) -> None:
    driver = sim_driver("rtx3060:1GiB")
    address = driver.alloc(0, nbytes)
    values = floats(address, nbytes)
    assert np.isnan(values).all()
    values[:: 1 << 10] = 1.0
    assert np.isnan(floats(driver.alloc(0, nbytes), nbytes)).all()  # the pages are its own
    assert (values[:: 1 << 10] == 1.0).all()
    driver.free(0, address)


def test_memory_is_taken_when_it_is_written() -> None:
    driver = sim_driver("rtx3060")
    size = 2 << 30
    address = driver.alloc(0, size)
    at_address(address + size - 4096, 4096)[:] = 1
    assert np.isnan(floats(address + size - 8192, 4096)).all()
    driver.free(0, address)


def test_a_card_larger_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_memory, "host_memory", lambda: Memory(MIB, 2 * MIB))
    driver = sim_driver("rtx3060")
    with pytest.raises(OutOfMemory, match="has only 1.0 MiB left to simulate it with\n--dry-run"):
        driver.alloc(0, 2 * MIB)
    assert driver.memory(0).free == driver.memory(0).total - driver.cards[0].memory.used
    driver.free(0, driver.alloc(0, MIB))
    sim_driver("rtx3060", dry=True).alloc(0, 1 << 30)


def test_only_what_is_allocated_can_be_freed() -> None:
    driver = sim_driver(SPEC)
    address = driver.alloc(0, 4096)
    with pytest.raises(DeviceError, match="nothing is allocated"):
        driver.free(0, address + 256)
    driver.free(0, address)
    with pytest.raises(DeviceError, match="freed twice"):
        driver.free(0, address)


def test_copies_stay_inside_one_allocation() -> None:
    driver = sim_driver(SPEC, SPEC)
    stream = driver.stream(0)
    address, other = driver.alloc(0, 4096), driver.alloc(1, 4096)
    host = np.zeros(8192, np.uint8)
    for call in (
        lambda: driver.h2d(0, address, host, stream),
        lambda: driver.h2d(0, address - 1, host[:16], stream),
        lambda: driver.d2h(0, host[:16], address + 4090, stream),
        lambda: driver.d2d(0, address, other, 16, stream),
        lambda: driver.memset(0, address + 4096, 0, 1, stream),
        lambda: driver.peer(0, address, 1, address, 16, stream),
        lambda: driver.h2d(1, address, host[:16], stream),
    ):
        with pytest.raises(DeviceError, match="not inside one allocation"):
            call()
    driver.h2d(0, address + 4080, host[:16], stream)


def test_dry_memory_has_addresses_only() -> None:
    driver = sim_driver("h200", "h200", dry=True)
    addresses = [driver.alloc(i, 100 << 30) for i in (0, 1)]
    assert min(addresses) >= FAKE_SPACE and abs(addresses[0] - addresses[1]) >= 100 << 30
    stream = driver.stream(0)
    out = np.full(64, 7, np.uint8)
    driver.h2d(0, addresses[0], out, stream)
    driver.d2h(0, out, addresses[0], stream)
    assert not out.any()
    driver.peer(1, addresses[1], 0, addresses[0], 1 << 30, stream)
    driver.memset(0, addresses[0], 1, 1 << 30, stream)
    stream.synchronize()
    # a copy into memory that is not there does nothing either
    fake = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(addresses[1]))
    driver.d2h(0, fake, addresses[0], stream)


def test_pinned_memory_is_given_back() -> None:
    driver = sim_driver(SPEC, pinned_limit=4096)
    first = driver.pinned(4096)
    assert driver.is_pinned(first[100:200]) and not driver.is_pinned(np.zeros(8, np.uint8))
    with pytest.raises(OutOfMemory):
        driver.pinned(1)
    del first
    assert driver.is_pinned(driver.pinned(4096))
