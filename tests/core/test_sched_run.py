"""The order of work on streams that are late, callbacks, evaluations in flight."""

import numpy as np
import pytest
from fakes import FakeBackend, FakeDevice, cpu, read, write
from sched_graphs import F32, input_leaf, late_pair, names, parallel_graph, place, scheduler, weight

from pyggml import build
from pyggml.backend import Status, alloc_tensors
from pyggml.graph import Graph, build_graph
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor


# ---------------------------------------------------------------- order of work
@pytest.mark.parametrize("peer", [False, True])
def test_work_crosses_late_devices_in_order(peer: bool) -> None:
    first, second, host, trace = late_pair(peer_copies=peer)
    sched = scheduler(first, second, host)
    x = input_leaf(4, name="x")
    a = build.mul(x, weight(first, 4, name="w0")).named("a")
    b = build.mul(a, weight(second, 4, name="w1", seed=1)).named("b")
    c = build.mul(b, weight(host, 4, name="w2", seed=2)).named("c")
    graph = place(sched, c)
    write(x, np.ones(4))
    sched.graph_compute(graph)
    by_name = {t.name: read(t) for t in graph.leafs}
    expected = by_name["w0"] * by_name["w1"] * by_name["w2"]
    np.testing.assert_array_equal(read(c), expected)
    crossing = ["CUDA1 copy a"] if peer else ["CUDA0 wait"]
    assert trace[:5] == ["CUDA0 run a", *crossing, "CUDA1 run b", "CUDA1 wait", "CPU run c"]


def test_inputs_may_be_overwritten_as_soon_as_compute_returns() -> None:
    first, _, host, _ = late_pair(peer_copies=True)
    host.peer_copies = host.is_late = True  # even where the copy could be made later
    sched = scheduler(first, host)
    x = input_leaf(4, name="x")
    graph = place(sched, build.mul(x, weight(first, 4, name="w")))
    y = graph.nodes[0]
    write(x, np.ones(4))
    sched.graph_compute_async(graph)
    write(x, np.zeros(4))
    sched.synchronize()
    np.testing.assert_array_equal(read(y), read(graph.leafs[1]))


def test_copies_wait_for_earlier_work_of_their_device() -> None:
    first, second, host, trace = late_pair(peer_copies=True)
    sched = scheduler(first, second, host)
    w0, w1 = weight(first, 4, name="w0"), weight(second, 4, name="w1")
    a = build.mul(input_leaf(4, name="x"), w0).named("a")
    b = build.mul(a, w1).named("b")
    c = build.mul(b, w0).named("c")
    graph = place(sched, build.mul(build.add(c, c).named("d"), w1).named("e"))
    sched.graph_compute_async(graph)
    assert trace[:3] == ["CUDA0 run a", "CUDA1 copy a", "CUDA1 run b"]
    # without events a device has to be idle before it gets new inputs
    assert trace[3:6] == ["CUDA0 wait", "CUDA0 copy b", "CUDA0 run c d"]


def test_device_that_reads_in_place_waits_for_what_it_reads() -> None:
    first, second, host, trace = late_pair()
    second.also_reads.append(first.buffer_type())
    sched = scheduler(first, second, host)
    x = input_leaf(4, name="x")
    a = build.mul(x, weight(first, 4, name="w0")).named("a")
    b = build.mul(build.add(a, x).named("b"), weight(second, 4, name="w1")).named("c")
    sched.set_tensor_backend(b.src[0] or b, sched.backends[1])
    graph = place(sched, b)
    assert names(sched) == [("CUDA0", ["x"]), ("CUDA1", ["x"])]
    sched.graph_compute_async(graph)
    assert trace == ["CUDA0 run a", "CUDA0 wait", "CUDA1 run b c", "CUDA1 wait"]


def test_weights_that_are_read_in_place_need_no_wait() -> None:
    """Nobody writes them."""
    first, second, host, trace = late_pair(peer_copies=True)
    second.also_reads.append(first.buffer_type())
    sched = scheduler(first, second, host)
    a = build.mul(input_leaf(4, name="x"), weight(host, 4, name="c")).named("a")
    b = build.mul(a, weight(first, 4, name="w")).named("b")
    sched.set_tensor_backend(b, sched.backends[1])
    graph = place(sched, b)
    assert names(sched) == [("CPU", []), ("CUDA1", ["a"])]
    sched.graph_compute_async(graph)
    assert trace == ["CPU run a", "CUDA1 run b"]


def test_split_without_inputs_waits_for_the_previous_device() -> None:
    first, second, host, trace = late_pair()
    sched = scheduler(first, second, host)
    state = new_tensor(F32, 4, name="state")
    alloc_tensors([state], second.buffer_type())
    a = build.scale(build.mul(input_leaf(4, name="x"), weight(first, 4, name="w")), 2.0)
    b = build.scale(state, 2.0).named("b")
    sched.set_tensor_backend(b, sched.backends[1])
    graph = place(sched, a.named("a"), b)
    assert names(sched) == [("CUDA0", ["x"]), ("CUDA1", [])]
    sched.graph_compute_async(graph)
    assert trace[-2:] == ["CUDA0 wait", "CUDA1 run b"]


def test_failing_backend_ends_the_run() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    a = build.mul(input_leaf(4, name="x"), weight(gpu, 4, name="w"))
    graph = place(sched, build.mul(a, weight(host, 4, name="c")))
    first, last = sched.backends
    assert isinstance(first, FakeBackend) and isinstance(last, FakeBackend)
    first.status = Status.ABORTED
    assert sched.graph_compute(graph) == Status.ABORTED
    assert last.graphs == []
    sched.eval_callback = lambda node, ask: True
    assert sched.graph_compute(graph) == Status.ABORTED


def callback_graph(sched: Scheduler) -> Graph:
    """w -> a -> b -> c -> d on one device, x an input of 1."""
    t = input_leaf(4, name="x")
    x = t
    for name in "abcd":
        t = build.scale(t, 2.0).named(name)
    graph = place(sched, t)
    write(x, np.ones(4))
    return graph


@pytest.mark.parametrize("late", [False, True])
def test_callback_sees_wanted_nodes_when_they_are_computed(late: bool) -> None:
    host = cpu(is_late=late)
    sched = scheduler(host)
    graph = callback_graph(sched)
    asked: list[str] = []
    seen: dict[str, float] = {}

    def callback(node: Tensor, ask: bool) -> bool:
        if ask:
            asked.append(node.name)
            return node.name in "bd"
        seen[node.name] = read(node).ravel()[0]
        return True

    sched.eval_callback = callback
    assert sched.graph_compute(graph) == Status.SUCCESS
    assert asked == list("abcd") and seen == {"b": 4, "d": 16}
    assert [t for t in host.trace if "run" in t] == ["CPU run a b", "CPU run c d"]


def test_callback_can_stop() -> None:
    host = cpu()
    sched = scheduler(host)
    graph = callback_graph(sched)
    sched.eval_callback = lambda node, ask: ask and node.name == "b"
    assert sched.graph_compute(graph) == Status.SUCCESS
    assert host.trace == ["CPU run a b"]


# ---------------------------------------------------------------- several evaluations in flight
def test_parallel_evaluations_have_their_own_inputs() -> None:
    first, _, host, _ = late_pair(has_events=True)
    sched = scheduler(first, host, parallel=True)
    w = weight(first, 4, name="w")
    inputs, results = [], []
    for i in range(6):
        sched.reset()
        x, y, graph = parallel_graph(first, w)
        sched.alloc_graph(graph)
        write(x, np.full(4, i + 1))
        sched.graph_compute_async(graph)
        out = bytearray(16)
        backend = sched.get_tensor_backend(y)
        assert backend is not None
        backend.get_async(y, memoryview(out))
        inputs.append((x.data, y.src[0] and y.src[0].src[0]))
        results.append(out)
    assert [x for x, _ in inputs[:2]] == [x for x, _ in inputs[4:]]
    assert len({x for x, _ in inputs}) == 4
    assert [c.name for _, c in inputs if c] == [f"CUDA0#x#{i}" for i in (0, 1, 2, 3, 0, 1)]
    sched.synchronize()
    for i, out in enumerate(results):
        expected = read(w).ravel() * np.float32(2 * (i + 1))
        np.testing.assert_allclose(np.frombuffer(out, np.float32), expected)


def test_parallel_evaluations_have_their_own_copies() -> None:
    first, _, host, _ = late_pair(has_events=True)
    sched = scheduler(first, host, parallel=True)
    c, w = weight(host, 4, name="c"), weight(first, 4, name="w")
    results = []
    for i in range(6):
        sched.reset()
        x = input_leaf(4, name="x")
        y = build.mul(build.mul(x, c).named("a"), w)  # a crosses, and the user does not write it
        graph = place(sched, y)
        write(x, np.full(4, i + 1))
        sched.graph_compute_async(graph)
        results.append(bytearray(16))
        sched.backends[0].get_async(y, memoryview(results[-1]))
    sched.synchronize()
    for i, out in enumerate(results):
        expected = (np.float32(i + 1) * read(c) * read(w)).ravel()
        np.testing.assert_array_equal(np.frombuffer(out, np.float32), expected)


def test_copies_wait_for_earlier_evaluations_of_their_target() -> None:
    """The second device gets no inputs of the graph, for which the host would wait."""
    first, second, host, _ = late_pair(has_events=True, peer_copies=True)
    sched = scheduler(first, second, host, parallel=True)
    w0, w1 = weight(first, 4, name="w0"), weight(second, 4, name="w1", seed=1)
    results = []
    for i in range(6):
        sched.reset()
        x = input_leaf(4, name="x")
        y = build.mul(build.mul(x, w0), w1)
        graph = place(sched, y)
        write(x, np.full(4, i + 1))
        sched.graph_compute_async(graph)
        results.append(bytearray(16))
        sched.backends[1].get_async(y, memoryview(results[-1]))
        sched.backends[0].synchronize()  # the first device is far ahead of the second
    sched.synchronize()
    for i, out in enumerate(results):
        expected = (np.float32(i + 1) * read(w0) * read(w1)).ravel()
        np.testing.assert_array_equal(np.frombuffer(out, np.float32), expected)


def test_parallel_copies_include_inputs_that_nobody_reads() -> None:
    gpu, host = FakeDevice("CUDA0", has_events=True), cpu()
    sched = scheduler(gpu, host, parallel=True)
    x, y, graph = parallel_graph(gpu, weight(gpu, 4, name="w"))
    sched.alloc_graph(graph)
    leafs = [t.name for t in sched.layout.graph.leafs]
    assert leafs == [
        *("x", "CPU#x#1", "CPU#x#2", "CPU#x#3"),
        *("unused", "CPU#unused#1", "CPU#unused#2", "CPU#unused#3"),
        *(f"CUDA0#x#{i}" for i in range(4)),
        *("x", "w", "unused"),
    ]
    assert sched.layout.leaf_ids == [1] * 8 + [0] * 4 + [1, 0, 1]


def test_waiting_for_an_allocated_graph_keeps_the_turns_of_copies() -> None:
    gpu, host = FakeDevice("CUDA0", has_events=True), cpu()
    sched = scheduler(gpu, host, parallel=True)
    w = weight(gpu, 4, name="w")
    used = []
    for _ in range(5):
        sched.reset()
        x, _, graph = parallel_graph(gpu, w)
        sched.alloc_graph(graph)
        sched.synchronize()
        used.append(x.data)
    assert len(set(used)) == 4 and used[4] == used[0]


def test_token_by_token_always_uses_the_first_copy() -> None:
    gpu, host = FakeDevice("CUDA0", has_events=True), cpu()
    sched = scheduler(gpu, host, parallel=True)
    w = weight(gpu, 4, name="w")
    used = []
    for _ in range(3):
        sched.reset()
        sched.synchronize()
        x, y, graph = parallel_graph(gpu, w)
        sched.alloc_graph(graph)
        write(x, np.ones(4))
        sched.graph_compute(graph)
        used.append(x.data)
    assert len(set(used)) == 1


# ---------------------------------------------------------------- public reports
def test_many_inputs_of_one_split() -> None:
    """More than the 30 for which ggml makes room at first."""
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    inputs = [input_leaf(4, name=f"x{i}") for i in range(40)]
    total = build.mul(inputs[0], weight(gpu, 4, name="w"))
    for x in inputs[1:]:
        total = build.add(total, x)
    graph = place(sched, total)
    assert names(sched) == [("CUDA0", [x.name for x in inputs])]
    for i, x in enumerate(inputs):
        write(x, np.full(4, i))
    sched.graph_compute(graph)
    np.testing.assert_array_equal(read(total).ravel(), [sum(range(1, 40))] * 4)


@pytest.mark.parametrize("late", [False, True])
def test_a_mixed_graph_runs_again_with_new_inputs(late: bool) -> None:
    gpu, host = FakeDevice("CUDA0", is_late=late), cpu(is_late=late)
    sched = scheduler(gpu, host)
    x, w, c = input_leaf(4, name="x"), weight(gpu, 4, name="w"), weight(host, 4, name="c", seed=1)
    y = build.add(build.mul(build.mul(x, w), c), x)
    graph = place(sched, y)
    for i in range(3):
        write(x, np.full(4, i))
        assert sched.graph_compute(graph) == Status.SUCCESS
        np.testing.assert_array_equal(read(y), np.float32(i) * read(w) * read(c) + i)


def test_graph_without_elements_runs() -> None:
    gpu, host = FakeDevice("CUDA0", is_late=True), cpu()
    sched = scheduler(gpu, host)
    x, w, c = input_leaf(4, 0, name="x"), weight(gpu, 4, name="w"), weight(host, 4, name="c")
    y = build.mul(build.mul(x, w), c)
    view = build.scale(build.permute(build.view(y, (2, 0), (16,)), 1, 0, 2, 3), 2.0)
    sched.reserve(build_graph([build.mul(build.mul(input_leaf(4, 0, name="x"), w), c)]))
    graph = place(sched, y, view)
    assert sched.graph_compute(graph) == Status.SUCCESS
    assert y.data is not None and view.data is not None  # of no bytes
