"""Plans and the thread pool."""

import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from cpu_products import F32, Products, random_columns
from hypothesis import given
from hypothesis import strategies as st

from pyggml import build
from pyggml.backend import Status, alloc_tensors, tensor_get, tensor_set
from pyggml.backends.cpu import state as s
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.lowering import Step, Work
from pyggml.backends.cpu.memory import aligned_words
from pyggml.backends.cpu.node import WORDS
from pyggml.backends.cpu.plan import Plan, _place
from pyggml.backends.cpu.pool import PLANS_HELD, Pool
from pyggml.graph import build_graph, next_uid
from pyggml.tensor import new_tensor


@pytest.fixture(scope="module")
def device():
    return CpuDevice()


class Chain:
    """Products of small matrices, each of the one before."""

    def __init__(self, device, length=12, n=3) -> None:
        x = new_tensor(F32, 24, n)
        weights = [new_tensor(F32, 24, 24) for _ in range(length)]
        result = x
        for w in weights:
            result = build.mul_mat(w, result)
        self.result = result
        self.graph = build_graph([result])
        self.graph.uid = next_uid()
        self.memory = alloc_tensors([*self.graph.leafs, *self.graph.nodes], device.buffer_type())
        for i, t in enumerate([x, *weights]):
            values = random_columns(t.ne[1], 24, i) / 5
            tensor_set(t, memoryview(values).cast("B"))

    def read(self) -> bytes:
        out = bytearray(self.result.nbytes)
        tensor_get(self.result, memoryview(out))
        return bytes(out)

    def spoil(self) -> None:
        tensor_set(self.result, memoryview(bytes(self.result.nbytes)))


# ---------------------------------------------------------------- pool
def test_many_small_graphs_on_changing_threads(device) -> None:
    backend = CpuBackend(device, 4)
    chains = [Chain(device, length=i) for i in (1, 5, 17)]
    wanted = []
    for chain in chains:
        backend.set_n_threads(1)
        backend.graph_compute(chain.graph)
        wanted.append(chain.read())
    for i in range(300):
        backend.set_n_threads(1 + i % 4)
        chain = chains[i % 3]
        chain.spoil()
        assert backend.graph_compute(chain.graph) == Status.SUCCESS
        assert chain.read() == wanted[i % 3], i
        if i % 60 == 59:
            time.sleep(0.02)  # let the workers go to sleep
    backend.close()


def asleep(pool) -> list[bool]:
    words = pool._state
    records = [s.WORKERS + t * s.WORKER_BYTES for t in range(1, pool.n_threads)]
    return [bool(words[(r + s.ASLEEP) // 8]) for r in records]


def test_workers_sleep_and_wake(device) -> None:
    pool = Pool(3, device.library, spins=100)
    empty = aligned_words(WORDS)
    chain = Chain(device)
    plan = Plan(chain.graph, device.library, 3)
    plan.run(pool, 1)
    want = chain.read()
    for _ in range(20):
        deadline = time.monotonic() + 10
        pool.run(empty, 3)
        while not all(asleep(pool)):
            assert time.monotonic() < deadline, "a worker does not sleep"
            time.sleep(0.001)
        chain.spoil()
        plan.run(pool, 3)
        assert chain.read() == want
    pool.close()
    assert not any(t.is_alive() for t in pool._threads)


def test_fewer_threads_leave_the_others_asleep(device) -> None:
    pool = Pool(4, device.library, spins=50)
    empty = aligned_words(WORDS)
    pool.run(empty, 4)
    deadline = time.monotonic() + 10
    while not all(asleep(pool)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for _ in range(50):
        pool.run(empty, 2)
        assert asleep(pool)[1:] == [True, True]
    pool.close()


def test_a_plan_outlives_every_look_of_a_late_worker(device) -> None:
    """A worker may come to a plan when the caller has long gone on and dropped it."""
    pool = Pool(2, device.library)
    plan = aligned_words(WORDS)
    alive = weakref.ref(plan)
    pool.run(plan, 2)
    del plan
    assert alive() is not None
    for _ in range(2 * PLANS_HELD):
        pool.run(aligned_words(WORDS), 2)
    assert alive() is None
    alone = aligned_words(WORDS)
    alive = weakref.ref(alone)
    pool.run(alone, 1)
    del alone
    assert alive() is None  # no worker has heard of it
    pool.close()


EXIT = """
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cpu.memory import aligned_words
from pyggml.backends.cpu.pool import Pool
pool = Pool(3, CpuDevice().library)
pool.run(aligned_words(96), 3)
"""


def test_interpreter_ends_with_running_workers() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- plans
def test_plans_are_kept_as_long_as_their_graph(device) -> None:
    backend = CpuBackend(device, 2)
    chains = [Chain(device, length=1) for _ in range(20)]
    plans = [backend.plan(chain.graph) for chain in chains]
    assert [backend.plan(chain.graph) for chain in chains] == plans
    gone = weakref.ref(plans.pop())
    del chains[-1]
    assert gone() is None
    backend.close()


def test_a_graph_with_another_number_gets_another_plan(device) -> None:
    backend = CpuBackend(device, 2)
    chain = Chain(device, length=1)
    plan = backend.plan(chain.graph)
    backend.set_n_threads(1)
    assert backend.plan(chain.graph) is not plan
    backend.set_n_threads(2)
    assert backend.plan(chain.graph) is plan
    chain.graph.uid += 1
    assert backend.plan(chain.graph) is not plan
    chain.graph.uid = 0
    assert backend.plan(chain.graph) is not backend.plan(chain.graph)
    backend.close()


def test_only_compute_nodes_run(device) -> None:
    x = new_tensor(F32, 8, 1)
    graph = build_graph([])
    graph.expand(build.mul_mat(new_tensor(F32, 8, 8), x), compute=False)
    graph.expand(build.mul_mat(new_tensor(F32, 8, 4), x))
    memory = alloc_tensors([*graph.leafs, *graph.nodes], device.buffer_type())
    assert len(Plan(graph, device.library, 1)) == 1
    del memory


def test_describe_and_profile(device) -> None:
    backend = CpuBackend(device, 2)
    chain = Chain(device, length=2, n=5)
    text = backend.plan(chain.graph).describe()
    assert text.splitlines()[0].startswith("4 steps")
    assert "mul_mat_f32" in text and "[24,5] <- [24,24]" in text
    backend.graph_compute(chain.graph)
    want = chain.read()
    chain.spoil()
    table = backend.profile(chain.graph)
    assert chain.read() == want
    assert "2 x  MUL_MAT          mul_mat_f32" in table
    backend.close()


def test_unsupported_node_is_named(device) -> None:
    node = build.mul_mat(new_tensor(F32, 8, 8), new_tensor(build.I32, 8, 1)).named("odd")
    graph = build_graph([node])
    memory = alloc_tensors([*graph.leafs, *graph.nodes], device.buffer_type())
    with pytest.raises(NotImplementedError, match="odd"):
        Plan(graph, device.library, 1)
    del memory


def test_abort(device) -> None:
    backend = CpuBackend(device, 1)
    backend.abort = lambda: True
    assert backend.graph_compute(build_graph([])) == Status.ABORTED


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_pieces_in_use_never_overlap(pieces) -> None:
    """(bytes, first step, how many more steps use it)"""
    works = [Work(nbytes) for nbytes, _, _ in pieces]
    n_steps = max((first + more for _, first, more in pieces), default=0) + 1
    used = [
        tuple(w for w, (_, a, m) in zip(works, pieces, strict=True) if i in (a, a + m))
        for i in range(n_steps)
    ]
    places, size = _place([Step("k", 1, None, u) for u in used])
    for i, (_, a, m) in enumerate(pieces):
        start = places[works[i]]
        assert start % 64 == 0 and start + works[i].nbytes <= size
        for j, (_, b, n) in enumerate(pieces[:i]):
            if a <= b + n and b <= a + m:
                other = places[works[j]]
                apart = start + works[i].nbytes <= other or other + works[j].nbytes <= start
                assert apart, (i, j)


def test_work_memory_is_reused(device) -> None:
    small, long = (Plan(Chain(device, n, 40).graph, device.library, 2) for n in (2, 12))
    assert long.work_bytes == small.work_bytes > 0


def test_results_of_products_class() -> None:
    """The helper of these tests reads what was computed."""
    products = Products()
    eye = np.eye(8, dtype=np.float32)
    x = random_columns(3, 8)
    assert np.array_equal(products.product(eye, F32, x), x)
    products.backend.close()
