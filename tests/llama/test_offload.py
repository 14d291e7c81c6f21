"""Experts in host memory beside a simulated card: what is copied, and that results stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import read, write
from numpy.typing import NDArray
from placements import simulation, write_model
from sched_graphs import input_leaf, place, weight
from tiny import write_tiny

from pyggml import build
from pyggml.backend import Status
from pyggml.backends.cuda.device import CudaDevice
from pyggml.llama import load
from pyggml.llama.batch import Batch
from pyggml.llama.placement_rules import Rule
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor

EXPERTS_ON_HOST = {"n_gpu_layers": 99, "rules": (Rule("exps", "CPU"),)}
N_EXPERT_BYTES = 128 * 96 * 4  # of one expert's matrix; there are 12, and 3 matrices
FIXED = {"n_ctx": 256, "n_threads": 1, "warmup": False, "fit": False, "flash_attn": "off"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("offload") / "m.gguf", "qwen3moe", "F32")


def ids(n: int) -> list[int]:
    return np.random.default_rng(n).integers(3, 200, n).tolist()


def some_of(tokens: Sequence[int], pos: int, wanted: Sequence[int]) -> Batch:
    """A batch with the logits of the wanted tokens."""
    batch = Batch.of(tokens, pos, logits="none")
    batch.wants_logits[list(wanted)] = True
    return batch


def run(
    path: Path, batches: Sequence[Batch], cards: tuple[str, ...] = ("rtx3060",), **params: Any
) -> tuple[NDArray[np.float32], int]:
    """Logits of all batches, and the bytes that went to the cards for them."""
    sim = simulation(cards)
    with load(path, devices=sim.devices, **{**FIXED, **params}) as llama:
        context = llama.context()
        before = sum(card.counters.h2d_bytes for card in sim.driver.cards)
        rows = []
        for batch in batches:
            context.decode(batch)
            rows.append(context.all_logits())
        after = sum(card.counters.h2d_bytes for card in sim.driver.cards)
    return np.concatenate(rows), after - before


# ---------------------------------------------------------------- from how many tokens on
@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("least", [None, 8, 1 << 40])
@pytest.mark.parametrize("op_offload", [True, False])
def test_experts_are_copied_from_a_number_of_tokens_on(
    path: Path, n: int, least: int | None, op_offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if least:
        monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", str(least))
    batch = [Batch.of(ids(n), 0, logits="all")]
    logits, n_bytes = run(path, batch, **EXPERTS_ON_HOST, op_offload=op_offload)
    is_offloaded = op_offload and n >= (least or 32)
    assert (n_bytes > 12 * N_EXPERT_BYTES) == is_offloaded
    assert is_offloaded or n_bytes < 4 * N_EXPERT_BYTES  # inputs and activations
    expected, none = run(path, batch, n_gpu_layers=0, op_offload=False)
    np.testing.assert_array_equal(logits, expected)
    assert none == 0


def test_one_token_repeated_copies_its_experts_only(path: Path) -> None:
    """A few of 12, each once per matrix and layer."""
    same, n_bytes = run(path, [Batch.of([7] * 32, 0)], **EXPERTS_ON_HOST)
    many, more_bytes = run(path, [Batch.of(ids(32), 0)], **EXPERTS_ON_HOST)
    assert n_bytes < more_bytes


# ---------------------------------------------------------------- prompts of several ubatches
@pytest.mark.parametrize("model", ["qwen3moe", "deepseek2-v3", "qwen35moe"])
@pytest.mark.parametrize("op_offload", [True, False])
def test_long_prompts_without_outputs_but_the_last(
    tmp_path: Path, model: str, op_offload: bool
) -> None:
    """The last layer's experts then have no tokens at all in most ubatches."""
    path = write_model(tmp_path / "m.gguf", model, "Q8_0")
    batches = [Batch.of(ids(150), 0), Batch.of(ids(1), 150), some_of(ids(34), 151, [0, 33])]
    sizes = {"n_ubatch": 40}
    logits, _ = run(path, batches, **EXPERTS_ON_HOST, **sizes, op_offload=op_offload)
    expected, _ = run(path, batches, n_gpu_layers=0, op_offload=False, **sizes)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(logits, expected)


def test_logits_of_some_tokens(path: Path) -> None:
    tokens = ids(10)
    every, _ = run(path, [Batch.of(tokens, 0, logits="all")], **EXPERTS_ON_HOST)
    for wanted in ([9], [0, 4, 9], [4, 0]):
        some, _ = run(path, [some_of(tokens, 0, wanted)], **EXPERTS_ON_HOST)
        np.testing.assert_array_equal(some, every[sorted(wanted)])


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("n_gpu", [0, 1])
def test_scores_that_are_not_numbers_choose_experts_that_exist(broken: bool, n_gpu: int) -> None:
    """And disturb no other token."""
    sim = simulation(("rtx3060",) * n_gpu)
    sched = Scheduler([device.init_backend() for device in sim.devices])
    scores, x = input_leaf(12, 40, name="scores"), input_leaf(32, 1, 40, name="x")
    ids = build.argsort_top_k(scores, 2).named("ids").as_output()
    experts = weight(sim.cpu, 32, 16, 12, name="experts")
    y = build.mul_mat_id(experts, x, ids)
    graph = place(sched, y)
    random = np.random.default_rng(0)
    values = random.standard_normal((40, 12)).astype(np.float32)
    rows = random.standard_normal((40, 1, 32)).astype(np.float32)
    values[7, :5] = values[8] = np.nan if broken else 0
    write(scores, values)
    write(x, rows)
    assert sched.graph_compute(graph) == Status.SUCCESS
    table = read(ids.view_src or ids).reshape(40, 12)[:, :2]
    assert table.min() >= 0 and table.max() < 12 and (table[:, 0] != table[:, 1]).all()
    others = np.delete(np.arange(40), [7, 8])
    expected = read(experts)[0][table[others]] @ rows[others, 0, :, None][:, None]
    np.testing.assert_allclose(read(y)[0][others], expected[..., 0], rtol=1e-4, atol=1e-4)
    best = np.argsort(-values[others], axis=1)[:, :2]
    np.testing.assert_array_equal(table[others], best)


# ---------------------------------------------------------------- odd placements
@pytest.mark.parametrize("refused", [Op.SET_ROWS, Op.ARGSORT, Op.ROPE, Op.MUL_MAT_ID])
def test_operations_that_a_card_cannot_do(
    path: Path, refused: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the card has the memory that is written, as that of keys and values."""
    batches = [Batch.of(ids(40), 0, logits="all"), Batch.of(ids(1), 40)]
    expected, _ = run(path, batches, n_gpu_layers=0, op_offload=False)
    supports: Callable[[CudaDevice, Tensor], bool] = CudaDevice.supports_op
    monkeypatch.setattr(
        CudaDevice, "supports_op", lambda self, node: node.op != refused and supports(self, node)
    )
    for cards in (("rtx3060",), ("rtx3060", "a100")):
        logits, _ = run(path, batches, cards, n_gpu_layers=99)
        np.testing.assert_array_equal(logits, expected)


def test_every_second_small_tensor_on_the_host(path: Path) -> None:
    batch = [Batch.of(ids(40), 0, logits="all")]
    rules = (Rule(r"(attn_norm|q_norm|ffn_gate_inp)", "CPU"),)
    logits, _ = run(path, batch, n_gpu_layers=99, rules=rules)
    expected, _ = run(path, batch, n_gpu_layers=0, op_offload=False)
    np.testing.assert_array_equal(logits, expected)


TWO = ("rtx3060", "a100")


@pytest.mark.parametrize(
    ("n_splits", "cards", "params"),
    [
        (1, TWO[:1], {"n_gpu_layers": 0}),  # all on the host
        (2, TWO[:1], {"n_gpu_layers": 1}),  # the layers there, the output on the card
        (2, TWO[:1], {"n_gpu_layers": 2}),
        (2, TWO[:1], {"n_gpu_layers": 99}),  # the embedding on the host
        (3, TWO, {"n_gpu_layers": 99}),
        (2 * 2 + 2, TWO[:1], EXPERTS_ON_HOST),  # there and back in both layers
        (2 * 2 + 2, TWO[:1], {"n_gpu_layers": 99, "kv_offload": False}),  # attention on the host
    ],
)
def test_numbers_of_splits_for_one_token(
    path: Path, n_splits: int, cards: tuple[str, ...], params: dict[str, Any]
) -> None:
    """Embedding, layers and output of a model of two layers, by hand."""
    sim = simulation(cards)
    with load(path, devices=sim.devices, **{**FIXED, **params}) as llama:
        assert llama.model.hparams.n_layer == 2
        assert llama.context().graph_sizes[1].splits == n_splits


def test_very_many_splits(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "n_ff": 48}
    path = write_tiny(tmp_path / "m.gguf", "llama", n_layer=200, **sizes)
    sim = simulation(("rtx3060",))
    rules = (Rule("attn_q|ffn_norm|ffn_up", "CPU"),)
    batch = Batch.of(ids(5), 0, logits="all")
    with load(path, devices=sim.devices, n_gpu_layers=999, rules=rules, **FIXED) as llama:
        context = llama.context()
        context.decode(batch)
        logits = context.all_logits()
        # embedding; per layer: queries and what precedes them, attention, norm and up, the rest
        assert context.sched.n_splits > 4 * 200
    expected, _ = run(path, [batch], n_gpu_layers=0)
    np.testing.assert_array_equal(logits, expected)


# ---------------------------------------------------------------- the text of the scheduler
@pytest.mark.parametrize("level", ["0", "1", "2", "garbage"])
def test_debug_text_tells_the_placement_and_changes_nothing(
    path: Path, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = [Batch.of(ids(3), 0)]
    expected, _ = run(path, batch, n_gpu_layers=0)
    monkeypatch.setenv("GGML_SCHED_DEBUG", level)
    capsys.readouterr()
    logits, _ = run(path, batch, **EXPERTS_ON_HOST)
    text = capsys.readouterr().err
    np.testing.assert_array_equal(logits, expected)
    assert ("## SPLIT #1: CUDA0 # " in text) == (level in "12")
    lines = [line for line in text.splitlines() if "(MUL_MAT_ID)" in line]
    assert bool(lines) == (level == "2")
    of_three = lines[-3:]  # the last graph's last layer: on the host with its experts
    assert all("[  CPU   1.wgt0]" in line for line in of_three)
