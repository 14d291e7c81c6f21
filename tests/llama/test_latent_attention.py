"""deepseek2 and minicpm3: latent attention in all its forms, its cache, shifted keys, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divergence import divergences, prompt, reference, strict
from exact import kl
from oracle import LlamaCpp
from tiny import write_tiny
from tiny_latent import LATENT_VARIANTS, LITE
from tiny_llama import context_of, keys, logits_after_cut, metadata, run, tiny_model

from pyggml.errors import ModelError
from pyggml.llama.hparams import Gating, HParams
from pyggml.llama.models import deepseek2

FORMS = {**LATENT_VARIANTS, "deepseek2": ("deepseek2", {}), "minicpm3": ("minicpm3", {})}


# ---------------------------------------------------------------- against llama.cpp
def test_queries_made_at_once(tmp_path: Path) -> None:
    arch, options = LITE
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    with LlamaCpp(path) as theirs:
        expected = reference(theirs)
    with strict(path, flash_attn="on", n_ubatch=32) as ours:
        assert divergences(ours, expected).max() < 1e-6


@pytest.mark.parametrize(("weight_type", "limit"), [("F16", 1e-5), ("Q8_0", 2e-3), ("Q4_0", 2e-3)])
@pytest.mark.parametrize("variant", ["deepseek2", "deepseek2-plain"])
def test_weight_types(variant: str, weight_type: str, limit: float, tmp_path: Path) -> None:
    """The matrices of the heads, too: attn_k_b and attn_v_b have three dimensions."""
    arch, options = FORMS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, weight_type=weight_type, **options)
    with LlamaCpp(path) as theirs:
        expected = reference(theirs)
    with strict(path, flash_attn="on") as ours:
        assert divergences(ours, expected).mean() < limit


# ---------------------------------------------------------------- the cache
def test_compressed_rows_are_all_that_is_cached(tmp_path: Path) -> None:
    context = context_of(tiny_model(tmp_path / "m.gguf", "deepseek2"))
    (cache,) = context.memory.caches
    assert {t.ne[:2] for t in cache.k.values()} == {(64 + 24, 256)} and not cache.v
    assert cache.nbytes == 3 * 256 * (64 + 24) * 4


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("variant", ["deepseek2", "deepseek2-plain", "deepseek2-yarn", "minicpm3"])
def test_only_the_rotated_part_of_keys_is_shifted(
    variant: str, flash_attn: str, tmp_path: Path
) -> None:
    arch, options = FORMS[variant]
    # keys of a single layer depend on token and position only
    tiny = tiny_model(tmp_path / "m.gguf", arch, n_layer=1, **options)
    ids = prompt(300, 30)
    context = context_of(tiny, flash_attn=flash_attn)
    found = logits_after_cut(context, ids, 4, 12, [5, 6, 7])
    expected = run(context_of(tiny, flash_attn=flash_attn), ids[:4] + ids[12:] + [5, 6, 7])
    np.testing.assert_allclose(found, expected[-3:], atol=2e-5)


@pytest.mark.parametrize("variant", ["deepseek2", "deepseek2-plain", "deepseek2-yarn", "gpt-oss"])
def test_shifted_keys_are_llama_cpps(variant: str, tmp_path: Path) -> None:
    arch, options = {**FORMS, "gpt-oss": ("gpt-oss", {})}[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    with LlamaCpp(path) as theirs:
        ids, more = prompt(theirs.n_vocab, 40), prompt(theirs.n_vocab, 9)
        expected = theirs.logits_after_cut(ids, 5, 18, more)
    with strict(path, flash_attn="on") as ours:
        found = logits_after_cut(ours.context(), ids, 5, 18, more)
    assert kl(expected, found).max() < 1e-6


# ---------------------------------------------------------------- hyper-parameters
SIZES = {
    "attention.kv_lora_rank": 16,
    "attention.head_count_kv": 1,
    "attention.key_length": 20,
    "attention.value_length": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 10,
    "rope.dimension_count": 4,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 6,
    "leading_dense_block_count": 1,
}


def read(path: Path, **changes: Any) -> HParams:
    return deepseek2.hparams(metadata(path, keys("deepseek2", **{**SIZES, **changes})))


def test_sizes(tmp_path: Path) -> None:
    hp = read(tmp_path / "m.gguf")
    assert hp.mla is not None and hp.mla.absorbed and hp.values_in_keys
    assert (hp.mla.n_lora_q, hp.mla.n_lora_kv, hp.mla.n_head_k, hp.mla.n_head_v) == (0, 16, 12, 10)
    assert (hp.n_embd_k_gqa(0), hp.n_embd_v_gqa(0), hp.rope_offset) == (20, 16, 16)
    plain = {"attention__key_length_mla": None, "attention__value_length_mla": None}
    hp = read(tmp_path / "m.gguf", attention__head_count_kv=6, **plain)
    assert hp.mla is not None and not hp.mla.absorbed and not hp.values_in_keys
    assert (hp.mla.n_head_k, hp.mla.n_head_v, hp.rope_offset) == (20, 16, 16)


def test_gating_where_the_file_names_none(tmp_path: Path) -> None:
    def gating(**changes: Any) -> Gating:
        experts = read(tmp_path / "m.gguf", **changes).experts
        assert experts is not None
        return experts.gating

    assert gating() == Gating.SOFTMAX
    assert gating(n_layer=47) == Gating.SOFTMAX
    assert gating(n_layer=47, vocab_size=154880) == Gating.SIGMOID  # GLM-4.7-Flash
    assert gating(n_layer=47, vocab_size=154880, expert_gating_func=1) == Gating.SOFTMAX


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__kv_lora_rank": None}, "kv_lora_rank"),
        ({"attention__kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"attention__key_length_mla": 4}, "key 4 wide .* rotates 4"),
        ({"attention__key_length": 24}, "key_length is 24 .* must be 20 and 16"),
        ({"attention__value_length": 20}, "value_length 20; .* must be 20 and 16"),
        ({"leading_dense_block_count": None}, "leading_dense_block_count"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "m.gguf", **changes)
