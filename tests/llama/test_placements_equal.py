"""A model computes the same bits wherever its parts lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from placements import Placed, logits, named_placements, random_placement, write_model

from pyggml.gguf import open_gguf

Logits = NDArray[np.float32]

# what differs: products, experts, latent keys, states of linear layers, windows, sinks
MODELS = {
    "llama-f32": ("llama", "F32"),
    "qwen3moe-q4_0": ("qwen3moe", "Q4_0"),
    "deepseek2-q8_0": ("deepseek2-v3", "Q8_0"),
    "qwen35moe-f32": ("qwen35moe", "F32"),
    "gemma2-q4_k": ("gemma2-caps", "Q4_K"),
    "gpt-oss-f16": ("gpt-oss", "F16"),
}
MORE_MODELS = {
    "qwen3next-q4_0": ("qwen3next", "Q4_0"),
    "qwen35-q8_0": ("qwen35", "Q8_0"),
    "gemma3-q5_k": ("gemma3", "Q5_K"),
    "glm4moe-iq4_xs": ("glm4moe", "IQ4_XS"),
    "phi3-q6_k": ("phi3", "Q6_K"),
    "starcoder2-f32": ("starcoder2", "F32"),
    "minicpm3-q4_0": ("minicpm3", "Q4_0"),
    "ernie4_5-moe-q4_1": ("ernie4_5-moe", "Q4_1"),
    "granitemoe-bf16": ("granitemoe", "BF16"),
    "olmo2-q3_k": ("olmo2", "Q3_K"),
    "qwen35moe-q2_k": ("qwen35moe", "Q2_K"),
}
NAMES = list(named_placements(2))
FEW = {"llama-f32": range(3), "qwen3moe-q4_0": range(3, 8), "qwen35moe-f32": range(8, 12)}
MANY = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Logits]]:
    """A model's file and its logits on the CPU alone."""
    known: dict[str, tuple[Path, Logits]] = {}

    def get(name: str) -> tuple[Path, Logits]:
        if name not in known:
            path = tmp_path_factory.mktemp("placed") / f"{name}.gguf"
            write_model(path, *(MODELS | MORE_MODELS)[name])
            known[name] = path, logits(path, flash_attn="off")[0]
            assert np.isfinite(known[name][1]).all()
        return known[name]

    return get


def n_layer(path: Path) -> int:
    gguf = open_gguf(path)
    count = gguf.metadata[f"{gguf.metadata['general.architecture']}.block_count"]
    gguf.close()
    assert isinstance(count, int)
    return count


def check(path: Path, expected: Logits, placed: Placed, **params: Any) -> int:
    """Compare; how much ran on cards."""
    computed, launches = logits(path, placed, **{"flash_attn": "off", **params})
    np.testing.assert_array_equal(computed, expected, str(placed))
    return launches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", NAMES)
def test_named_placements(
    model: Callable[[str], tuple[Path, Logits]], name: str, where: str
) -> None:
    path, expected = model(name)
    placed = named_placements(n_layer(path))[where]
    launches = check(path, expected, placed)
    options = placed.options
    # without layers there the cards compute large batches, which they are lent the weights for
    assert bool(launches) == bool(options["n_gpu_layers"] or options.get("op_offload", True))


CACHES = {
    "llama-f32": {"flash_attn": "on", "type_k": "q8_0", "type_v": "q4_0"},
    "gemma2-q4_k": {"flash_attn": "auto", "type_k": "f32", "type_v": "bf16"},
    "gpt-oss-f16": {"flash_attn": "on"},
}


@pytest.mark.parametrize("where", ["-ngl half", "-ngl all -nkvo", "-ot exps=CPU", "two cards"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_and_flash_attention(
    model: Callable[[str], tuple[Path, Logits]], name: str, where: str
) -> None:
    path, _ = model(name)
    expected, _ = logits(path, **CACHES[name])
    check(path, expected, named_placements(n_layer(path))[where], **CACHES[name])


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in FEW for seed in FEW[name]])
def test_random_placements(
    model: Callable[[str], tuple[Path, Logits]], name: str, seed: int
) -> None:
    path, expected = model(name)
    check(path, expected, random_placement(seed, n_layer(path)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("name", MORE_MODELS)
def test_more_models(model: Callable[[str], tuple[Path, Logits]], name: str, seed: int) -> None:
    path, expected = model(name)
    check(path, expected, random_placement(seed, n_layer(path)))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["-ngl half", "-ngl all -nkvo", "two cards"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models(request: pytest.FixtureRequest, name: str, where: str) -> None:
    path: Path = request.getfixturevalue(name)
    expected, _ = logits(path, flash_attn="off")
    check(path, expected, named_placements(n_layer(path))[where])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + MANY))
@pytest.mark.parametrize("name", MODELS)
def test_many_random_placements(
    model: Callable[[str], tuple[Path, Logits]], name: str, seed: int
) -> None:
    path, expected = model(name)
    check(path, expected, random_placement(seed, n_layer(path)))
