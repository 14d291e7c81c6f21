"""How pyllama-bench measures: statistics, rounds, the work, and what it is compared with."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from pyggml.backends.reference.device import RefDevice
from pyggml.errors import UserError
from pyggml.threads import usable_cpus
from pyggml.tools import bench_measure, bench_references
from pyggml.tools.bench_llama_cpp import thread_pool_params
from pyggml.tools.bench_measure import (
    Round,
    Sample,
    Summary,
    Vocabulary,
    foreign_text,
    n_disturbed,
    quiet_round,
    random_work,
    settle,
    summaries,
    timed,
)
from pyggml.tools.bench_pyggml import PyggmlSide
from pyggml.tools.bench_references import LlamaBenchSide, ServerSide, make_reference
from pyggml.tools.bench_tasks import Task


# ---------------------------------------------------------------- statistics
def test_summary_of_known_samples() -> None:
    summary = Summary((500_000_000, 1_000_000_000, 250_000_000), n_tokens=100)
    assert summary.rates == [200.0, 100.0, 400.0]
    assert summary.mean == pytest.approx(700 / 3)
    # sqrt(((200 - 700/3)^2 + (100 - 700/3)^2 + (400 - 700/3)^2) / 2)
    assert summary.deviation == pytest.approx(152.7525232)
    assert summary.median == 200.0
    assert summary.mean_ns == 583_333_333
    assert summary.deviation_ns == int(np.std(summary.samples_ns, ddof=1))


def test_one_sample_does_not_deviate() -> None:
    assert Summary((7,), 1).deviation == 0.0


def sample(foreign: float | None, ns: int = 1, wall: float = 1.0) -> Sample:
    return Sample(ns, wall, foreign)


def test_sides_are_summed_up_apart() -> None:
    rounds = [(sample(0.0, ns=10), sample(0.0, ns=20)), (sample(0.0, ns=30), sample(0.0, ns=40))]
    assert [s.samples_ns for s in summaries(rounds, 1)] == [(10, 30), (20, 40)]


def test_foreign_load_is_the_worst_and_marked() -> None:
    quiet, loud = (sample(0.01), sample(0.02)), (sample(0.0), sample(0.4))
    assert foreign_text([quiet]) == "0.02"
    assert foreign_text([quiet, loud]) == "0.40*"
    assert n_disturbed([quiet, loud, loud]) == 2
    assert foreign_text([(sample(None),)]) == "n/a"


def test_a_clock_tick_disturbs_nothing() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert not sample(tick / 0.1, wall=0.1).disturbed
    assert sample(3 * tick / 0.1, wall=0.1).disturbed


def test_a_disturbed_round_is_repeated() -> None:
    rounds = iter([(sample(0.5),), (sample(0.3),), (sample(0.01),), (sample(0.0),)])
    assert quiet_round(lambda: next(rounds), 5, wait=lambda: None) == (sample(0.01),)
    assert next(rounds) == (sample(0.0),), "a quiet round is not repeated"


def test_the_least_disturbed_round_is_kept_not_the_fastest() -> None:
    taken: list[Round] = [
        (sample(0.5, ns=1),),
        (sample(0.2, ns=9),),
        (sample(0.4, ns=2),),
        (sample(0.1, ns=3),),
    ]
    rounds = iter(taken)
    assert quiet_round(lambda: next(rounds), 3, wait=lambda: None) == taken[1]


def test_waiting_ends_when_others_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([1.0, 0.9, 0.01, 1.0])
    monkeypatch.setattr(bench_measure, "timed", lambda run: sample(next(loads)))
    bench_measure.wait_until_quiet()
    assert next(loads) == 1.0
    monkeypatch.setattr(bench_measure, "timed", lambda run: sample(1.0))
    monkeypatch.setattr(bench_measure, "QUIET_TIMEOUT", 0.05)
    bench_measure.wait_until_quiet()


def test_foreign_load_is_what_this_process_did_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own = iter([100.0, 103.0]), iter([10.0, 12.0])
    monkeypatch.setattr(bench_measure, "settle", lambda: None)
    monkeypatch.setattr(bench_measure, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(bench_measure, "own_seconds", lambda: next(own))
    found = timed(lambda: 42)
    assert found.ns == 42
    assert found.foreign == pytest.approx(1.0 / found.wall)


def test_own_seconds_count_this_process_and_its_children() -> None:
    before = bench_measure.own_seconds()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    children = bench_measure.own_seconds()
    assert children - before > 0.25
    limit = time.process_time() + 0.05
    while time.process_time() < limit:
        pass
    assert bench_measure.own_seconds() - children >= 0.05


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux counts all programs")
def test_busy_seconds_count_other_programs() -> None:
    before = bench_measure.busy_seconds()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = bench_measure.busy_seconds()
    assert before is not None and after is not None
    assert after - before > 0.2


def test_threads_that_never_rest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "IDLE_TIMEOUT", 0.1)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        with pytest.raises(UserError, match="unset OMP_WAIT_POLICY"):
            settle()
    finally:
        stop.set()
        thread.join()
    monkeypatch.undo()
    settle()


# ---------------------------------------------------------------- work
def test_work_is_random_but_the_same_for_both_sides() -> None:
    task = Task(model="m", n_threads=1, n_batch=8, n_depth=3, n_prompt=20, n_gen=4)
    work = random_work(task, Vocabulary(100, bos=1), seed=5)
    assert [len(t) for t in work.depth] == [3]
    assert [len(t) for t in work.prompt] == [8, 8, 4]
    assert len(work.gen) == 4
    tokens = np.concatenate(work.prompt)
    assert tokens[0] == work.gen[0] == work.depth[0][0] == 1
    assert len(set(tokens.tolist())) > 5 and tokens.min() >= 0 and tokens.max() < 100
    again = random_work(task, Vocabulary(100, bos=1), seed=5)
    assert np.array_equal(np.concatenate(again.prompt), tokens) and again.gen == work.gen
    other = random_work(task, Vocabulary(100, bos=None), seed=6)
    assert not np.array_equal(np.concatenate(other.prompt), tokens)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen35"])
@pytest.mark.usefixtures("reference_device")
def test_a_restored_depth_computes_the_same(tiny_models: dict[str, str], arch: str) -> None:
    """Gemma's window of 16 has moved past the depth's cells when it is restored.

    qwen35 has a state beside its cells.
    """
    task = Task(model=tiny_models[arch], n_threads=1, n_ubatch=8, n_depth=20, n_prompt=30, n_gen=2)
    side = PyggmlSide()
    side.open(task)
    work = random_work(task, side.vocabulary(), seed=0)
    found = []
    for _ in range(3):
        side.prepare(work)
        assert side.context.memory.pos_max(0) == 19
        assert side.run(work) > 0
        assert side.context.memory.pos_max(0) == 51
        found.append(side.context.logits().copy())
    side.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.usefixtures("reference_device")
def test_a_model_is_loaded_again_only_if_its_parameters_changed(
    tiny_models: dict[str, str],
) -> None:
    side, path = PyggmlSide(), tiny_models["llama"]
    loaded = []
    for n_prompt, load_mode in ((4, "auto"), (8, "auto"), (8, "none")):
        task = Task(model=path, n_threads=1, load_mode=load_mode, n_prompt=n_prompt)
        side.open(task)
        loaded.append(side.model)
    side.close()
    assert loaded[0] is loaded[1] and loaded[1] is not loaded[2]


needs_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: make bench does it"
)


@needs_llama_cpp
@pytest.mark.apart
def test_llama_cpp_does_the_same_work(
    tiny_models: dict[str, str], reference_device: RefDevice
) -> None:
    """The logits after a run at a depth, batch by batch, agree on both sides."""
    import llama_cpp

    task = Task(
        model=tiny_models["llama"],
        n_threads=1,
        n_batch=8,
        n_depth=10,
        n_prompt=20,
        n_gen=2,
        type_k="f32",
        type_v="f32",
        flash_attn="off",
    )
    mine, other = PyggmlSide(), make_reference("llama_cpp")
    for side in (mine, other):
        side.open(task)
    assert mine.vocabulary() == other.vocabulary()
    work = random_work(task, mine.vocabulary(), seed=3)
    for side in (mine, other):
        side.warm_up(work)
    for _ in range(2):
        for side in (mine, other):
            side.prepare(work)
            assert side.run(work) > 0
        pointer = llama_cpp.llama_get_logits_ith(other._context, -1)  # type: ignore[attr-defined]
        theirs = np.ctypeslib.as_array(pointer, (mine.vocabulary().n_tokens,))
        assert np.allclose(mine.context.logits(), theirs, atol=1e-4)
    for side in (mine, other):
        side.close()


# ---------------------------------------------------------------- references
def test_a_binary_runs_the_same_test(fake_llama_bench: Callable[..., str], tmp_path: Path) -> None:
    side = LlamaBenchSide(fake_llama_bench())
    task = Task(model="m.gguf", n_threads=2, n_ubatch=64, flash_attn="on", n_prompt=8, n_gen=4)
    side.open(task)
    assert side.run(random_work(task, Vocabulary(9, None), 0)) == 4_000_000
    assert side.version == "llama-bench abc (7)"
    args = json.loads((tmp_path / "args").read_text())
    assert " ".join(args) == ("-m m.gguf -t 2 -r 1 -o jsonl -p 0 -n 0 -pg 8,4 -ub 64 -fa on")


def test_a_binary_gets_the_flags_of_threads() -> None:
    task = Task(model="m", n_threads=1, n_prompt=1, poll=0, cpu_strict=1, numa="isolate")
    last = max(usable_cpus())
    command = LlamaBenchSide(sys.executable).command(replace(task, cpu_range=f"{last}-{last}"))
    assert " ".join(command).endswith(
        f" -C {hex(1 << last)} --cpu-strict 1 --poll 0 --numa isolate"
    )


@needs_llama_cpp
@pytest.mark.apart
def test_llama_cpp_runs_on_the_same_cpus(tiny_models: dict[str, str]) -> None:
    """Its threads stay there; the calling thread, which is pyggml's as well, does not."""
    usable = usable_cpus()
    last = frozenset((max(usable),))
    task = Task(model=tiny_models["llama"], n_threads=2, n_prompt=8, poll=3)
    pinned = replace(task, cpu_mask=hex(1 << max(usable)), cpu_strict=1)
    side = make_reference("llama_cpp")
    before = set(os.listdir("/proc/self/task"))
    work = random_work(task, Vocabulary(200, None), 0)
    for t, wanted in ((task, usable), (pinned, last), (task, usable)):
        side.open(t)
        assert side.run(work) > 0
        mine = set(os.listdir("/proc/self/task")) - before
        assert mine and {frozenset(os.sched_getaffinity(int(tid))) for tid in mine} == {wanted}
        assert usable_cpus() == usable
    side.close()


def test_llama_cpp_is_told_how_threads_wait() -> None:
    module = pytest.importorskip("xllamacpp.xllamacpp")
    task = Task(model="m", n_threads=3, poll=7, cpu_strict=1)
    params = thread_pool_params(ctypes.CDLL(module.__file__), task, frozenset((0, 5)))
    assert (params.n_threads, params.poll, params.strict_cpu, params.prio) == (3, 7, True, 0)
    assert [i for i, used in enumerate(params.cpumask) if used] == [0, 5]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('no such model')", "failed with 1: no such model"),
        ("print('hello')", r"failed with 0: \(it said nothing\)"),
        ("print('{}')", "no samples_ns"),
    ],
)
def test_a_binary_that_fails_is_named(
    fake_llama_bench: Callable[..., str], body: str, said: str
) -> None:
    side = LlamaBenchSide(fake_llama_bench(body))
    task = Task(model="m.gguf", n_threads=1, n_prompt=1)
    side.open(task)
    with pytest.raises(UserError, match=said):
        side.run(random_work(task, Vocabulary(9, None), 0))


def test_references_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="neither auto, llama_cpp, xllamacpp nor a file"):
        make_reference("/nowhere/llama-bench")
    monkeypatch.setattr(bench_references, "_import", lambda name: None)
    with pytest.raises(UserError, match="llama-cpp-python or xllamacpp is not installed"):
        make_reference("auto")
    with pytest.raises(UserError, match="xllamacpp is not installed"):
        make_reference("xllamacpp")


def test_xllamacpp_is_a_rough_reference(tiny_models: dict[str, str]) -> None:
    pytest.importorskip("xllamacpp")
    side = ServerSide()
    with pytest.raises(UserError, match="leave -d away"):
        side.open(Task(model=tiny_models["llama"], n_threads=1, n_prompt=4, n_depth=4))
    task = Task(model=tiny_models["llama"], n_threads=1, n_prompt=8, n_gen=3)
    side.open(task)
    assert side.run(random_work(task, Vocabulary(200, None), 0)) > 0
    side.close()
