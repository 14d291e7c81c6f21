"""Threads of a context: twins for prompts, numbers of threads, and what reaches the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny
from tiny_llama import DEVICE, hparams

from pyggml.backend import Backend
from pyggml.errors import ConfigError
from pyggml.llama import cpu_params
from pyggml.llama.api import load
from pyggml.llama.context_params import ContextParams
from pyggml.llama.cpu_params import CpuParams
from pyggml.threads import ThreadParams


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_params, "usable_cpus", lambda: frozenset(range(8)))


def test_twins_are_like_generation_unless_given() -> None:
    base = CpuParams(cpu_mask="3", cpu_strict=1, prio=-1, poll=7)
    assert base.generation(2) == ThreadParams(2, frozenset((0, 1)), True, -1, 7)
    assert base.batch(2) == base.generation(2)
    zeros = CpuParams(
        cpu_mask="3", cpu_strict=1, prio=-1, poll=7, cpu_strict_batch=0, prio_batch=0, poll_batch=0
    )
    assert zeros.batch(3) == ThreadParams(3, frozenset((0, 1)), False, 0, 0)
    others = CpuParams(cpu_mask="3", cpu_range_batch="4-5", cpu_mask_batch="80")
    assert others.batch(3).cpus == {4, 5, 7}
    assert others.generation(3).cpus == {0, 1}
    assert CpuParams().batch(1) == ThreadParams(1)


def test_a_mask_and_a_range_add_up() -> None:
    assert CpuParams(cpu_mask="0x1", cpu_range="6-").cpus == {0, 6, 7}


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, (5, 5)),
        ({"cpu_mask": "7"}, (3, 3)),
        ({"cpu_mask": "7", "cpu_range_batch": "0-1"}, (3, 2)),
        ({"cpu_mask_batch": "f"}, (5, 4)),
        ({"cpu_mask": "7", "n_threads": 2}, (2, 2)),
        ({"cpu_mask_batch": "7", "n_threads_batch": 6}, (5, 6)),
    ],
)
def test_as_many_threads_as_cpus_in_the_mask(
    given: dict[str, Any], threads: tuple[int, int]
) -> None:
    numbers = {k: v for k, v in given.items() if k.startswith("n_")}
    cpu = CpuParams(**{k: v for k, v in given.items() if k not in numbers})
    params = ContextParams(cpu=cpu, **numbers).resolved(hparams(), 5)
    assert (params.n_threads, params.n_threads_batch) == threads
    assert (params.threads(1).n_threads, params.threads(9).n_threads) == threads


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cpu_strict": 2}, "--cpu-strict 2 is out of range: allowed are 0 to 1"),
        ({"prio": 4}, "--prio 4 is out of range: allowed are -1 to 3"),
        ({"poll": -1}, "--poll -1 is out of range"),
        ({"poll_batch": 101}, "--poll-batch 101 is out of range: allowed are 0 to 100"),
        ({"prio_batch": -2}, "--prio-batch -2"),
        ({"cpu_strict_batch": -1}, "--cpu-strict-batch -1"),
        ({"cpu_mask": "100"}, "--cpu-mask 100: this process cannot run on CPU 8\nit may use 0-7"),
        ({"cpu_range_batch": "9-9"}, "--cpu-range-batch 9-9: this process cannot run on CPU 9"),
    ],
)
def test_mistakes_name_the_flag(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CpuParams(**given)


def test_prompts_and_generation_run_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[ThreadParams] = []
    modes: list[str] = []
    monkeypatch.setattr(Backend, "set_threads", lambda self, params: used.append(params))
    monkeypatch.setattr(type(DEVICE), "use_numa", lambda self, mode: modes.append(mode))
    write_tiny(path := tmp_path / "tiny.gguf", "llama")
    options: dict[str, Any] = {"cpu_mask": "3", "poll": 9, "prio_batch": -1, "numa": "isolate"}
    with load(path, devices=[DEVICE], n_ctx=256, warmup=False, **options) as llama:
        used.clear()
        llama.logits([1])
        llama.logits([1, 2])
    assert modes == ["isolate"] * 2  # weights, then the context
    cpus = frozenset((0, 1))
    assert used[-2:] == [ThreadParams(2, cpus, poll=9), ThreadParams(2, cpus, priority=-1, poll=9)]
    with pytest.raises(ConfigError, match="did you mean 'cpu_mask'"):
        load(path, devices=[DEVICE], cpu_masc="3")
