"""Virtual time: units work side by side, host memory is shared, hosts wait."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import sim_driver

from pyggml.backends.cuda.driver import Launch
from pyggml.backends.cuda.sim_clock import Bus, Clock, Unit
from pyggml.cost import Cost

MIB = 1 << 20


def clock(gbs: float = 10.0, *, trace: bool = False) -> Clock:
    return Clock(Bus(lambda: gbs), trace=trace)


def test_work_of_one_unit_queues_and_units_work_side_by_side() -> None:
    c, a, b = clock(), Unit("CUDA0", "compute"), Unit("CUDA0", "H2D")
    assert c.run((a,), 0.0, 2.0, "x") == 2.0
    assert c.run((a,), 0.0, 1.0, "y") == 3.0
    assert c.run((b,), 0.0, 1.5, "z") == 1.5
    assert c.run((a, b), 0.0, 1.0, "both") == 4.0
    assert (a.busy, b.busy, c.now) == (4.0, 2.5, 0.0)
    c.wait_until(4.0, "for CUDA0", 0.5)
    assert c.now == 4.5
    c.wait_until(1.0, "for CUDA0", 0.5)  # over already: only the call
    assert c.now == 5.0


def test_copies_overlap_with_kernels() -> None:
    def time(n_streams: int) -> float:
        driver = sim_driver("rtx3090", dry=True)
        streams = [driver.stream(0) for _ in range(n_streams)]
        address, src = driver.alloc(0, 256 * MIB), driver.pinned(256 * MIB)
        for i in range(4):
            stream = streams[i % n_streams]
            driver.h2d(0, address, src, stream)
            driver.launch(0, Launch("k", Cost(bytes=8 << 30)), stream)
        driver.synchronize(0)
        return driver.clock.now

    copy = 256 * MIB / 25e9
    kernel = (8 << 30) / (0.82 * 936e9)
    assert time(1) == pytest.approx(4 * (copy + kernel), rel=0.01)
    assert time(2) == pytest.approx(4 * max(copy, kernel) + min(copy, kernel), rel=0.01)


def test_both_directions_are_copied_at_once() -> None:
    driver = sim_driver("rtx3060", dry=True)
    up, down = driver.stream(0), driver.stream(0)
    address, host = driver.alloc(0, 64 * MIB), driver.pinned(64 * MIB)
    driver.h2d(0, address, host, up)
    driver.d2h(0, host, address, down)
    driver.synchronize(0)
    # 25 GB/s each; host memory gives 40 in all, so the second copy gets 15 for a while
    first = 64 * MIB / 25e9
    rest = 64 * MIB - 15e9 * first
    assert driver.clock.now == pytest.approx(first + rest / 25e9, rel=0.01)


@pytest.mark.parametrize(("pinned", "gbs"), [(True, 25.0), (False, 0.45 * 25)])
def test_memory_that_is_not_pinned_is_copied_slowly(pinned: bool, gbs: float) -> None:
    driver = sim_driver("rtx3060", dry=True)
    stream, address, n = driver.stream(0), driver.alloc(0, 64 * MIB), 64 * MIB
    src = driver.pinned(n) if pinned else np.empty(n, np.uint8)
    driver.h2d(0, address, src, stream)
    is_free = driver.clock.now < 1e-4  # the host goes on meanwhile
    assert is_free == pinned
    stream.synchronize()
    assert driver.clock.now == pytest.approx(n / (1e9 * gbs), rel=0.02)


@pytest.mark.parametrize(("card", "seconds"), [("a100", 1 / 240), ("rtx3060", 2 / 25)])
def test_cards_without_a_direct_way_copy_through_the_host(card: str, seconds: float) -> None:
    driver = sim_driver(f"{card}:8GiB", f"{card}:8GiB", dry=True)
    assert driver.can_peer(0, 1) == (card == "a100") and not driver.can_peer(0, 0)
    stream, n = driver.stream(0), 1000 * 1000 * 1000
    driver.peer(1, driver.alloc(1, n), 0, driver.alloc(0, n), n, stream)
    stream.synchronize()
    assert driver.clock.now == pytest.approx(seconds, rel=0.01)
    assert driver.cards[0].counters.peer_bytes == n
    assert driver.cards[0].d2h.busy and driver.cards[1].h2d.busy


# ---------------------------------------------------------------- the bus
def test_who_is_alone_is_not_held_up() -> None:
    bus = Bus(lambda: 10.0)
    assert bus.deliver(0.0, 1.0, 2.0, 100e9) == 3.0  # even above what it delivers
    assert bus.deliver(5.0, 5.0, 1.0, 0.0) == 6.0


def test_who_comes_later_gets_what_is_left() -> None:
    bus = Bus(lambda: 10.0)
    assert bus.deliver(0.0, 0.0, 1.0, 8e9) == 1.0
    # 2 GB/s for one second, then 8
    assert bus.deliver(0.0, 0.0, 1.0, 8e9) == pytest.approx(1.75)
    # nothing before 1.0, then 2 GB/s for 0.75 s, then 10
    assert bus.deliver(0.0, 0.0, 1.0, 10e9) == pytest.approx(1.75 + 8.5e9 / 10e9)


requests = st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 3.0), st.floats(1e6, 30e9))


@given(st.lists(requests, min_size=1, max_size=8))
def test_the_bus_never_delivers_more_than_it_has(wanted: list[tuple[float, float, float]]) -> None:
    gbs = 10.0
    bus, spans, now = Bus(lambda: gbs), [], 0.0
    for start, seconds, nbytes in wanted:
        seconds = max(seconds, nbytes / (1e9 * gbs))
        end = bus.deliver(now, start, seconds, nbytes)
        assert end >= start + seconds * (1 - 1e-9)
        spans.append((start, end, nbytes))
    # all that arrived between the first start and the last end
    first, last = min(s for s, _, _ in spans), max(e for _, e, _ in spans)
    assert sum(n for *_, n in spans) <= 1e9 * gbs * (last - first) * (1 + 1e-6)
    for a, b, rate in bus._taken:
        others = sum(r for x, y, r in bus._taken if x <= (a + b) / 2 < y)
        assert rate <= others <= 1e9 * gbs * (1 + 1e-6)


def test_no_link_is_faster_than_host_memory() -> None:
    c = clock(10.0)
    assert c.copy(Unit("CUDA0", "H2D"), 0.0, 0.5, "H2D", 20_000_000_000) == pytest.approx(2.0)


def test_copies_slow_the_processor_down() -> None:
    def computing(copied: int) -> float:
        c = clock(10.0)
        if copied:
            c.copy(Unit("CUDA0", "H2D"), 0.0, copied / 5e9, "H2D", copied)
        c.compute("CPU", 1.0, 10e9)
        return c.now

    assert computing(0) == 1.0
    # 5 GB/s for half a second are missing
    assert computing(int(2.5e9)) == pytest.approx(1.25)


def test_nothing_is_noted_without_a_trace() -> None:
    assert clock().trace is None
    c = clock(trace=True)
    c.compute("CPU", 1.0, 5.0)
    c.run((Unit("CUDA0", "compute"),), 0.0, 0.0, "nothing")
    assert [(s.device, s.name, s.start, s.seconds) for s in c.trace or ()] == [
        ("host", "CPU", 0.0, 1.0)
    ]
