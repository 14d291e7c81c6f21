"""The plan for several devices is what they are asked for, to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny import VARIANTS, write_tiny

from pyggml.backends.cuda.simulate import Simulation
from pyggml.llama import load
from pyggml.llama.memory_table import MemoryTable
from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_moe

MODELS = ("qwen3moe", "gpt-oss", "deepseek2", "qwen3next", "gemma3")
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "output": {"n_gpu_layers": 1},
    "some": {"n_gpu_layers": 3, "no_host": True},
    "copied": {"n_gpu_layers": 3, "load_mode": "none"},
    "experts on the CPU": {"rules": cpu_moe()},
    "some experts": {"rules": n_cpu_moe(1), "op_offload": False, "repack": False},
    "rules": {"rules": (Rule(r"attn_(k|v)", "CPU"), Rule("cache_k_l1", "CPU"))},
    "caches on the CPU": {"kv_offload": False, "n_ubatch": 32},
    "shares": {"tensor_split": (1.0, 3.0), "flash_attn": "off"},
    "sequences": {"n_seq_max": 2, "n_ubatch": 64},
}
CARDS = {"one": ["rtx3060:1GiB"], "two": ["rtx4090:512MiB", "rtx3060:1GiB,buffer=2MiB"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(folder / name, VARIANTS[name][0], weight_type="Q4_0", n_layer=4)
        for name in MODELS
    }


def table(path: Path, cards: list[str], execute: str, **options: Any) -> MemoryTable:
    simulation = Simulation(cards, execute)
    dry = execute == "dry"
    with load(
        path,
        devices=simulation.devices,
        no_alloc=dry,
        warmup=False,
        fit=False,
        n_ctx=512,
        **options,
    ) as llama:
        llama.context()
        return llama.memory_table()


CASES = [(cards, placement) for cards in CARDS for placement in PLACEMENTS]
CASES.remove(("one", "shares"))


@pytest.mark.parametrize(("cards", "placement"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_what_is_taken(
    models: Mapping[str, Path], name: str, cards: str, placement: str
) -> None:
    options = PLACEMENTS[placement]
    planned = table(models[name], CARDS[cards], "dry", **options)
    real = table(models[name], CARDS[cards], "host", **options)
    assert planned.buffers == real.buffers
    # what is free too, but for the CPU, where others come and go
    assert planned.devices[:-1] == real.devices[:-1]
    assert planned.devices[-1].use == real.devices[-1].use
