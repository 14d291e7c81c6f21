"""Nodes that write into memory: copies of it are renewed, and made where nobody can write."""

import logging

import numpy as np
import pytest
from fakes import FakeDevice, cpu, read, write
from memory_check import check_no_overlap
from sched_graphs import (
    I32,
    backend_name,
    cache_graph,
    cache_on,
    input_leaf,
    names,
    place,
    scheduler,
    weight,
)

from pyggml import build
from pyggml.backend import alloc_tensors
from pyggml.errors import UserError
from pyggml.graph import Graph
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.tensor import new_tensor

WRITES = {Op.CPY, Op.SET_ROWS}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_rows_reach_a_cache_where_nobody_can_write(late: bool, parallel: bool) -> None:
    gpu = FakeDevice("CUDA0", refused=WRITES, is_late=late, has_events=late)
    host = cpu(is_late=late)
    w, cache = weight(gpu, 4, name="w"), cache_on(gpu, 4, 8)
    expected = np.ones((8, 4), np.float32)
    sched = scheduler(gpu, host, parallel=parallel)
    for row in (3, 5, 3):
        sched.reset()
        graph, x, ids, result = cache_graph(gpu, w, cache)
        sched.alloc_graph(graph)
        check_no_overlap(sched.layout.graph)
        assert names(sched) == [
            ("CUDA0", ["x"]),
            ("CPU", ["cache", "node_0"]),
            ("CPU", ["cache (view)"]),
        ]
        write(x, np.full((1, 4), row))
        write(ids, [row])
        sched.graph_compute(graph)
        expected[row] = row * read(w).ravel()
        np.testing.assert_array_equal(read(cache)[0, 0], expected)
        np.testing.assert_allclose(read(result)[0, 0, 0], expected @ expected[row], rtol=1e-6)


def test_the_same_graph_writes_again() -> None:
    gpu, host = FakeDevice("CUDA0", refused=WRITES), cpu()
    w, cache = weight(gpu, 4, name="w"), cache_on(gpu, 4, 8)
    sched = scheduler(gpu, host)
    graph, x, ids, _ = cache_graph(gpu, w, cache)
    sched.alloc_graph(graph)
    for row in (1, 2):
        write(x, np.full((1, 4), 2))
        write(ids, [row])
        sched.graph_compute(graph)
    np.testing.assert_array_equal(read(cache)[0, 0, 1:3], np.tile(2 * read(w).ravel(), (2, 1)))


def test_work_away_from_memory_has_a_cause_and_one_note(caplog: pytest.LogCaptureFixture) -> None:
    gpu, host = FakeDevice("CUDA0", refused=WRITES), cpu()
    sched = scheduler(gpu, host)
    w, caches = weight(gpu, 4, name="w"), [cache_on(gpu, 4, 8) for _ in range(2)]
    with caplog.at_level(logging.DEBUG, "pyggml.sched"):
        for cache in caches:
            sched.reset()
            graph, *_ = cache_graph(gpu, w, cache)
            sched.alloc_graph(graph)
    stored = graph.find("stored")
    assert stored is not None
    assert (backend_name(sched, stored), sched.cause(stored)) == ("CPU", "1.back")
    (note,) = (r.getMessage() for r in caplog.records)
    assert "<stored: SET_ROWS" in note and "CUDA0 buffer" in note and "CPU does" in note


@pytest.mark.parametrize("reads_host", [False, True])
def test_results_of_writing_away_are_where_they_belong(reads_host: bool) -> None:
    """Whoever reads them later reads the memory itself, with what others have written since."""
    host = cpu()
    gpu = FakeDevice("CUDA0", refused={Op.CPY})
    gpu.also_reads += [host.buffer_type()] * reads_host
    cache, w, c = cache_on(gpu, 4), weight(gpu, 4, name="w"), weight(host, 4, name="c", seed=1)
    x = [input_leaf(4, name=f"x{i}") for i in range(2)]
    first = build.cpy(x[0], cache).named("first").as_output()
    graph = Graph()
    graph.expand(first)
    once = [build.mul(w, first).as_output(), build.mul(c, first).as_output()]
    for node in once:
        graph.expand(node)
    graph.expand(build.cpy(x[1], cache))
    twice = [build.mul(w, first).as_output(), build.mul(c, first).as_output()]
    for node in twice:
        graph.expand(node)
    sched = scheduler(gpu, host)
    sched.alloc_graph(graph)
    check_no_overlap(sched.layout.graph)
    assert first.data == cache.data and backend_name(sched, first) == "CUDA0"
    for i, t in enumerate(x):
        write(t, np.full(4, 3 + i))
    sched.graph_compute(graph)
    for nodes, value in ((once, 3), (twice, 4)):
        for node, factor in zip(nodes, (w, c), strict=True):
            np.testing.assert_array_equal(read(node), read(factor) * value)
    np.testing.assert_array_equal(read(first).ravel(), [4] * 4)


def test_memory_of_a_copy_is_free_when_it_is_copied_back() -> None:
    gpu, host = FakeDevice("CUDA0", refused=WRITES), cpu()
    x, ids = input_leaf(4, 1, name="x"), new_tensor(I32, 1, name="ids").as_input()
    sizes = []
    for n in (1, 4):
        graph = Graph()
        for _ in range(n):
            graph.expand(build.set_rows(cache_on(gpu, 4, 64), x, ids))
        sched = scheduler(gpu, host)
        sched.alloc_graph(graph)
        check_no_overlap(sched.layout.graph)
        sizes.append(sched.buffer_size(sched.backends[1]))
    assert sizes[1] < 2 * sizes[0]


def test_several_writes_to_one_cache_end_a_split_each() -> None:
    """Each has a fresh copy: the GPU writes to the same memory between them."""
    gpu, host = FakeDevice("CUDA0", refused={Op.SET_ROWS}), cpu()
    cache, w = cache_on(gpu, 4, 8), weight(gpu, 4, 2, name="w")
    x = input_leaf(4, 1, name="x")
    ids = [new_tensor(I32, 1, name=f"ids{i}").as_input() for i in range(3)]
    graph = Graph()
    graph.expand(build.set_rows(cache, x, ids[0]))
    last_rows = build.view(cache, (4, 2), (16,), 6 * 16)
    graph.expand(build.cpy(w, last_rows))
    for table in ids[1:]:
        graph.expand(build.set_rows(cache, x, table))
    sched = scheduler(gpu, host)
    sched.alloc_graph(graph)
    check_no_overlap(sched.layout.graph)
    # nobody shares a split with a write, and no copy serves two of them
    assert names(sched) == [
        ("CPU", ["cache"]),
        ("CUDA0", []),
        ("CPU", ["cache"]),
        ("CPU", ["cache"]),
    ]
    write(x, np.full((1, 4), 9))
    for i, table in enumerate(ids):
        write(table, [i])
    sched.graph_compute(graph)
    expected = np.ones((8, 4), np.float32)
    expected[:3] = 9
    expected[6:] = read(w)[0, 0]
    np.testing.assert_array_equal(read(cache)[0, 0], expected)


def test_write_to_computed_memory_of_another_device() -> None:
    gpu, host = FakeDevice("CUDA0", refused={Op.CPY}), cpu()
    sched = scheduler(gpu, host)
    a = build.mul(input_leaf(8, name="x"), weight(gpu, 8, name="w")).named("a")
    graph = Graph()
    written = build.cpy(input_leaf(4, name="y"), build.view(a, (4,), offset=16)).named("c")
    graph.expand(written.as_output())
    result = build.scale(a, 1.0).as_output()
    graph.expand(result)
    sched.alloc_graph(graph)
    check_no_overlap(sched.layout.graph)
    copied = graph.find("c")
    assert copied is not None and backend_name(sched, copied) == "CPU"
    x, w, y = (graph.find(name) for name in "xwy")
    assert x is not None and w is not None and y is not None
    write(x, np.ones(8))
    write(y, np.full(4, 7))
    sched.graph_compute(graph)
    expected = read(w).ravel()
    expected[4:] = 7
    assert a.data is not None and written.data == a.data + 16  # there, not in the copy
    np.testing.assert_array_equal(read(result).ravel(), expected)


@pytest.mark.parametrize("late", [False, True])
def test_copies_of_memory_are_renewed_when_it_is_written(late: bool) -> None:
    """The host reads the cache of a GPU before and after the GPU writes there."""
    gpu, host = FakeDevice("CUDA0", is_late=late), cpu()
    cache, c = cache_on(gpu, 4), weight(host, 4, name="c")
    before = build.mul(c, cache).named("before")
    graph = Graph()
    graph.expand(before.as_output())
    graph.expand(build.cpy(build.mul(input_leaf(4, name="x"), weight(gpu, 4, name="w")), cache))
    after = build.mul(c, cache).named("after")
    graph.expand(after.as_output())
    sched = scheduler(gpu, host)
    sched.alloc_graph(graph)
    assert names(sched) == [("CPU", ["cache"]), ("CUDA0", ["x"]), ("CPU", ["cache"])]
    x, w = graph.find("x"), graph.find("w")
    assert x is not None and w is not None
    write(x, np.full(4, 3))
    sched.graph_compute(graph)
    np.testing.assert_array_equal(read(before), read(c))
    np.testing.assert_array_equal(read(after), read(c) * 3 * read(w))


def test_memory_that_is_not_a_view_has_no_other_place() -> None:
    gpu = FakeDevice("CUDA0", refused={Op.SCALE})
    y = build.scale(input_leaf(4, name="x"), 2.0).named("y")
    alloc_tensors([y], gpu.buffer_type())
    sched = Scheduler([gpu.init_backend(), cpu().init_backend()])
    with pytest.raises(UserError, match=r"<y: SCALE.*CUDA0 buffer.*\nbackends: CUDA0, CPU"):
        place(sched, y)
