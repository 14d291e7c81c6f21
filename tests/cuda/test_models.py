"""Models on simulated cards: the logits of the CPU, bit for bit, wherever the layers lie."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated import CPU_RATES, simulation
from tiny import VARIANTS, write_tiny

from pyggml.backends.cuda.simulate import Simulation
from pyggml.errors import OutOfMemory
from pyggml.llama.api import Llama, load
from pyggml.llama.batch import Batch
from pyggml.llama.placement_rules import parse_rules

CARDS = ("rtx3060:256MiB", "rtx4090:256MiB")
RULES = ("", "exps=CPU", r"blk\.1\.=CPU", "ffn=CUDA1", "attn=CPU,ffn_down=CUDA0")
SIZES = (40, 1, 1, 31, 1)  # of batches: offloaded or not, and graphs that come again
# one of each kind of graph; the others are slow all together
KINDS = ("llama", "gemma3", "phi2", "qwen3moe", "gpt-oss", "deepseek2", "qwen3next", "glm4moe")
EVERY = [v if v in KINDS else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS]


def logits(llama: Llama) -> list[bytes]:
    """Of prompts and of single tokens, through one context."""
    context = llama.context()
    ids = np.random.default_rng(0).integers(3, llama.model.hparams.n_vocab, sum(SIZES)).tolist()
    rows, at = [], 0
    for n in SIZES:
        context.decode(Batch.of(ids[at : at + n], at, logits="all"))
        rows.append(context.all_logits().tobytes())
        at += n
    llama.close_context(context)
    return rows


def options(flash_attn: str) -> dict[str, object]:
    return {"n_ctx": 256, "n_threads": 2, "warmup": False, "flash_attn": flash_attn}


@pytest.mark.parametrize("variant", EVERY)
def test_any_placement_gives_the_bits_of_the_cpu(variant: str, tmp_path: Path) -> None:
    arch, changes = VARIANTS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, weight_type="Q8_0", **changes)
    # CUDA's flash attention does not know heads as small as these
    with load(path, repack=False, **options("off")) as llama:
        want = logits(llama)
    choose = random.Random(variant)
    sim = simulation(*CARDS)
    rules = choose.choice(RULES)
    with load(
        path,
        devices=sim.devices,
        n_gpu_layers=choose.randrange(1, 5),
        rules=parse_rules(rules) if rules else (),
        kv_offload=choose.random() < 0.7,
        op_offload=choose.random() < 0.7,
        repack=choose.random() < 0.5,
        **options("off"),
    ) as llama:
        got = logits(llama)
    assert got == want
    assert sum(card.counters.launches for card in sim.driver.cards) > 0


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
def test_flash_attention_on_cards(type_kv: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q4_K", n_layer=4)  # heads of 64
    types = {"type_k": type_kv, "type_v": type_kv}
    with load(path, **types, **options("on")) as llama:
        want = logits(llama)
    sim = simulation(*CARDS, trace=True)
    with load(path, devices=sim.devices, n_gpu_layers=99, **types, **options("auto")) as llama:
        assert llama.context().flash_attn
        assert logits(llama) == want
    where = {s.device for s in sim.clock.trace or () if s.name.startswith("FLASH_ATTN_EXT")}
    assert where == {"CUDA0", "CUDA1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize(
    "placement", [{"n_gpu_layers": 99}, {"n_gpu_layers": 9, "kv_offload": False}]
)
def test_real_models(name: str, placement: dict[str, int], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    with load(path, **options("on")) as llama:  # repacked
        want = logits(llama)
    sim = simulation("rtx3060:2GiB", "rtx4090:2GiB")
    with load(path, devices=sim.devices, **placement, **options("auto")) as llama:
        assert logits(llama) == want


def test_a_card_that_is_too_small(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="F32", n_ff=8192)
    sim = simulation("rtx3060:8MiB")
    with pytest.raises(OutOfMemory, match=r"CUDA0"):
        load(path, devices=sim.devices, n_gpu_layers=99, fit=False, **options("off"))
    assert sim.driver.cards[0].memory.used == 1 << 20  # only what the driver took itself


def test_a_closed_model_leaves_the_card_empty(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q8_0")
    sim = simulation(*CARDS)
    before = [card.memory.used for card in sim.driver.cards]
    with load(path, devices=sim.devices, n_gpu_layers=99, **options("off")) as llama:
        logits(llama)
        assert all(card.memory.used > n for card, n in zip(sim.driver.cards, before, strict=True))
    del llama
    assert [card.memory.used for card in sim.driver.cards] == before


def test_a_dry_machine_runs_a_model_without_computing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen3moe", weight_type="Q8_0")
    clocks = []
    for execute in ("dry", "host"):
        sim = simulation(*CARDS, execute=execute)
        given = options("off") | {"devices": sim.devices, "n_gpu_layers": 2, "op_offload": False}
        with load(path, **given) as llama:
            rows = logits(llama)
        assert any(map(any, rows)) == (execute == "host")
        clocks.append(sim.clock.now)
    assert clocks[0] == pytest.approx(clocks[1])


def modelled_seconds(sim: Simulation, path: Path, **placement: object) -> float:
    """Of a token, once its graph is captured."""
    with load(path, devices=sim.devices, **placement, **options("off")) as llama:
        context = llama.context()
        times = []
        for i in range(4):
            start = sim.clock.now
            context.decode(Batch.of([5], i))
            times.append(sim.clock.now - start)
        llama.close_context(context)
    return times[-1]


def test_time_follows_the_placement(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="F32", n_layer=4, n_ff=4096)

    def seconds(card: str, n_gpu_layers: int) -> float:
        sim = Simulation([card], cpu_rates=replace(CPU_RATES, gbs=10.0))
        return modelled_seconds(sim, path, n_gpu_layers=n_gpu_layers)

    cpu, half, all_layers = (seconds("rtx3060:1GiB", n) for n in (0, 2, 99))
    assert all_layers < half < cpu
    assert all_layers < seconds("rtx3060:1GiB,vram=36", 99)
