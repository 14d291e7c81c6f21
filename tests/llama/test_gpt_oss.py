"""gpt-oss: experts in MXFP4, windows, rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from divergence import divergences, reference, strict
from oracle import LlamaCpp
from tiny import write_tiny
from tiny_arch import ROUTED
from tiny_llama import keys, metadata

from pyggml.llama.hparams import Gating, HParams
from pyggml.llama.models import gpt_oss

MXFP4 = dict.fromkeys(ROUTED[1:], "MXFP4")


@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("repack", [True, False])
def test_experts_in_mxfp4(weight_type: str, repack: bool, tmp_path: Path) -> None:
    """As the real files: experts in MXFP4, everything else in another type."""
    path = write_tiny(tmp_path / "m.gguf", "gpt-oss", weight_type=weight_type, types=MXFP4)
    with LlamaCpp(path) as theirs:
        expected = reference(theirs)
    with strict(path, flash_attn="on", repack=repack) as ours:
        assert divergences(ours, expected).mean() < 2e-3


# ---------------------------------------------------------------- hyper-parameters
def read(path: Path, **changes: Any) -> HParams:
    sizes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 6}
    return gpt_oss.hparams(metadata(path, keys("gpt-oss", **{**sizes, **changes})))


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
