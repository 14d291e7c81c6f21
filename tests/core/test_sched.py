"""The scheduler as a whole: construction, one backend, memory."""

from collections.abc import Callable

import numpy as np
import pytest
from fakes import FakeBackend, FakeDevice, cpu, read, write
from sched_graphs import (
    backend_name,
    input_leaf,
    names,
    place,
    scheduler,
    two_devices_graph,
    weight,
)

from pyggml import build
from pyggml.backend import Backend, BufferType, Status
from pyggml.errors import ConfigError, OutOfMemory
from pyggml.graph import Graph, build_graph
from pyggml.ops import Op
from pyggml.sched import Scheduler, UnexpectedReallocation
from pyggml.tensor import Tensor


# ---------------------------------------------------------------- construction
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "0 backends"),
        ([cpu() for _ in range(17)], "17 backends"),
        ([cpu(), FakeDevice("CUDA0")], "has to be a CPU, not CUDA0"),
    ],
)
def test_impossible_backends(devices: list[FakeDevice], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler(*devices)


def test_backend_has_to_use_its_buffer_type() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    with pytest.raises(ConfigError, match="CPU cannot use buffers of type CUDA0"):
        Scheduler([host.init_backend()], [gpu.buffer_type()])


# ---------------------------------------------------------------- one backend
def test_one_backend_is_one_split_computed_as_often_as_wanted() -> None:
    host = cpu()
    sched = scheduler(host)
    (backend,) = sched.backends
    assert isinstance(backend, FakeBackend)
    x = input_leaf(4, name="x")
    y = build.scale(build.mul(x, weight(host, 4, name="w")), 2.0)
    graph = place(sched, y)
    w = graph.leafs[1]
    assert names(sched) == [("CPU", [])]
    for i in range(3):
        write(x, np.full(4, i))
        assert sched.graph_compute(graph) == Status.SUCCESS
        np.testing.assert_array_equal(read(y), read(w) * i * 2)
    uids = {g.uid for g in backend.graphs}
    assert len(uids) == 1 and uids.isdisjoint({0, graph.uid})  # a plan can be kept by uid
    assert graph.uid != 0
    sched.reset()
    other = build_graph([build.scale(input_leaf(4, name="z"), 2.0)])
    sched.graph_compute(other)
    assert backend.graphs[-1].uid not in uids


def test_nothing_is_decided_again_for_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(4, name="x")
    graph = place(sched, build.mul(x, weight(gpu, 4, name="w")))
    write(x, np.zeros(4))
    sched.graph_compute(graph)
    splits, layout = sched.splits, sched.layout

    def forbidden(self: FakeDevice, node: object) -> bool:
        raise AssertionError("placement is decided again")

    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "supports_buft", forbidden)
        patch.setattr(FakeBackend, "graph_compute", lambda self, graph: Status.SUCCESS)
        sched.graph_compute(graph)
    assert sched.splits == splits and sched.layout is layout


def test_another_graph_needs_a_reset() -> None:
    sched = scheduler(cpu())
    place(sched, build.scale(input_leaf(4, name="x"), 2.0))
    other = build_graph([build.scale(input_leaf(4, name="x"), 2.0)])
    with pytest.raises(AssertionError, match="reset"):
        sched.alloc_graph(other)
    with pytest.raises(AssertionError, match="reset"):
        sched.graph_compute(other)


def test_empty_graph() -> None:
    sched = scheduler(cpu())
    assert sched.graph_compute(Graph()) == Status.SUCCESS
    assert sched.n_splits == 0 and sched.dump() == ""


# ---------------------------------------------------------------- memory
def test_alloc_dependency_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(sched: Scheduler) -> list[int | None]:
        x = input_leaf(4, name="x")
        x1 = build.scale(x, 2.0)
        x2 = build.scale(x1, 2.0)
        place(sched, build.scale(x2, 2.0))
        return [x1.data, x2.data]

    first, second = chain(scheduler(cpu()))
    assert first == second

    def keep(self: Backend, graph: Graph, add: Callable[[Tensor, Tensor], None]) -> None:
        add(graph.nodes[0], graph.nodes[2])
        add(graph.nodes[0], graph.nodes[2])  # said twice is once

    monkeypatch.setattr(FakeBackend, "graph_optimize", keep)
    sched = scheduler(cpu())
    first, second = chain(sched)
    assert first != second
    assert len(sched.layout.graph.nodes) == 4


def test_alloc_dependency_on_a_node_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Backend, graph: Graph, add: Callable[[Tensor, Tensor], None]) -> None:
        add(graph.nodes[0], input_leaf(4, name="stranger"))

    monkeypatch.setattr(FakeBackend, "graph_optimize", keep)
    with pytest.raises(AssertionError, match="stranger"):
        place(scheduler(cpu()), build.scale(input_leaf(4, name="x"), 2.0))


def test_more_than_ten_kept_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Backend, graph: Graph, add: Callable[[Tensor, Tensor], None]) -> None:
        for node in graph.nodes[:-1]:
            add(node, graph.nodes[-1])

    monkeypatch.setattr(FakeBackend, "graph_optimize", keep)
    sched = scheduler(cpu())
    t = input_leaf(4, name="x")
    nodes = [t := build.scale(t, 2.0) for _ in range(13)]
    place(sched, t)
    assert len({n.data for n in nodes}) == 13
    kept = [n for n in sched.layout.graph.nodes if n.op == Op.NONE]
    assert [len(n.src) for n in kept] == [10, 2]


def test_backend_may_reorder_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: Backend, graph: Graph, add: Callable[[Tensor, Tensor], None]) -> None:
        graph.nodes[:2] = graph.nodes[1::-1]

    monkeypatch.setattr(FakeBackend, "graph_optimize", turn)
    host = cpu()
    sched = scheduler(host)
    x = input_leaf(4, name="x")
    y = build.add(build.scale(x, 2.0).named("a"), build.scale(x, 3.0).named("b")).named("c")
    graph = place(sched, y)
    write(x, np.ones(4))
    sched.graph_compute(graph)
    assert host.trace == ["CPU run b a c"]
    assert [n.name for n in graph.nodes] == ["b", "a", "c"]
    np.testing.assert_array_equal(read(y).ravel(), [5] * 4)


def test_reserve_covers_smaller_graphs() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    large = two_devices_graph(100, gpu, host)
    sizes = sched.reserve_size(large)
    assert [sched.buffer_size(b) for b in sched.backends] == [0, 0]
    sched.reserve(two_devices_graph(100, gpu, host))
    assert [sched.buffer_size(b) for b in sched.backends] == sizes
    assert sched.n_splits == 2 and sched.splits == ()
    before = gpu.used, host.used
    graph = two_devices_graph(10, gpu, host)
    weights = 2 * 64
    assert sched.graph_compute(graph) == Status.SUCCESS
    assert gpu.used + host.used == sum(before) + weights  # no buffer was allocated
    assert [sched.buffer_size(b) for b in sched.backends] == sizes


def test_larger_graphs_grow_the_buffers() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    for n in (10, 100, 10):
        sched.reset()
        graph = two_devices_graph(n, gpu, host)
        assert sched.graph_compute(graph) == Status.SUCCESS
    assert sched.buffer_size(sched.backends[0]) >= 100 * 16


def test_buffers_are_not_replaced_under_running_work() -> None:
    gpu, host = FakeDevice("CUDA0", is_late=True), cpu()
    sched = scheduler(gpu, host)
    w = weight(gpu, 4, 4, name="w")
    small = place(sched, build.mul_mat(w, input_leaf(4, 10, name="x")))
    sched.graph_compute_async(small)
    sched.reset()
    place(sched, build.mul_mat(w, input_leaf(4, 100, name="x")))
    sched.synchronize()  # work on a freed buffer would fail here
    assert host.trace == [] and gpu.trace == ["CUDA0 run node_0", "CUDA0 wait"]


def test_out_of_memory_leaves_a_usable_scheduler() -> None:
    gpu, host = FakeDevice("CUDA0", total=1 << 12), cpu()
    sched = scheduler(gpu, host)
    with pytest.raises(OutOfMemory, match="failed to allocate CUDA0 buffer of size"):
        sched.reserve(two_devices_graph(1000, gpu, host))
    assert sched.graph_compute(two_devices_graph(10, gpu, host)) == Status.SUCCESS
    sched.reset()
    with pytest.raises(OutOfMemory):
        sched.alloc_graph(two_devices_graph(1000, gpu, host))
    assert sched.graph_compute(two_devices_graph(10, gpu, host)) == Status.SUCCESS


def test_debug_realloc(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()

    def after_ten(level: str, n: int, reader: FakeDevice) -> None:
        monkeypatch.setenv("GGML_SCHED_DEBUG_REALLOC", level)
        sched = scheduler(gpu, host)
        sched.reserve(two_devices_graph(10, gpu, host))
        sched.alloc_graph(two_devices_graph(n, reader, host))

    after_ten("2", 10, gpu)
    with pytest.raises(UnexpectedReallocation, match="^unexpected graph reallocation"):
        after_ten("1", 11, gpu)
    after_ten("1", 11, host)  # placed differently: expected
    with pytest.raises(UnexpectedReallocation, match="^graph reallocation"):
        after_ten("2", 11, host)


def test_nodes_that_move_within_one_memory_keep_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG_REALLOC", "2")
    host = cpu()
    blas = FakeDevice("BLAS", also_reads=[host.buffer_type()])
    sched = Scheduler([blas.init_backend(), host.init_backend()], [host.buffer_type()] * 2)

    def graph() -> Graph:
        return build_graph([build.scale(input_leaf(4, name="x"), 2.0).named("y")])

    sched.reserve(graph())
    where = []
    for refused in ((), {Op.SCALE}):
        blas.refused = refused
        sched.reset()
        sched.alloc_graph(scaled := graph())  # raises if it needs other buffers
        where.append(backend_name(sched, scaled.nodes[0]))
    assert where == ["BLAS", "CPU"]


def test_moved_nodes_get_new_places_even_if_they_fit() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    where: list[BufferType] = []
    for backend in (*sched.backends, *sched.backends):
        sched.reset()
        x = input_leaf(4, name="x")
        a = build.scale(x, 2.0)
        sched.set_tensor_backend(a, sched.backends[1])
        b = build.scale(a, 2.0)
        sched.set_tensor_backend(b, backend)
        graph = place(sched, b)
        assert b.buffer is not None
        where.append(b.buffer.buft)
        write(x, np.ones(4))
        sched.graph_compute(graph)
        np.testing.assert_array_equal(read(b).ravel(), [4] * 4)
    assert where == [gpu.buffer_type(), host.buffer_type()] * 2
