"""Every architecture as a tiny random model against real llama.cpp: whole distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from exact import kl, log_softmax
from oracle import LlamaCpp
from tiny import VARIANTS, write_tiny

from pyggml.llama import Llama, load

LENGTHS = (1, 2, 33, 100)
# llama.cpp rounds activations to F16 and BF16 where weights are; int8 ones lie 1e-3 from exact
LIMITS = {"F32": 1e-6, "F16": 1e-5}
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)

Models = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Writes each model once: (variant, weight type) -> path."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(variant: str, weight_type: str) -> Path:
        path = folder / f"{variant}-{weight_type}.gguf"
        if not path.exists():
            arch, options = VARIANTS[variant]
            write_tiny(path, arch, weight_type=weight_type, **options)
        return path

    return get


def prompt(n_vocab: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(n).integers(3, n_vocab, n)]


def strict(path: Path, **params: object) -> Llama:
    """As the strict oracle: F32 cache, no flash attention."""
    defaults = {"n_ctx": 512, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    return load(path, **{**defaults, "n_threads": 2, **params})


def distances(ours: Llama, theirs: LlamaCpp) -> Iterator[float]:
    for n in LENGTHS:
        ids = prompt(ours.model.hparams.n_vocab, n)
        mine = log_softmax(ours.logits(ids, all=True))
        yield float(kl(theirs.logprobs(ids), mine).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_f32_model_equals_llama_cpp(variant: str, models: Models) -> None:
    path = models(variant, "F32")
    with strict(path) as ours, LlamaCpp(path) as theirs:
        assert max(distances(ours, theirs)) < LIMITS["F32"]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma3", "deepseek2", "gpt-oss"])
def test_default_settings_stay_close(variant: str, models: Models) -> None:
    """F16 cache and flash attention, as users run it."""
    path = models(variant, "F32")
    with (
        strict(path, type_k="f16", type_v="f16", flash_attn="on") as ours,
        LlamaCpp(path) as theirs,
    ):
        assert max(distances(ours, theirs)) < 1e-5


@pytest.mark.parametrize("weight_type", ["F16", "BF16", *QUANTIZED])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_weight_types(variant: str, weight_type: str, models: Models) -> None:
    path = models(variant, weight_type)
    with strict(path) as ours, LlamaCpp(path) as theirs:
        ids = prompt(ours.model.hparams.n_vocab, 100)
        mine, other = log_softmax(ours.logits(ids, all=True)), theirs.logprobs(ids)
    # a single position may lie on the edge between two rounded activations
    assert kl(other, mine).mean() < LIMITS.get(weight_type, 2e-3)


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", *QUANTIZED])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_logits_do_not_depend_on_ubatch_threads_or_layout(
    variant: str, weight_type: str, models: Models
) -> None:
    path = models(variant, weight_type)
    with strict(path, n_threads=1) as reference:
        ids = prompt(reference.model.hparams.n_vocab, 100)
        expected = reference.logits(ids, all=True)
    for params in (
        {"n_ubatch": 1},
        {"n_ubatch": 7, "n_threads": 2},
        {"n_ubatch": 64, "n_batch": 64, "n_threads": 3},
        {"repack": False, "n_ubatch": 33},
        {"load_mode": "none"},
    ):
        with strict(path, **params) as other:
            np.testing.assert_array_equal(other.logits(ids, all=True), expected, str(params))


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_attention_does_not_depend_on_ubatch(
    flash_attn: str, cache_type: str, models: Models
) -> None:
    path = models("gemma3", "F32")
    settings = {"flash_attn": flash_attn, "type_k": cache_type, "type_v": cache_type}
    with (
        strict(path, n_ubatch=100, **settings) as one,
        strict(path, n_ubatch=9, **settings) as many,
    ):
        ids = prompt(one.model.hparams.n_vocab, 100)
        np.testing.assert_array_equal(one.logits(ids), many.logits(ids))


def test_greedy_tokens_equal_llama_cpp(models: Models) -> None:
    for variant in ("llama", "qwen2", "qwen3", "gemma3", "deepseek2", "deepseek2-plain", "gpt-oss"):
        path = models(variant, "F32")
        with strict(path) as ours, LlamaCpp(path) as theirs:
            ids = prompt(ours.model.hparams.n_vocab, 20)
            steps = ours.session().generate(ids, temp=0, n_predict=16, ignore_eos=False)
            mine = [step.token for step in steps]
            expected = [step.token for step in theirs.greedy(ids, 16)]
        assert mine == expected[: len(mine)], variant
