"""Where threads run: affinity, priority and waiting, as the system sees them; and memory nodes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_products import Products, random_columns, random_weights

from pyggml.backends.cpu import buffers, device, numa
from pyggml.backends.cpu import state as s
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.memory import aligned_words
from pyggml.backends.cpu.node import WORDS
from pyggml.backends.cpu.numa import Numa, find_numa, parse_list, read_nodes
from pyggml.backends.cpu.placement import Placement
from pyggml.backends.cpu.pool import SPINS, Pool
from pyggml.dtypes import GGMLType
from pyggml.threads import NICE, ThreadParams, listed, usable_cpus

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system does not place threads"
)
USABLE = usable_cpus()
FIRST, LAST = frozenset((min(USABLE),)), frozenset((max(USABLE),))
TWO_NODES = (frozenset((0, 1)), frozenset((2, 3)))


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings reach caplog, even after a tool has set up its own log."""
    logger = logging.getLogger("pyggml")
    monkeypatch.setattr(logger, "propagate", True)
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def cpu() -> CpuDevice:
    return CpuDevice()


@pytest.fixture
def pool(cpu: CpuDevice) -> Iterator[Pool]:
    pool = Pool(3, cpu.library)
    yield pool
    pool.close()


def run(pool: Pool, params: ThreadParams) -> list[str]:
    """CPUs of the workers, as the system lists them, after an empty graph."""
    pool.use(params)
    pool.run(aligned_words(WORDS), params.n_threads)
    return [allowed(t) for t in pool._threads]


def allowed(thread: threading.Thread) -> str:
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return next(
        line.split()[1] for line in text.splitlines() if line.startswith("Cpus_allowed_list")
    )


# ---------------------------------------------------------------- affinity
def test_workers_stay_on_the_mask_and_leave_it(pool: Pool) -> None:
    assert run(pool, ThreadParams(2)) == [listed(USABLE)]
    assert run(pool, ThreadParams(2, LAST)) == [listed(LAST)]
    assert run(pool, ThreadParams(3, LAST)) == [listed(LAST)] * 2  # one that starts later
    assert run(pool, ThreadParams(3)) == [listed(USABLE)] * 2


@pytest.mark.skipif(len(USABLE) < 2, reason="needs two CPUs")
def test_strict_gives_each_thread_a_cpu_in_turn(pool: Pool) -> None:
    a, b, *_ = sorted(USABLE)
    params = ThreadParams(3, frozenset((a, b)), strict=True)
    assert run(pool, params) == [str(b), str(a)]
    assert Placement().cpus(params, 0) == {a}


def test_the_caller_is_placed_while_a_graph_runs(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[list[str]] = []
    entries = pool._entries

    class Entries:
        """Looks at all threads before a graph starts, then is interrupted."""

        run_worker = entries.run_worker

        def run_plan(self, state: int, plan: int) -> int:
            inside.append([allowed(t) for t in (threading.current_thread(), *pool._threads)])
            raise KeyboardInterrupt

    pool.use(ThreadParams(3, LAST))
    monkeypatch.setattr(pool, "_entries", Entries())
    with pytest.raises(KeyboardInterrupt):
        pool.run(aligned_words(WORDS), 3)
    assert inside == [[listed(LAST)] * 3]
    assert os.sched_getaffinity(0) == USABLE


def test_threads_are_in_their_places_while_a_graph_runs(cpu: CpuDevice) -> None:
    """Another thread looks at the system's files until it has seen them all there."""
    raw, x = random_weights(GGMLType.Q4_0, 512, 1024), random_columns(32, 1024)
    products = Products(cpu)
    products.backend.set_threads(ThreadParams(3, LAST))
    products.product(raw, GGMLType.Q4_0, x, n_threads=3)
    pool = products.backend._pool
    assert pool is not None
    threads = [threading.current_thread(), *pool._threads]
    seen = threading.Event()

    def look() -> None:
        while not seen.wait(0.0005):
            if [allowed(t) for t in threads] == [listed(LAST)] * 3:
                seen.set()

    observer = threading.Thread(target=look, daemon=True)
    observer.start()
    deadline = time.monotonic() + 20
    while not seen.is_set() and time.monotonic() < deadline:
        products.product(raw, GGMLType.Q4_0, x, n_threads=3)
    assert seen.is_set()
    observer.join()
    products.backend.close()
    assert os.sched_getaffinity(0) == USABLE


def test_more_threads_than_cpus_is_said_once(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    for params in (ThreadParams(3, LAST), ThreadParams(3), ThreadParams(3, LAST)):
        run(pool, params)
    assert [r.message for r in caplog.records] == [
        f"3 threads share CPU {listed(LAST)}: fewer threads are faster"
    ]


def test_a_refusal_is_one_warning(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(os, "getpriority", lambda which, tid: 0)  # also when the tests are niced
    monkeypatch.setattr(os, "setpriority", refuse)
    run(pool, ThreadParams(3, USABLE, priority=2))
    run(pool, ThreadParams(3, FIRST, priority=3))
    said = [r.message for r in caplog.records if "share" not in r.message]
    assert len(said) == 2
    assert said[0].startswith("threads stay where they are: CPUs ")
    assert said[1].startswith("priority 2: the system refuses (Operation not permitted)")


@pytest.mark.skipif(
    hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > NICE[-1],
    reason="the tests run at a lower priority, which not everybody may raise",
)
def test_priority_is_a_nice_value_of_the_workers(pool: Pool) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    run(pool, ThreadParams(3, priority=-1))
    nice = [os.getpriority(os.PRIO_PROCESS, t.native_id or 0) for t in pool._threads]
    assert nice == [5, 5]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


# ---------------------------------------------------------------- waiting
def test_poll_says_how_long_workers_spin(pool: Pool) -> None:
    found = {}
    for poll in (0, 50, 100):
        pool.use(ThreadParams(2, poll=poll))
        found[poll] = int(pool._state[s.SPINS // 8])
    assert found == {0: 0, 50: SPINS, 100: 2 * SPINS}


def test_without_polling_idle_workers_use_no_cpu(pool: Pool) -> None:
    run(pool, ThreadParams(3, poll=0))
    flags = [(s.WORKERS + t * s.WORKER_BYTES + s.ASLEEP) // 8 for t in (1, 2)]
    deadline = time.monotonic() + 10
    while not all(pool._state[flag] for flag in flags):
        assert time.monotonic() < deadline, "a worker does not sleep"
        time.sleep(0.001)
    before = [worked(t) for t in pool._threads]
    time.sleep(0.1)
    assert [worked(t) for t in pool._threads] == before


def worked(thread: threading.Thread) -> int:
    """Nanoseconds a thread has run."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])


# ---------------------------------------------------------------- results
@pytest.mark.parametrize(
    "params",
    [
        ThreadParams(3, LAST),
        ThreadParams(2, USABLE, strict=True, poll=0),
        ThreadParams(4, poll=100, priority=-1),
    ],
)
def test_results_do_not_depend_on_threads(cpu: CpuDevice, params: ThreadParams) -> None:
    raw, x = random_weights(GGMLType.Q4_0, 64, 256), random_columns(5, 256)
    products = Products(cpu)
    want = products.product(raw, GGMLType.Q4_0, x, repack=True)
    products.backend.set_threads(params)
    found = products.product(raw, GGMLType.Q4_0, x, repack=True, n_threads=params.n_threads)
    products.backend.close()
    assert np.array_equal(found, want)


# ---------------------------------------------------------------- nodes
def fake_nodes(root: Path, *lists: str) -> Path:
    for i, text in enumerate(lists):
        (root / f"node{i}").mkdir(parents=True)
        (root / f"node{i}" / "cpulist").write_text(text + "\n")
    (root / "node_of_nothing").mkdir()
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_list(text) == cpus
    assert listed(cpus) == text


def test_nodes_are_sorted_and_have_usable_cpus(tmp_path: Path) -> None:
    lists = [f"{2 * i}-{2 * i + 1}" for i in range(11)]
    lists[1] = ""  # memory only
    nodes = read_nodes(fake_nodes(tmp_path, *lists), frozenset((0, 1, 4, 21)))
    assert nodes == ({0, 1}, {4}, {21})
    assert read_nodes(tmp_path / "missing", USABLE) == ()


def found(root: Path, mode: str, **extra: int) -> Numa | None:
    return find_numa(
        mode, root=root, balancing=root / "balancing", usable=frozenset(range(4)), **extra
    )


def test_one_node_leaves_nothing_to_choose(tmp_path: Path) -> None:
    assert found(fake_nodes(tmp_path, "0-3"), "distribute") is None
    assert found(tmp_path, "") is None


def test_threads_of_the_modes(tmp_path: Path) -> None:
    root = fake_nodes(tmp_path, "0-1", "2-3")
    spread, home, given = (
        found(root, mode, current_cpu=2) for mode in ("distribute", "isolate", "numactl")
    )
    assert spread and home and given
    near, far = TWO_NODES
    assert [Placement(spread).cpus(ThreadParams(3), i) for i in range(3)] == [near, far, near]
    strict = ThreadParams(4, frozenset((0, 1, 3)), strict=True)
    assert [Placement(spread).cpus(strict, i) for i in range(4)] == [{0}, {3}, {1}, {3}]
    assert [Placement(home).cpus(ThreadParams(2), i) for i in range(2)] == [far, far]
    assert Placement(home).cpus(ThreadParams(2, frozenset((1, 2))), 1) == {2}
    assert Placement(home).cpus(ThreadParams(2, near), 1) == near  # a mask of another node
    assert Placement(given).cpus(ThreadParams(2), 1) is None
    assert Placement(given).cpus(ThreadParams(2, near), 1) == near


@pytest.mark.parametrize(("text", "warned"), [("1\n", True), ("0\n", False)])
def test_page_migration_is_warned_of(
    tmp_path: Path, text: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "balancing").write_text(text)
    found(fake_nodes(tmp_path, "0-1", "2-3"), "distribute", current_cpu=0)
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert [m.startswith(f"{tmp_path}/balancing is on") for m in messages] == [True] * warned


def test_new_backends_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Numa("distribute", TWO_NODES, 0)
    modes: list[str] = []

    def find(mode: str) -> Numa | None:
        modes.append(mode)
        return two if mode else None

    monkeypatch.setattr(device, "find_numa", find)
    cpu = CpuDevice()
    cpu.use_numa("distribute")
    cpu.use_numa("distribute")  # is looked for, and warned of, once
    backend = CpuBackend(cpu)
    cpu.use_numa("")
    assert backend._placement.numa is two
    assert CpuBackend(cpu)._placement.numa is None
    assert modes == ["distribute", ""]


# ---------------------------------------------------------------- pages of repacked weights
def test_blocks_of_weights_are_touched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fake nodes: which thread writes which chunk, and where it may run."""
    nodes = (FIRST, LAST)
    touched: dict[int, str] = {}
    stays: dict[int, list[frozenset[int]]] = {}

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        touched[chunk] = threading.current_thread().name

    def pinned(tid: int, cpus: frozenset[int]) -> None:
        stays.setdefault(threading.get_ident(), []).append(cpus)
        threading.current_thread().name = f"on {listed(cpus)}"

    monkeypatch.setattr(buffers.ctypes, "CFUNCTYPE", lambda *types: lambda code: kernel)
    monkeypatch.setattr(os, "sched_setaffinity", pinned)
    workers = buffers._SpreadWorkers(nodes)
    workers.run(0, aligned_words(WORDS), 6)
    workers.close()
    assert touched == {i: f"on {listed(nodes[i % 2])}" for i in range(6)}
    assert threading.get_ident() not in stays


@pytest.mark.parametrize("mode", ["distribute", "isolate"])
def test_weights_are_the_same_on_several_nodes(cpu: CpuDevice, mode: str) -> None:
    raw, x = random_weights(GGMLType.Q8_0, 1024, 64), random_columns(2, 64)
    plain = Products(cpu)
    want = plain.product(raw, GGMLType.Q8_0, x, repack=True)
    plain.backend.close()
    cpu.numa = Numa(mode, (FIRST, LAST), 0)
    try:
        spread = Products(cpu)
        got = spread.product(raw, GGMLType.Q8_0, x, repack=True)
        spread.backend.close()
    finally:
        cpu.numa = None
    assert np.array_equal(got, want)
    assert os.sched_getaffinity(0) == USABLE
    assert numa.find_numa("") is None
