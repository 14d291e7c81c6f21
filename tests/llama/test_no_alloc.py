"""A planned model takes what the loaded one takes, to the byte, and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from model_shapes import write_header
from tiny import VARIANTS, write_tiny
from tool_here import tool_with

from pyggml.backends.cpu.library import KernelLibrary
from pyggml.errors import GgufError, UserError
from pyggml.llama import load
from pyggml.llama.batch import Batch
from pyggml.llama.memory_table import MemoryTable

MIB = 1 << 20
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "copied": {"load_mode": "none", "repack": False},
    "mapped": {"repack": False},
    "panels": {"load_mode": "none"},
    "small batch": {"n_ubatch": 32, "flash_attn": "off"},
    "sequences": {"n_seq_max": 3, "n_ctx": 768, "type_k": "bf16", "type_v": "bf16"},
}
MODELS = ("llama", "gpt-oss", "deepseek2", "qwen3next", "gemma3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(folder / f"{name}.gguf", VARIANTS[name][0], weight_type="Q8_0")
        for name in MODELS
    }


def table(path: Path, **options: Any) -> MemoryTable:
    with load(path, warmup=False, **{"n_ctx": 512, **options}) as llama:
        llama.context()
        return llama.memory_table()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_what_is_taken(
    models: Mapping[str, Path], name: str, options: Mapping[str, Any]
) -> None:
    planned = table(models[name], no_alloc=True, **options)
    real = table(models[name], **options)
    assert planned.buffers == real.buffers
    assert [(d.name, d.use) for d in planned.devices] == [(d.name, d.use) for d in real.devices]
    assert all(part.use.own for part in planned.buffers)


def test_a_header_is_enough(
    models: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "header.gguf"
    tool_with(capsys)("header", models["gpt-oss"], path)
    assert path.stat().st_size < models["gpt-oss"].stat().st_size / 2
    planned = table(path, no_alloc=True)
    assert planned.buffers == table(models["gpt-oss"]).buffers
    with pytest.raises(GgufError, match="holds only the header of a model.*--dry-run"):
        load(path)


@pytest.mark.parametrize("repack", [True, False])
def test_weights_count_with_all_their_experts(tmp_path: Path, repack: bool) -> None:
    path = write_header(tmp_path / "m.gguf", "qwen3-30b-a3b")
    with load(path, no_alloc=True, n_ctx=512, repack=repack) as llama:
        device = llama.memory_table().devices[-1]
        spent = device.use.model / llama.model.nbytes
    assert 1 <= spent < 1.1 if repack else spent == 1


def test_nothing_is_read_computed_or_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("planning compiles kernels")

    monkeypatch.setattr(KernelLibrary, "addresses", refuse)
    path = write_header(tmp_path / "m.gguf", "mixtral-8x22b")
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    with load(path, no_alloc=True, n_ctx=65536) as llama:
        context = llama.context()
        assert threads == (threading.active_count(), len(os.listdir("/proc/self/task")))
        with pytest.raises(UserError, match="is loaded without data"):
            context.decode(Batch.of([1, 2, 3], 0))
        pp, tg = (context.graph_sizes[n] for n in (512, 1))
        assert pp == tg and pp.nodes > 1000 and pp.splits == 1
        # 56 layers of 8 heads of 128 F16 keys and as many values
        use = llama.memory_table().devices[-1].use
        assert use.context == 56 * 2 * 8 * 128 * 2 * 65536


def test_a_planned_context_splits_graphs(models: Mapping[str, Path]) -> None:
    with load(models["gemma3"], no_alloc=True, n_ctx=2048, n_ubatch=64) as llama:
        context = llama.context()
        sched, sizes = context.plan_graph(64)
        assert len(sched.splits) == context.graph_sizes[64].splits == 1
        # only one of its tokens has logits; memory is kept for those of all
        assert 0 < sizes[0] <= context.sched.buffer_size(context.backends[0])


def test_a_table_has_what_there_is(models: Mapping[str, Path]) -> None:
    with load(models["llama"], n_ctx=512, warmup=False) as llama:
        alone = llama.memory_table().devices[0].use
        assert alone.context == alone.compute == 0 < alone.model
        one = llama.context()
        first = llama.memory_table().devices[0].use
        llama.context()
        both = llama.memory_table().devices[0].use
        assert (both.context, both.compute) == (2 * first.context, 2 * first.compute)
        llama.close_context(one)
        assert llama.memory_table().devices[0].use == first
