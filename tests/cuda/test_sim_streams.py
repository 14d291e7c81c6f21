"""Streams of simulated cards run late: whoever forgets to wait sees old values."""

import numpy as np
import pytest
from simulated import sim_driver

from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cuda.driver import DeviceError, Launch
from pyggml.backends.cuda.sim_driver import STAGED, SimDriver
from pyggml.cost import Cost
from pyggml.errors import IdError

SPEC = "rtx3060:64MiB"
N = 256


def filled(driver: SimDriver, value: int) -> np.ndarray:
    memory = driver.pinned(N)
    memory[:] = value
    return memory


def test_results_are_there_after_waiting_and_not_before() -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, N)
    src, dst = filled(driver, 5), filled(driver, 0)
    driver.h2d(0, address, src, stream)
    driver.d2h(0, dst, address, stream)
    assert not dst.any() and not stream.query()
    stream.synchronize()
    assert (dst == 5).all() and stream.query()


def test_a_pinned_source_that_is_overwritten_too_early_arrives_overwritten() -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, N)
    src, dst = filled(driver, 5), filled(driver, 0)
    driver.h2d(0, address, src, stream)
    src[:] = 9
    driver.d2h(0, dst, address, stream)
    stream.synchronize()
    assert (dst == 9).all()


def test_a_plain_source_is_copied_at_the_call() -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, N)
    src, dst = np.full(N, 7, np.uint8), filled(driver, 0)
    driver.h2d(0, address, src, stream)
    src[:] = 9
    driver.d2h(0, dst, address, stream)
    stream.synchronize()
    assert (dst == 7).all()


@pytest.mark.parametrize("size", [STAGED, STAGED + 1])
def test_large_plain_sources_are_waited_for(size: int) -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, size)
    driver.h2d(0, address, np.full(size, 7, np.uint8), stream)
    arrived = at_address(address, size)
    assert (arrived == 7).all() == (size > STAGED)
    stream.synchronize()
    assert (arrived == 7).all()


def test_a_copy_into_plain_memory_waits() -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, N)
    dst = np.zeros(N, np.uint8)
    driver.memset(0, address, 3, N, stream)
    driver.d2h(0, dst, address, stream)
    assert (dst == 3).all()


def test_streams_have_no_order_without_an_event() -> None:
    driver = sim_driver(SPEC)
    a, b, event, address = driver.stream(0), driver.stream(0), driver.event(0), driver.alloc(0, N)
    dst = filled(driver, 0)
    driver.memset(0, address, 3, N, a)
    driver.d2h(0, dst, address, b)
    b.synchronize()
    assert (dst == 0xFF).all()  # as the memory was
    event.record(a)
    b.wait(event)
    driver.d2h(0, dst, address, b)
    assert not event.query()
    b.synchronize()
    assert (dst == 3).all()
    assert event.query()


def test_an_event_is_a_point_and_not_the_end() -> None:
    driver = sim_driver(SPEC)
    stream, event, address = driver.stream(0), driver.event(0), driver.alloc(0, N)
    dst = filled(driver, 0)
    event.synchronize()  # never recorded: it has passed
    assert event.query()
    driver.memset(0, address, 1, N, stream)
    driver.d2h(0, dst, address, stream)
    event.record(stream)
    driver.memset(0, address, 2, N, stream)
    driver.d2h(0, dst, address, stream)
    event.synchronize()
    assert (dst == 1).all()
    driver.synchronize(0)
    assert (dst == 2).all()


def test_events_order_two_cards() -> None:
    driver = sim_driver(SPEC, SPEC)
    a, b = driver.stream(0), driver.stream(1)
    here, there, event = driver.alloc(0, N), driver.alloc(1, N), driver.event(0)
    dst = filled(driver, 0)
    driver.memset(0, here, 4, N, a)
    driver.peer(1, there, 0, here, N, a)
    event.record(a)
    b.wait(event)
    driver.d2h(1, dst, there, b)
    b.synchronize()
    assert (dst == 4).all()


def test_freeing_waits_for_work_on_the_card() -> None:
    driver = sim_driver(SPEC)
    stream, address, dst = driver.stream(0), driver.alloc(0, N), filled(driver, 0)
    driver.memset(0, address, 3, N, stream)
    driver.d2h(0, dst, address, stream)
    driver.free(0, address)
    assert (dst == 3).all()


# ---------------------------------------------------------------- what goes wrong
def failing(error: Exception) -> Launch:
    def emulate() -> None:
        raise error

    return Launch("failing", Cost(bytes=64), emulate)


def test_a_fault_is_told_once_and_ends_all_work() -> None:
    driver = sim_driver(SPEC)
    stream, address = driver.stream(0), driver.alloc(0, N)
    dst = filled(driver, 0)
    driver.memset(0, address, 3, N, stream)
    driver.launch(0, failing(ZeroDivisionError("in the kernel")), stream)
    driver.d2h(0, dst, address, stream)
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        stream.synchronize()
    assert not dst.any()
    for call in (stream.synchronize, lambda: driver.memset(0, address, 3, N, stream)):
        with pytest.raises(DeviceError, match="an earlier error ended all work here: in the"):
            call()
    driver.free(0, address)  # cleaning up still works


def test_a_wrong_id_does_not_end_the_stream() -> None:
    driver = sim_driver(SPEC)
    stream, address, dst = driver.stream(0), driver.alloc(0, N), filled(driver, 0)
    driver.launch(0, failing(IdError("no expert 9")), stream)
    driver.memset(0, address, 3, N, stream)
    driver.d2h(0, dst, address, stream)
    event = driver.event(0)
    event.record(stream)
    with pytest.raises(IdError, match="no expert 9"):
        event.synchronize()
    stream.synchronize()
    assert (dst == 3).all()


# ---------------------------------------------------------------- captured graphs
def counting(numbers: np.ndarray) -> Launch:
    def emulate() -> None:
        numbers[:] += 1

    return Launch("count", Cost(bytes=1 << 20, flops=1e6), emulate)


@pytest.mark.parametrize("trace", [False, True])
def test_a_captured_graph_is_recorded_and_runs_as_often_as_it_is_launched(trace: bool) -> None:
    driver = sim_driver(SPEC, trace=trace)
    stream, numbers, clock = driver.stream(0), np.zeros(4), driver.clock
    address = driver.alloc(0, N)

    def step() -> None:
        for _ in range(20):
            driver.launch(0, counting(numbers), stream)

    step()
    stream.synchronize()
    plain, busy = clock.now, driver.cards[0].compute.busy
    assert (numbers == 20).all()
    stream.begin_capture()
    step()
    with pytest.raises(DeviceError, match="captured"):
        driver.alloc(0, 16)
    with pytest.raises(DeviceError, match="captured"):
        stream.synchronize()
    with pytest.raises(DeviceError, match="only launches can be captured"):
        driver.h2d(0, address, filled(driver, 1), stream)
    graph = stream.end_capture()
    stream.synchronize()
    assert (numbers == 20).all()
    before = clock.now
    graph.launch(stream)
    graph.launch(stream)
    assert clock.now - before == pytest.approx(2 * driver.cards[0].rates.submit)
    stream.synchronize()
    assert (numbers == 60).all()
    card = driver.cards[0]
    assert (card.counters.launches, card.counters.captured_launches) == (60, 40)
    assert card.counters.kernel_bytes == 60 << 20 and card.counters.kernel_flops == 60e6
    assert card.compute.busy == pytest.approx(3 * busy)
    assert (clock.now - before) / 2 < plain
    if trace:
        assert sum(s.name == "count" for s in clock.trace or ()) == 60
