"""The model of time beside what people have published of llama.cpp on real cards.

The numbers are tokens per second from public reports, of builds from 2024 to 2026 and of machines
that we know little about.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from model_shapes import Q4, Q6, SHAPES, Row, Shape, attention, dense, write_header
from simulated import simulation

from pyggml.dtypes import GGMLType
from pyggml.llama.api import load
from pyggml.llama.dry_run import Modelled, dry_run

pytestmark = pytest.mark.slow  # large vocabularies


def llama_layer(s: Shape, il: int) -> Iterator[Row]:
    yield from attention(s, Q4, Q4, s.down(il), Q4)
    yield "ffn_norm", (s.n_embd,), GGMLType.F32
    yield from dense(s, il, s.n_ff)


def in_q6(s: Shape, il: int) -> Iterator[Row]:
    for name, ne, type_ in llama_layer(s, il):
        yield name, ne, Q6 if type_ is Q4 else type_


LLAMA_8B = replace(
    SHAPES["mixtral-8x22b"],
    name="Llama 3.1 8B",
    n_layer=32,
    n_embd=4096,
    n_vocab=128256,
    n_head=32,
    n_head_kv=8,
    n_expert=0,
    n_used=0,
    n_ff=14336,
    layer=llama_layer,
)
MODELS = {
    "8b-q4": LLAMA_8B,
    "8b-q6": replace(LLAMA_8B, layer=in_q6),
    "30b-a3b-q4": SHAPES["qwen3-30b-a3b"],
}


def modelled(model: str, card: str, n_ubatch: int, folder: Path) -> Modelled:
    path = write_header(folder / "m.gguf", MODELS[model])
    sim = simulation(card, execute="dry")
    with load(
        path,
        devices=sim.devices,
        no_alloc=True,
        n_gpu_layers=99,
        fit=False,
        n_ctx=max(512, n_ubatch),
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        warmup=False,
    ) as llama:
        found = dry_run(llama.model, llama.context()).modelled
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "card", "reported"),
    [
        ("8b-q4", "rtx2080", 71.9),
        ("8b-q4", "rtx3080", 112.0),
        ("30b-a3b-q4", "rtx3090", 122.0),  # 110 to 134
    ],
)
def test_generation(model: str, card: str, reported: float, tmp_path: Path) -> None:
    assert modelled(model, card, 512, tmp_path).tg_rate == pytest.approx(reported, rel=0.25)


@pytest.mark.parametrize(
    ("model", "card", "n_ubatch", "reported"),
    [("8b-q4", "rtx3080", 512, 3807.0), ("8b-q6", "rtx3090", 2048, 3525.0)],
)
def test_prompts(model: str, card: str, n_ubatch: int, reported: float, tmp_path: Path) -> None:
    found = modelled(model, card, n_ubatch, tmp_path)
    assert found.n_tokens == n_ubatch
    assert found.pp_rate == pytest.approx(reported, rel=0.25)
