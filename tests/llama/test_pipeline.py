"""Several ubatches in flight on several cards: when, what it costs, and that nobody sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_shapes import write_header
from placements import CPU_RATES, simulation, write_model

from pyggml.backends.cuda.backend import CudaBackend
from pyggml.backends.cuda.simulate import Simulation
from pyggml.graph import Graph
from pyggml.llama import context as context_module
from pyggml.llama import load
from pyggml.llama.api import Llama
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_rules import Rule

TWO = ("rtx3090", "rtx3090")
GIB = 1 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("pipeline") / "m.gguf", "qwen3moe", "F32")


def llama(path: Path, cards: Sequence[str] = TWO, **params: Any) -> Llama:
    fixed = {"n_ctx": 256, "n_ubatch": 8, "n_threads": 1, "warmup": False, "fit": False}
    sim = simulation(tuple(cards))
    return load(path, devices=sim.devices, **{**fixed, "n_gpu_layers": 99, **params})


def compute_bytes(context: Context) -> int:
    return sum(map(context.sched.buffer_size, context.sched.backends))


# ---------------------------------------------------------------- when
def test_everything_on_two_cards(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llama(path) as model:
        context = model.context()
        assert context.sched.n_copies == 4
        with_copies = compute_bytes(context)
    monkeypatch.setenv("GGML_SCHED_MAX_COPIES", "1")
    with llama(path) as model:
        context = model.context()
        assert context.sched.n_copies == 1
        assert compute_bytes(context) < with_copies


@pytest.mark.parametrize(
    ("cards", "params"),
    [
        (TWO, {"rules": (Rule("exps", "CPU"),)}),
        (TWO, {"rules": (Rule("nothing", "CPU"),)}),
        (TWO, {"n_gpu_layers": 2}),
        (TWO, {"n_gpu_layers": 0}),
        (TWO, {"split_mode": "none"}),
        (TWO, {"placement": PlacementParams(devices=("CUDA1",))}),
        (TWO, {"kv_offload": False}),
        (TWO[:1], {}),
    ],
    ids=str,
)
def test_otherwise_copies_would_only_cost_memory(
    path: Path, cards: Sequence[str], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama(path, cards, **params) as model:
        context = model.context()
        assert context.sched.n_copies == 1
        size = compute_bytes(context)
    monkeypatch.setenv("GGML_SCHED_MAX_COPIES", "1")
    with llama(path, cards, **params) as model:
        assert size == compute_bytes(model.context())


def test_without_memory_for_copies_there_are_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"n_ctx": 4096, "n_ubatch": 512, "tensor_split": (1.0, 1.0)}
    card = "rtx3090:{}MiB,reserved=1MiB"
    used = {}
    for n in (1, 4):
        monkeypatch.setenv("GGML_SCHED_MAX_COPIES", str(n))
        with llama(path, [card.format(1000)] * 2, **sizes) as model:
            model.context()
            used[n] = [d.memory().total - d.memory().free for d in model.model.placement.gpus]
    most = max(range(2), key=lambda i: used[4][i] - used[1][i])
    mib = (used[1][most] + used[4][most]) // 2 >> 20
    assert used[4][most] >> 20 > mib > used[1][most] >> 20
    cards = [card.format(mib if i == most else 1000) for i in range(2)]
    with llama(path, cards, **sizes) as model:
        context = model.context()
        assert context.sched.n_copies == 1
        assert "retrying without pipeline parallelism" in caplog.text
        context.decode(Batch.of([1, 2, 3], 0))


def test_experts_of_a_huge_model_are_not_copied_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ubatches in flight the copies of 671 billion weights would take more than a terabyte."""
    path = write_header(tmp_path / "m.gguf", "deepseek-r1")

    def largest() -> tuple[int, int]:
        sim = Simulation(["h200", "h200"], execute="dry", cpu_rates=CPU_RATES)
        fixed = {"n_ctx": 4096, "n_gpu_layers": 99, "rules": (Rule("exps", "CPU"),), "fit": False}
        with load(path, devices=sim.devices, no_alloc=True, **fixed) as model:
            sched, sizes = model.context().plan_graph(512)
            return sched.n_copies, max(sizes)

    n_copies, size = largest()
    assert n_copies == 1 and size < 8 * GIB
    monkeypatch.setattr(context_module, "is_pipeline_parallel", lambda placement, params: True)
    n_copies, size = largest()
    assert n_copies == 4 and size > 1000 * GIB


def test_the_host_waits_less(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {}
    for n in (1, 4):
        monkeypatch.setenv("GGML_SCHED_MAX_COPIES", str(n))
        sim = simulation(TWO)
        sizes = {"n_ctx": 1024, "n_ubatch": 128, "fit": False, "warmup": False}
        with load(path, devices=sim.devices, n_gpu_layers=99, **sizes) as model:
            context, start = model.context(), sim.clock.now
            context.decode(Batch.of(prompt(model, 1000), 0))
            spent[n] = sim.clock.now - start
    assert spent[4] < spent[1]


# ---------------------------------------------------------------- nobody sees it
def prompt(model: Llama, n: int) -> list[int]:
    return np.random.default_rng(n).integers(3, model.model.hparams.n_vocab, n).tolist()


@pytest.mark.parametrize("cards", [TWO, ("a100", "a100", "a100")])
@pytest.mark.parametrize("outputs", ["all", "last"])
def test_same_logits_with_ubatches_in_flight(
    path: Path, cards: Sequence[str], outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for n in (4, 1):
        monkeypatch.setenv("GGML_SCHED_MAX_COPIES", str(n))
        with llama(path, cards) as model:
            context, ids = model.context(), prompt(model, 100)
            for start in (0, 70):  # 9 ubatches, the last of 6; then 4
                stop = min(start + 70, 100)
                context.decode(Batch.of(ids[start:stop], start, logits=outputs))
                results.append(context.all_logits().copy())
            for i in range(3):
                context.decode(Batch.of(ids[i : i + 1], 100 + i))
                results.append(context.all_logits().copy())
    half = len(results) // 2
    for ours, expected in zip(results[:half], results[half:], strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(ours, expected)


def test_a_failure_in_flight_takes_back_the_batch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama(path) as model:
        context, ids = model.context(), prompt(model, 64)
        context.decode(Batch.of(ids[:8], 0))
        expected_at_8 = context.memory.pos_max(0)
        calls = 0
        compute = CudaBackend.graph_compute

        def fail(self: CudaBackend, graph: Graph) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:  # the third ubatch on the first card
                raise RuntimeError("broken")
            return compute(self, graph)

        with monkeypatch.context() as patch:
            patch.setattr(CudaBackend, "graph_compute", fail)
            with pytest.raises(RuntimeError, match="broken"):
                context.decode(Batch.of(ids[8:], 8))
        assert context.memory.pos_max(0) == expected_at_8 == 7
        context.decode(Batch.of(ids[8:], 8, logits="all"))
        again = context.all_logits().copy()
        fresh = model.context()
        fresh.decode(Batch.of(ids, 0, logits="all"))
        np.testing.assert_array_equal(again, fresh.all_logits()[8:])
