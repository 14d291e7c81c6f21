"""A card as a stream of work: late results, captured graphs, copies and events in order."""

import gc
import weakref

import numpy as np
import pytest
from simulated import F32, Chain, as_bytes, read, simulation, weight, write

from pyggml import build
from pyggml.backend import Backend, Device, Status, alloc_tensors, buffer_of
from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cuda.backend import CudaBackend
from pyggml.backends.cuda.driver import DeviceError
from pyggml.errors import IdError
from pyggml.graph import Graph, build_graph, next_uid
from pyggml.tensor import Tensor, new_tensor

SPEC = "rtx3060:64MiB"


def double(device: Device, *ne: int) -> tuple[Tensor, Tensor, Graph]:
    """x, 2x and their graph, all on a device."""
    x = new_tensor(F32, *ne, name="x")
    y = build.scale(x, 2.0)
    graph = build_graph([y])
    graph.uid = next_uid()
    alloc_tensors([x, y], device.buffer_type())
    return x, y, graph


def backend_of(device: Device) -> CudaBackend:
    backend = device.init_backend()
    assert isinstance(backend, CudaBackend)
    return backend


def floats(value: float, n: int = 8) -> np.ndarray:
    return np.full((1, 1, 1, n), value, np.float32)


def pinned(device: Device, value: float, n: int = 8) -> tuple[Tensor, np.ndarray]:
    """A tensor in pinned memory, which it keeps alive, and its elements."""
    tensor = new_tensor(F32, n)
    buft = device.host_buffer_type()
    assert buft is not None
    alloc_tensors([tensor], buft)
    write(tensor, floats(value, n))
    buffer = buffer_of(tensor)
    assert buffer is not None and tensor.data is not None
    return tensor, at_address(tensor.data, tensor.nbytes).view(np.float32)


def test_a_result_is_late() -> None:
    device = simulation(SPEC).devices[0]
    x, y, graph = double(device, 8)
    write(x, floats(3))
    backend = backend_of(device)
    assert backend.graph_compute(graph) == Status.SUCCESS
    assert np.isnan(read(y)).all()  # a blocking read does not know of the stream
    backend.synchronize()
    assert (read(y) == 6).all()


def test_asynchronous_copies_keep_the_order_of_the_stream() -> None:
    device = simulation(SPEC).devices[0]
    x, y, graph = double(device, 8)
    backend = backend_of(device)
    a, source = pinned(device, 3)
    b, target = pinned(device, 0)
    assert a.buffer is not b.buffer
    backend.set_async(x, as_bytes(source))
    backend.graph_compute(graph)
    backend.get_async(y, as_bytes(target))
    backend.set_async(x, as_bytes(floats(50)))  # after the graph has read it
    assert not target.any()
    backend.synchronize()
    assert (target == 6).all() and (read(x) == 50).all()
    backend.set_async(x, as_bytes(np.empty(0, np.float32)))
    backend.get_async(x, as_bytes(np.empty(0, np.float32)))
    part = np.array([1, 2], np.float32)
    backend.set_async(x, as_bytes(part), 8)
    out = np.empty(4, np.float32)
    backend.get_async(x, as_bytes(out), 4)
    assert out.tolist() == [50, 1, 2, 50]


# ---------------------------------------------------------------- captured graphs
def launches(backend: CudaBackend) -> tuple[int, int]:
    card = backend.driver.cards[0]  # type: ignore[attr-defined]  # simulated
    return card.counters.launches, card.counters.captured_launches


def run_often(backend: CudaBackend, graph: Graph, x: Tensor, y: Tensor, n: int) -> list[float]:
    seen = []
    for i in range(n):
        write(x, floats(i))
        backend.graph_compute(graph)
        backend.synchronize()
        seen.append(float(read(y).max()))
    return seen


def test_a_graph_that_comes_again_is_captured() -> None:
    device = simulation(SPEC).devices[0]
    backend = backend_of(device)
    x, y, graph = double(device, 8)
    assert run_often(backend, graph, x, y, 4) == [0, 2, 4, 6]
    assert launches(backend) == (4, 3)
    graph.uid = next_uid()  # another graph as far as anybody knows
    assert run_often(backend, graph, x, y, 2) == [0, 2]
    assert launches(backend) == (6, 4)
    graph.uid = 0
    assert run_often(backend, graph, x, y, 2) == [0, 2]
    assert launches(backend) == (8, 4)


def test_capturing_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "1")
    device = simulation(SPEC).devices[0]
    backend = backend_of(device)
    x, y, graph = double(device, 8)
    assert run_often(backend, graph, x, y, 3) == [0, 2, 4]
    assert launches(backend) == (3, 0)


def test_what_is_kept_of_a_graph_goes_with_it() -> None:
    sim = simulation(SPEC)
    backend = backend_of(sim.devices[0])
    x, y, graph = double(sim.devices[0], 8)
    run_often(backend, graph, x, y, 3)
    plan = weakref.ref(sim.cpu.engine.plan(graph))
    assert plan() is not None
    del graph
    gc.collect()
    assert plan() is None
    _, _, graph = double(sim.devices[0], 8)
    backend.graph_compute(graph)
    backend.close()
    assert not backend._known


def test_captured_graphs_take_less_of_the_hosts_time() -> None:
    sim = simulation(SPEC)
    card, cpu = sim.devices
    chain = Chain([card] * 10)
    sched = chain.scheduler(sim.devices)
    times = []
    for _ in range(4):
        start = sim.clock.now
        sched.graph_compute(chain.graph)
        times.append(sim.clock.now - start)
    submit = sim.driver.cards[0].rates.submit
    assert times[0] - times[3] > 10 * submit
    assert times[2] == pytest.approx(times[3])


# ---------------------------------------------------------------- several cards
def test_copies_between_cards_are_ordered_by_an_event() -> None:
    sim = simulation(SPEC, SPEC)
    first, second = (backend_of(d) for d in sim.devices[:2])
    x, y, graph = double(sim.devices[0], 8)
    far_x, far_y, far_graph = double(sim.devices[1], 8)
    write(x, floats(3))
    first.graph_compute(graph)
    assert second.copy_async(first, y, far_x)
    second.graph_compute(far_graph)
    second.synchronize()
    assert (read(far_y) == 12).all()
    assert sim.driver.cards[0].counters.peer_bytes == y.nbytes


def test_copies_on_one_card_stay_in_its_stream() -> None:
    sim = simulation(SPEC)
    backend = backend_of(sim.devices[0])
    x, y, graph = double(sim.devices[0], 8)
    z = weight(sim.devices[0], 8, seed=0)
    write(x, floats(3))
    backend.graph_compute(graph)
    assert backend.copy_async(backend, y, z)
    backend.synchronize()
    assert (read(z) == 6).all()
    assert sim.driver.cards[0].counters.d2d_bytes == y.nbytes


def test_other_memory_is_left_to_the_caller() -> None:
    sim = simulation(SPEC, SPEC)
    card, other, cpu = sim.devices
    first, second, host = (device.init_backend() for device in sim.devices)
    stranger = simulation(SPEC)
    here, there, at_home = (weight(d, 8, seed=0) for d in (card, other, cpu))
    far = weight(stranger.devices[0], 8, seed=0)
    cases: list[tuple[Backend, Backend, Tensor, Tensor]] = [
        (first, host, at_home, here),  # from the CPU
        (first, stranger.devices[0].init_backend(), far, here),  # another machine
        (first, second, here, here),  # not the source's memory
        (first, second, there, there),  # not the target's memory
        (host, first, here, at_home),  # to the CPU
    ]
    for to, source, src, dst in cases:
        assert not to.copy_async(source, src, dst)


def test_events_let_the_host_and_other_streams_wait() -> None:
    sim = simulation(SPEC, SPEC)
    device = sim.devices[0]
    a, b = backend_of(device), backend_of(device)
    x, y, graph = double(device, 8)
    write(x, floats(3))
    event = device.new_event()
    assert event is not None
    a.graph_compute(graph)
    a.event_record(event)
    b.event_wait(event)
    place, target = pinned(device, 0)
    b.get_async(y, as_bytes(target))
    b.synchronize()
    assert (target == 6).all() and place.buffer is not None
    write(x, floats(5))
    a.graph_compute(graph)
    a.event_record(event)
    event.synchronize()
    assert (read(y) == 10).all()


# ---------------------------------------------------------------- mistakes
def test_memory_of_others_is_a_fault() -> None:
    """The memory underneath could be read: a real card could not."""
    sim = simulation(SPEC, SPEC)
    w = weight(sim.devices[1], 8, 8, seed=0).named("w")
    x = weight(sim.devices[0], 8, seed=1)
    y = build.mul_mat(w, x)
    alloc_tensors([y], sim.devices[0].buffer_type())
    with pytest.raises(DeviceError, match=r"CUDA0: .* uses <w: .*, which lies in CUDA1"):
        backend_of(sim.devices[0]).graph_compute(build_graph([y]))


def test_a_wrong_id_is_told_when_the_result_is_waited_for() -> None:
    sim = simulation(SPEC)
    device = sim.devices[0]
    table, ids = weight(device, 8, 4, seed=0), new_tensor(build.I32, 2)
    y = build.get_rows(table, ids)
    alloc_tensors([ids, y], device.buffer_type())
    write(ids, np.array([1, 9], np.int32))
    backend = backend_of(device)
    graph = build_graph([y])
    graph.uid = next_uid()
    for _ in range(3):
        backend.graph_compute(graph)
        with pytest.raises(IdError, match="row 9"):
            backend.synchronize()
    write(ids, np.array([1, 3], np.int32))
    backend.graph_compute(graph)
    backend.synchronize()
    assert (read(y)[0, 0] == read(table)[0, 0, [1, 3]]).all()
