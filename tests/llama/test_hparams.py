"""Hyper-parameters: llama.cpp's keys and defaults, and what hostile or damaged ones lead to."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_llama import keys, metadata

from pyggml.errors import ConfigError, ModelError, UserError
from pyggml.gguf import ValueType, parse_override
from pyggml.llama import architectures
from pyggml.llama.hparams import HParams, RopeScaling
from pyggml.ops import RopeMode

I32_ARRAY = bytes([ValueType.ARRAY]) + struct.pack("<IQ", ValueType.INT32, 3)


def read(tmp_path: Path, arch: str = "llama", n_layer: int = 3, **changes: Any) -> HParams:
    items = keys(arch, n_layer, **changes)
    return architectures.find(arch).hparams(metadata(tmp_path / "m.gguf", items))


# ---------------------------------------------------------------- defaults
def test_defaults(tmp_path: Path) -> None:
    hp = read(tmp_path)
    assert (hp.arch, hp.name, hp.n_vocab, hp.n_layer) == ("llama", "", 10, 3)
    assert (hp.n_head, hp.n_head_kv, hp.n_ff) == ((6,) * 3, (3,) * 3, (8,) * 3)
    assert (hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (4, 4, 4)
    assert (hp.n_embd_k_gqa(0), hp.n_embd_v_gqa(0)) == (12, 12)
    assert hp.kq_scale == 0.5
    assert hp.rope == RopeScaling(n_ctx_orig=4096)
    assert not any(hp.swa(il) for il in range(3)) and hp.rope_swa is None
    assert hp.rope_mode == RopeMode.NORMAL


def test_one_kv_head_per_head_unless_the_file_says(tmp_path: Path) -> None:
    assert read(tmp_path, attention__head_count_kv=None).n_head_kv == (6,) * 3


def test_values_of_the_file(tmp_path: Path) -> None:
    hp = read(
        tmp_path,
        "qwen3",
        attention__key_length=8,
        attention__value_length=2,
        rope__dimension_count=6,
        rope__freq_base=1e6,
        attention__layer_norm_rms_epsilon=0.25,
    )
    assert (hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (8, 2, 6)
    assert (hp.n_embd_k_gqa(1), hp.n_embd_v_gqa(1)) == (24, 6)
    assert hp.rope.freq_base == 1e6 and hp.rms_eps == 0.25
    assert hp.rope_mode == RopeMode.NEOX


def test_attention_scale_of_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, attention__scale=0.125).kq_scale == 0.125
    assert read(tmp_path, attention__scale=0.0).kq_scale == 0.5


def test_the_name_can_be_shown_on_a_terminal(tmp_path: Path) -> None:
    items = keys() | {"general.name": "Tiny\x1b[2J\nModel "}
    hp = architectures.find("llama").hparams(metadata(tmp_path / "m.gguf", items))
    assert hp.name == "Tiny [2J Model"


def test_values_per_layer(tmp_path: Path) -> None:
    hp = read(
        tmp_path,
        attention__head_count=[6, 2, 4],
        attention__head_count_kv=[3, 1, 4],
        feed_forward_length=[8, 9, 10],
    )
    assert (hp.n_head, hp.n_head_kv, hp.n_ff) == ((6, 2, 4), (3, 1, 4), (8, 9, 10))


def test_the_vocabulary_counts_its_tokens(tmp_path: Path) -> None:
    items = keys() | {"tokenizer.ggml.tokens": [1, 2, 3, 4]}
    hp = architectures.find("llama").hparams(metadata(tmp_path / "m.gguf", items))
    assert hp.n_vocab == 4  # not vocab_size


# ---------------------------------------------------------------- rope
@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({"rope__scaling__factor": 8.0}, 0.125),
        ({"rope__scale_linear": 4.0}, 0.25),
        ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, 0.5),
        ({"rope__scaling__factor": 0.0}, 1.0),
    ],
)
def test_rope_factor(tmp_path: Path, given: dict[str, Any], scale: float) -> None:
    assert read(tmp_path, **given).rope.freq_scale == scale


def test_yarn_keys(tmp_path: Path) -> None:
    rope = read(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=1024,
        rope__scaling__attn_factor=1.5,
    ).rope
    assert rope == RopeScaling(
        freq_scale=0.25,
        type="yarn",
        n_ctx_orig=1024,
        attn_factor=1.5,
    )


@pytest.mark.parametrize(
    ("type_", "ext_factor", "extrapolation"),
    [("linear", -1.0, 0.0), ("yarn", -1.0, 1.0), ("yarn", 0.0, 0.0), ("linear", 0.5, 0.5)],
)
def test_extrapolation(type_: str, ext_factor: float, extrapolation: float) -> None:
    scaling = RopeScaling(type=type_, ext_factor=ext_factor, n_ctx_orig=1)
    assert scaling.extrapolation == extrapolation


# ---------------------------------------------------------------- sliding windows
@pytest.mark.parametrize(
    ("pattern", "is_swa"),
    [
        (None, [True] * 5 + [False] + [True]),
        (3, [True, True, False, True, True, False, True]),
        (1, [False] * 7),
        (0, [True] * 7),
        (2**32 - 1, [True] * 7),
        ([True, False, False, True, True, False, False], [1, 0, 0, 1, 1, 0, 0]),
        ([0, 2, 0, 0, 0, 0, -1], [0, 1, 0, 0, 0, 0, 1]),
    ],
)
def test_which_layers_have_a_window(tmp_path: Path, pattern: Any, is_swa: list[int]) -> None:
    hp = read(
        tmp_path,
        "gemma3",
        7,
        attention__sliding_window=16,
        attention__sliding_window_pattern=pattern,
    )
    assert [hp.swa(il) for il in range(7)] == [bool(x) for x in is_swa]


def test_layers_with_a_window_rotate_in_their_own_way(tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "attention__sliding_window": 16,
        "rope__freq_base": 1e6,
        "rope__scaling__factor": 8.0,
    }
    swa = read(tmp_path, "gemma3", **window).rope_swa
    assert swa is not None and (swa.freq_base, swa.freq_scale) == (1e4, 1.0)
    swa = read(tmp_path, "gemma3", rope__freq_base_swa=2e4, **window).rope_swa
    assert swa is not None and swa.freq_base == 2e4


def test_no_window(tmp_path: Path) -> None:
    hp = read(tmp_path, "gemma3", attention__sliding_window_pattern=3)
    assert hp.n_swa == 0 and hp.is_swa == () and hp.rope_swa is None


def test_a_window_without_end_hides_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "gemma3", attention__sliding_window=2**32 - 1).n_swa == 1 << 30


@pytest.mark.parametrize(("n_layer", "scale"), [(61, 4**-0.5), (62, (24 / 6) ** -0.5)])
def test_scale_of_gemma3(tmp_path: Path, n_layer: int, scale: float) -> None:
    assert read(tmp_path, "gemma3", n_layer).kq_scale == scale
    wide = read(tmp_path, "gemma3", n_layer, attention__key_length=16)
    assert wide.kq_scale == (scale if n_layer == 62 else 0.25)


# ---------------------------------------------------------------- mistakes
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_count": 0}, r"llama.block_count is 0; it must lie in 1..512"),
        ({"block_count": 2**31}, r"llama.block_count is 2147483648"),
        ({"block_count": 513}, r"block_count is 513"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"context_length": 0}, "context_length is 0"),
        ({"feed_forward_length": 0}, "feed_forward_length is 0"),
        ({"feed_forward_length": None}, "feed_forward_length is 0"),
        ({"feed_forward_length": [8, -8, 8]}, "feed_forward_length is -8"),
        ({"feed_forward_length": [8, 8]}, r"wrong array length: expected 3 .*, got 2"),
        ({"attention__head_count": 0}, "head_count is 0"),
        ({"attention__head_count_kv": 0}, "head_count_kv 0"),
        ({"attention__head_count_kv": 4}, "head_count is 6 and head_count_kv 4"),
        ({"attention__head_count_kv": 2**32 - 1}, "head_count_kv 4294967295"),
        ({"attention__head_count": [6, 6]}, "wrong array length"),
        ({"attention__head_count": [6, 0, 6]}, "head_count is 0"),
        ({"attention__head_count_kv": [3, -3, 3]}, "head_count_kv -3"),
        ({"attention__head_count": 48, "attention__head_count_kv": 48}, "key_length is 0"),
        ({"attention__key_length": 0}, "key_length is 0"),
        ({"attention__value_length": 0}, "value_length is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": None}, "key not found in model: llama.vocab_size"),
        ({"rope__dimension_count": 3}, "dimension_count is 3; it must be even"),
        ({"rope__dimension_count": 0}, "dimension_count is 0"),
        ({"rope__dimension_count": 2}, "dimension_count is 2; it must be the head size 4"),
        ({"rope__dimension_count": 6}, "at most the head size 4"),
        ({"attention__layer_norm_rms_epsilon": NAN}, "rms_epsilon is nan"),
        ({"attention__layer_norm_rms_epsilon": INF}, "rms_epsilon is inf"),
        ({"attention__layer_norm_rms_epsilon": -1e-5}, "rms_epsilon is -1e-05"),
        ({"attention__scale": NAN}, "attention.scale is nan"),
        ({"rope__freq_base": NAN}, "freq_base is nan"),
        ({"rope__freq_base": 0.0}, "freq_base is 0, it must be positive"),
        ({"rope__freq_base": -1e4}, "freq_base is -10000"),
        ({"rope__scaling__factor": NAN}, "freq_scale is nan"),
        ({"rope__scaling__factor": -2.0}, "freq_scale is -0.5"),
        ({"rope__scaling__factor": INF}, "freq_scale is 0"),
        ({"rope__scaling__factor": 1e-40}, "freq_scale is 1"),
        ({"rope__scaling__type": "dynamic"}, "'dynamic'; known are none, linear, yarn"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 0},
            "n_ctx_orig is 0",
        ),
        ({"expert_count": 8}, "key not found in model: llama.expert_used_count"),
    ],
)
def test_impossible_numbers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **change)


def test_no_experts_is_a_dense_model(tmp_path: Path) -> None:
    assert read(tmp_path, expert_count=0).n_layer == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention__sliding_window": 16, "rope__freq_base_swa": 0.0}, "freq_base is 0"),
        ({"final_logit_softcapping": NAN}, "softcapping is nan"),
        (
            {"attention__sliding_window": 16, "attention__sliding_window_pattern": [True] * 2},
            "wrong array length",
        ),
        (
            {"attention__sliding_window": 16, "attention__sliding_window_pattern": 3.0},
            "wrong type f32",
        ),
    ],
)
def test_impossible_numbers_of_gemma3(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, "gemma3", **change)


@pytest.mark.parametrize("key", [k for k in keys() if not k.endswith("head_count_kv")])
@pytest.mark.parametrize("bad", [None, "text", True, [1, 2, 3, 4]], ids=str)
def test_required_keys_missing_or_of_another_type(tmp_path: Path, key: str, bad: Any) -> None:
    items = {k: v for k, v in (keys() | {key: bad}).items() if v is not None}
    kv = metadata(tmp_path / "m.gguf", items)
    with pytest.raises(ModelError, match=f"{key}|unknown model architecture: 'text'"):
        architectures.find(kv.get_str("general.architecture")).hparams(kv)


ODD = st.one_of(
    st.none(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 64),
    st.floats(width=32),
    st.booleans(),
    st.text("ab", max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=3, max_size=3),
)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arch=st.sampled_from(architectures.known()),
    changes=st.dictionaries(
        st.sampled_from(
            [
                *keys(),
                *(
                    f"llama.{key}"
                    for key in (
                        "attention.key_length",
                        "attention.value_length",
                        "attention.scale",
                        "attention.sliding_window",
                        "attention.sliding_window_pattern",
                        "final_logit_softcapping",
                        "rope.dimension_count",
                        "rope.freq_base",
                        "rope.freq_base_swa",
                        "rope.scaling.type",
                        "rope.scaling.factor",
                        "rope.scaling.original_context_length",
                    )
                ),
            ]
        ),
        ODD,
        max_size=3,
    ),
)
def test_any_metadata_gives_numbers_or_an_error_for_people(
    tmp_path: Path, arch: str, changes: dict[str, Any]
) -> None:
    items = keys(arch)
    for key, item in changes.items():
        items[key.replace("llama.", f"{arch}.")] = item
    kv = metadata(tmp_path / "m.gguf", {k: v for k, v in items.items() if v is not None})
    try:
        hp = architectures.find(kv.get_str("general.architecture")).hparams(kv)
    except UserError:
        return
    assert hp.kq_scale > 0
    assert len(list(architectures.find(hp.arch).weights(hp))) < 20 * 512


def test_an_override_must_fit(tmp_path: Path) -> None:
    kv = metadata(tmp_path / "m.gguf", keys())
    more = kv.with_overrides([parse_override("llama.context_length=int:100")])
    assert architectures.find("llama").hparams(more).n_ctx_train == 100
    bad = kv.with_overrides([parse_override("llama.context_length=int:-1")])
    with pytest.raises(ConfigError, match="llama.context_length=int:-1"):
        architectures.find("llama").hparams(bad)


# ---------------------------------------------------------------- architectures
@pytest.mark.parametrize("name", ["nonsense", "", "llama ", "Llama", "../llama", "__init__"])
def test_unknown_architectures(name: str) -> None:
    with pytest.raises(ModelError, match="unknown model architecture") as caught:
        architectures.find(name)
    assert repr(name) in str(caught.value)
    _, known = str(caught.value).split("known are: ")
    assert {"gemma3", "llama", "qwen2", "qwen3"} <= set(known.split(", "))
