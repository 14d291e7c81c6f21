"""gpt-oss: sinks in both forms of attention, windows, experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import kl
from oracle import LlamaCpp
from tiny import VARIANTS, write_tiny
from tiny_arch import ROUTED
from tiny_llama import keys, metadata

from pyggml.llama import load
from pyggml.llama.hparams import Gating, HParams
from pyggml.llama.models import gpt_oss

LENGTHS = (1, 2, 33, 100)
MXFP4 = dict.fromkeys(ROUTED[1:], "MXFP4")


def prompt(n_vocab: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(n).integers(3, n_vocab, n)]


@pytest.mark.parametrize("variant", ["gpt-oss", "gpt-oss-yarn"])
def test_every_form_equals_llama_cpp(variant: str, tmp_path: Path) -> None:
    arch, options = VARIANTS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, **options)
    exact: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32"}
    with LlamaCpp(path, n_ctx=256) as theirs:
        prompts = [prompt(theirs.n_vocab, n) for n in LENGTHS]
        expected = [theirs.logits(ids) for ids in prompts]
        for flash_attn in ("on", "off"):
            with load(path, flash_attn=flash_attn, n_ubatch=8, **exact) as ours:
                for ids, logits in zip(prompts, expected, strict=True):
                    assert kl(logits, ours.logits(ids, all=True)).max() < 1e-6


@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("repack", [True, False])
def test_experts_in_mxfp4(weight_type: str, repack: bool, tmp_path: Path) -> None:
    """As the real files: experts in MXFP4, everything else in another type."""
    path = write_tiny(tmp_path / "m.gguf", "gpt-oss", weight_type=weight_type, types=MXFP4)
    with LlamaCpp(path, n_ctx=256) as theirs, load(path, n_ctx=256, repack=repack) as ours:
        ids = prompt(theirs.n_vocab, 100)
        # rounding may send single tokens to other experts
        assert np.median(kl(theirs.logits(ids), ours.logits(ids, all=True))) < 2e-3


# ---------------------------------------------------------------- hyper-parameters
def read(path: Path, **changes: Any) -> HParams:
    sizes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 6}
    numbers = {**sizes, **{key.replace("__", "."): item for key, item in changes.items()}}
    return gpt_oss.hparams(metadata(path, keys("gpt-oss", **numbers)))


def test_every_other_layer_has_a_window(tmp_path: Path) -> None:
    hp = read(tmp_path / "m.gguf", n_layer=4, attention__sliding_window=128)
    assert (hp.n_swa, hp.is_swa) == (128, (True, False, True, False))
    assert hp.experts is not None and hp.experts.gating == Gating.SOFTMAX_WEIGHT


def test_windowed_layers_rotate_like_the_others(tmp_path: Path) -> None:
    """In Gemma 3 they do not."""
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 32.0}
    hp = read(tmp_path / "m.gguf", attention__sliding_window=128, rope__freq_base=1.5e5, **scaling)
    assert hp.rope_swa == hp.rope and hp.rope.freq_base == 1.5e5
    hp = read(tmp_path / "m.gguf", attention__sliding_window=128, rope__freq_base_swa=1e3)
    assert hp.rope_swa is not None and hp.rope_swa.freq_base == 1e3
