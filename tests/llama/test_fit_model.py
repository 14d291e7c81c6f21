"""-fit on simulated cards: what it chooses is loaded, and what cannot be loaded is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from model_shapes import write_header
from tiny import write_tiny

from pyggml.backend import Memory
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cuda.simulate import Simulation
from pyggml.errors import OutOfMemory
from pyggml.llama import load
from pyggml.llama.api import Llama
from pyggml.llama.fit_model import Fit
from pyggml.llama.memory_table import Use
from pyggml.llama.placement_params import ALL_LAYERS, AUTO
from pyggml.llama.placement_rules import cpu_moe

MIB = 1 << 20
RESERVED = "reserved=1MiB"
SMALL: Mapping[str, Any] = {"n_ctx": 512, "n_ubatch": 32, "warmup": False, "fit_target": (1,)}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers, of 12 experts each: 11.5 MiB of weights."""
    path = tmp_path_factory.mktemp("fit") / "experts.gguf"
    return write_tiny(path, "qwen3moe", weight_type="F16", n_layer=12)


def loaded(path: Path, *cards: str, **options: Any) -> tuple[Llama, Simulation]:
    simulation = Simulation([f"{card},{RESERVED}" for card in cards])
    return load(path, devices=simulation.devices, **{**SMALL, **options}), simulation


# ---------------------------------------------------------------- what is chosen is loaded
@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_every_device_keeps_its_margin_in_plan_and_reality(experts: Path, n_ctx: int) -> None:
    cards = ("rtx3060:6MiB", "rtx4090:9MiB", "rtx3090:7MiB")
    llama, _ = loaded(experts, *cards, n_ctx=n_ctx)
    with llama:
        fitted = llama.fitted
        assert fitted is not None and fitted.changed and not fitted.problem
        assert fitted.n_ctx == n_ctx == llama.context().n_ctx
        real = llama.memory_table().devices[:-1]  # with the context above
    assert fitted.devices == real
    assert all(d.free >= MIB for d in real)
    # on each there is something, and on none there is room for much more
    assert all(d.use.model for d in real) and min(d.free for d in real) < 3 * MIB


def test_what_fits_is_not_changed(experts: Path) -> None:
    llama, _ = loaded(experts, "rtx3060:64MiB")
    with llama:
        assert llama.fitted is not None and not llama.fitted.changed
        assert llama.model.placement.n_gpu_layers == 13
        assert "leaves" in llama.fitted.line


def test_debug_text_is_about_what_is_loaded(
    experts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGML_SCHED_DEBUG", "1")
    llama, _ = loaded(experts, "rtx3060:9MiB", n_ctx=512)
    with llama:
        assert llama.fitted is not None and llama.fitted.changed
        assert not capsys.readouterr().err
        llama.context()
    assert "## SPLIT #1: CUDA0 # " in capsys.readouterr().err


def test_off_means_off(experts: Path) -> None:
    with pytest.raises(OutOfMemory, match="CUDA0 is too small"):
        loaded(experts, "rtx3060:6MiB", fit=False)


def test_an_automatic_context_shrinks_before_layers_move(experts: Path) -> None:
    llama, _ = loaded(experts, "rtx3060:24MiB", n_ctx=0, fit_ctx=256)
    with llama:
        assert llama.fitted is not None and llama.fitted.placement.n_gpu_layers == AUTO
        assert 256 <= llama.fitted.n_ctx < 4096 == llama.model.hparams.n_ctx_train
        assert llama.context().n_ctx == llama.fitted.n_ctx


@pytest.mark.parametrize(
    "given", [{"rules": cpu_moe()}, {"n_gpu_layers": ALL_LAYERS}, {"n_gpu_layers": 99}]
)
def test_it_works_round_what_the_user_fixed(experts: Path, given: Mapping[str, Any]) -> None:
    free = "24MiB" if "n_gpu_layers" in given else "12MiB"
    llama, _ = loaded(experts, f"rtx3060:{free}", n_ctx=0, fit_ctx=256, **given)
    with llama:
        assert llama.fitted is not None and llama.fitted.changed and not llama.fitted.problem
        assert llama.fitted.placement == llama.model.placement.params
        assert 256 <= llama.fitted.n_ctx < 4096
        for name, value in given.items():
            assert getattr(llama.fitted.placement, name) == value
        llama.context()
        assert llama.memory_table().devices[0].free >= MIB


@pytest.mark.parametrize("given", [{"rules": cpu_moe()}, {"n_gpu_layers": 99}])
def test_what_cannot_fit_is_refused_with_a_way_out(experts: Path, given: dict[str, Any]) -> None:
    card = f"rtx3060:8MiB,{RESERVED}"
    simulation = Simulation([card])
    before = simulation.driver.memory(0)
    with pytest.raises(OutOfMemory) as refused:
        load(experts, devices=simulation.devices, **{**SMALL, "n_ctx": 4096}, **given)
    first, helps, way = str(refused.value).splitlines()
    assert first.startswith("CUDA0 lacks ") and "context 12.0 MiB" in first
    assert all(flag in helps for flag in ("-ngl", "-ncmoe", "-c)", "-ctk"))
    assert way.startswith("this would fit: -c 4096 -ngl ")
    assert simulation.driver.memory(0) == before
    # the way out is one
    n_layers = int(way.split("-ngl ")[1].split()[0])
    assert 0 < n_layers < 13
    options = {**SMALL, "n_ctx": 4096, "n_gpu_layers": n_layers}
    with load(experts, devices=Simulation([card]).devices, **options) as llama:
        llama.context()
        assert llama.memory_table().devices[0].free >= 0


def test_without_a_card_nothing_is_measured(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(Fit, "measure", refuse)
    with load(experts) as llama:
        assert llama.fitted is None


def test_on_the_host_alone_the_context_shrinks(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory", lambda self: Memory(12 * MIB, 64 * MIB))
    options = {"n_ubatch": 32, "warmup": False, "fit_target": (1,), "fit_ctx": 256}
    with load(experts, **options) as llama:
        assert llama.fitted is not None and llama.fitted.changed and not llama.fitted.problem
        assert 1024 < llama.fitted.n_ctx < 4096
        assert llama.context().n_ctx == llama.fitted.n_ctx
        cpu = llama.memory_table().devices[0]
    # 24 KiB for each token; without the mapped weights
    assert cpu.use.context == llama.fitted.n_ctx * 12 * 2 * 2 * 32 * 2
    assert 10 * MIB < cpu.use.context + cpu.use.compute < 11 * MIB
    with load(experts, **options, n_ctx=2048) as llama:
        assert llama.fitted is None


# ---------------------------------------------------------------- large batches
BATCH: Mapping[str, Any] = {"rules": cpu_moe(), "fit": False, "warmup": False, "n_ctx": 512}


def wanted(path: Path, n_ubatch: int, *, op_offload: bool) -> Use:
    """What a card without experts is asked for."""
    devices = Simulation(["rtx3060"], "dry").devices
    options = {**BATCH, "n_ubatch": n_ubatch, "op_offload": op_offload}
    with load(path, devices=devices, no_alloc=True, **options) as llama:
        return llama.memory_table().devices[0].use


def test_the_growth_with_the_batch_is_told_beforehand(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "wide", "qwen3moe", weight_type="F16", n_layer=2, n_ff_exp=4096)
    batches = (64, 128, 256)
    on, off = ({n: wanted(path, n, op_offload=way) for n in batches} for way in (True, False))
    assert on[64].compute < on[128].compute < on[256].compute
    # experts come to the card: of up and of down 12 matrices of 4096 x 128
    assert all(on[n].compute - off[n].compute > 12 * 4096 * 128 * 2 for n in batches)
    size = (on[128].own + on[256].own) / 2 / MIB + 1

    def run(n_ubatch: int, *, op_offload: bool) -> None:
        devices = Simulation([f"rtx3060:{size}MiB,{RESERVED}"]).devices
        options = {**BATCH, "n_ubatch": n_ubatch, "op_offload": op_offload}
        with load(path, devices=devices, **options) as llama:
            llama.context()

    run(128, op_offload=True)
    run(256, op_offload=False)
    with pytest.raises(OutOfMemory) as refused:
        run(256, op_offload=True)
    text = str(refused.value)
    assert "MiB are missing" in text and "-ub" in text and "--no-op-offload" in text


# ---------------------------------------------------------------- models of real size
CARDS = {"qwen3-30b-a3b": "rtx3060", "gpt-oss-120b": "rtx4090", "deepseek-r1": "a100"}


@pytest.mark.parametrize("name", CARDS)
def test_real_shapes(tmp_path: Path, name: str) -> None:
    simulation = Simulation([CARDS[name]], "dry")
    path = write_header(tmp_path / "m.gguf", name)
    with load(path, devices=simulation.devices, no_alloc=True) as llama:
        fitted = llama.fitted
        assert fitted is not None and not fitted.problem and fitted.n_ctx == 4096
        table, weights = llama.memory_table(), llama.model.weights.tensors
    (card,) = fitted.devices
    assert card == table.devices[0] and card.free >= 1024 * MIB
    layers = [il for il in range(100) if f"blk.{il}.ffn_up_exps.weight" in weights]
    sizes, whole = {}, []
    for il in layers:
        mine = [weights[f"blk.{il}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        sizes[il] = sum(t.nbytes for t in mine)
        if all(t.buffer and t.buffer.name == "CUDA0" for t in mine):
            whole.append(il)
    # whole layers come first, and there is no room for another
    assert whole == layers[: len(whole)] and len(whole) > 4
    assert card.free - 1024 * MIB < sizes[layers[len(whole)]]
    # all weights lie somewhere, and nothing twice
    in_all = sum(t.nbytes for t in weights.values())
    assert in_all <= sum(d.use.model for d in table.devices) < 1.001 * in_all
