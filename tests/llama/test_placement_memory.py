"""Cards that are too small, and ubatches in flight over several cards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDevice, cpu
from placed_models import fake_load, loaded, used, write_dense, write_moe

from pyggml.errors import OutOfMemory
from pyggml.graph import Graph
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.context_placement import is_pipeline_parallel
from pyggml.llama.loader import load_model
from pyggml.llama.placement_rules import n_cpu_moe, parse_rules


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("placement") / "dense.gguf")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("placement") / "moe.gguf")


# ---------------------------------------------------------------- too little memory
def advice(path: Path, *totals: int, **params: Any) -> str:
    with pytest.raises(OutOfMemory) as error:
        fake_load(path, *totals, **params)
    assert len(str(error.value).splitlines()) <= 3
    return str(error.value)


def test_a_card_that_is_too_small_says_what_would_fit(moe: Path) -> None:
    [need] = used(fake_load(moe, 1 << 40))
    said = advice(moe, need // 2)
    assert "CUDA0 is too small: the weights there need" in said
    n = int(re.findall(r"--gpu-layers (\d+)", said)[0])
    n_moe = int(re.findall(r"--n-cpu-moe (\d+)", said)[0])
    # they fit, and one layer more does not
    assert used(fake_load(moe, need // 2, n_gpu_layers=n))[0] <= need // 2
    advice(moe, need // 2, n_gpu_layers=n + 1)
    assert used(fake_load(moe, need // 2, rules=n_cpu_moe(n_moe)))[0] <= need // 2
    advice(moe, need // 2, rules=n_cpu_moe(n_moe - 1))


def test_a_dense_model_has_no_experts_to_move(dense: Path) -> None:
    [need] = used(fake_load(dense, 1 << 40))
    assert "--n-cpu-moe" not in advice(dense, need - 1)


def test_what_rules_send_there_stays_there(dense: Path) -> None:
    """-ngl cannot help when rules alone fill the card."""
    rules = parse_rules("blk=CUDA0")
    [need] = used(fake_load(dense, 1 << 40, rules=rules, n_gpu_layers=0))
    said = advice(dense, need // 2, rules=rules, n_gpu_layers=0)
    assert "send tensors elsewhere with --override-tensor" in said


def test_spared_layers_of_one_card_are_shared_out_by_advice(moe: Path) -> None:
    """-ncmoe 6 takes all from the first card: the second one is too small, and a -ts helps."""
    first, second = used(fake_load(moe, 1 << 40, 1 << 40, rules=n_cpu_moe(6)))
    assert first < second
    room = (first + second) * 5 // 8
    said = advice(moe, room, room, rules=n_cpu_moe(6))
    assert "CUDA1 is too small" in said
    split = tuple(map(float, re.findall(r"--tensor-split ([\d,]+)", said)[0].split(",")))
    sizes = used(fake_load(moe, room, room, rules=n_cpu_moe(6), tensor_split=split))
    assert max(sizes) <= room


def test_no_split_is_advised_where_none_fits(moe: Path) -> None:
    assert "--tensor-split" not in advice(moe, 1000, 1000)


def test_a_context_that_does_not_fit_names_the_flags(dense: Path) -> None:
    model = fake_load(dense, 1 << 40, n_gpu_layers=3)
    gpu = model.placement.gpus[0]
    assert isinstance(gpu, FakeDevice)
    gpu.total = gpu.used + 1000
    with pytest.raises(OutOfMemory, match="CPU and CUDA0 together do not have: .* --no-kv"):
        Context(model, ContextParams(n_ctx=256, warmup=False))
    model.close()
    assert gpu.used == 0


# ---------------------------------------------------------------- several ubatches in flight
def test_cards_without_events_are_not_parallel(dense: Path) -> None:
    cards = [FakeDevice(f"CUDA{i}", is_late=True, has_events=i == 0) for i in range(2)]
    model = load_model(dense, devices=[*cards, cpu()])
    assert not is_pipeline_parallel(model.placement, ContextParams())
    cards[1].caps = cards[0].caps
    assert is_pipeline_parallel(model.placement, ContextParams())
    model.close()


def test_what_fails_in_flight_leaves_nothing_behind(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(dense, 2, n_ubatch=16) as llama:
        context = llama.context()
        context.decode(Batch.of([3] * 16, 0))
        compute = context._start
        calls = iter(range(10))

        def fail(graph: Graph, n_tokens: int) -> None:
            if next(calls) == 2:
                raise KeyboardInterrupt
            compute(graph, n_tokens)

        monkeypatch.setattr(context, "_start", fail)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.of([4] * 64, 16))
        assert context.memory.pos_max(0) == 15
