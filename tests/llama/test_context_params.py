"""Parameters of a context: what they refuse and what their zeros stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_llama import hparams

from pyggml.errors import ConfigError
from pyggml.llama.context_params import ContextParams, RopeOverrides
from pyggml.llama.hparams import RopeScaling


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_ctx": -1}, "--ctx-size -1 is too small"),
        ({"n_batch": 0}, "--batch-size 0 is too small: it must be at least 1"),
        ({"n_ubatch": -1}, "--ubatch-size -1"),
        ({"n_threads": -1}, "--threads -1"),
        ({"n_threads_batch": -2}, "--threads-batch -2"),
        ({"n_seq_max": 0}, "n_seq_max 0"),
        ({"n_seq_max": 257}, "n_seq_max 257: there can be 256 sequences"),
        ({"flash_attn": "yes"}, "--flash-attn yes: one of auto, on, off"),
        (
            {"type_k": "q9"},
            "--cache-type-k q9: one of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0",
        ),
        ({"type_v": ""}, "--cache-type-v : one of"),
        (
            {"type_v": "q8_0", "flash_attn": "off"},
            "--cache-type-v q8_0: quantized values need flash attention: leave --flash-attn off",
        ),
    ],
)
def test_mistakes_name_the_flag(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContextParams(**given)


@pytest.mark.parametrize(
    ("given", "n_ctx", "n_batch", "n_ubatch"),
    [
        ({}, 4096, 2048, 512),
        ({"n_ctx": 1}, 256, 1, 1),  # the batch is limited before the context is rounded up
        ({"n_ctx": 256}, 256, 256, 256),
        ({"n_ctx": 257}, 512, 257, 257),
        ({"n_ctx": 600, "n_ubatch": 0}, 768, 600, 600),
        ({"n_batch": 100}, 4096, 100, 100),
        ({"n_batch": 100, "n_ubatch": 7}, 4096, 100, 7),
    ],
)
def test_sizes(given: dict[str, Any], n_ctx: int, n_batch: int, n_ubatch: int) -> None:
    params = ContextParams(**given).resolved(hparams(), 3)
    assert (params.n_ctx, params.n_batch, params.n_ubatch) == (n_ctx, n_batch, n_ubatch)


@pytest.mark.parametrize(
    ("given", "threads"),
    [((0, 0), (3, 3)), ((2, 0), (2, 2)), ((0, 5), (3, 5)), ((1, 4), (1, 4))],
)
def test_threads(given: tuple[int, int], threads: tuple[int, int]) -> None:
    params = ContextParams(n_threads=given[0], n_threads_batch=given[1]).resolved(hparams(), 3)
    assert (params.n_threads, params.n_threads_batch) == threads


# ---------------------------------------------------------------- rope
ROPE = RopeScaling(freq_base=5e5, freq_scale=0.25, n_ctx_orig=8192, beta_fast=30.0)


def test_nothing_given_changes_nothing() -> None:
    assert RopeOverrides().apply(ROPE) == ROPE
    assert RopeOverrides(freq_base=0.0, freq_scale=0.0).apply(ROPE) == ROPE


def test_given_numbers_replace_the_models() -> None:
    given = RopeOverrides(
        scaling="yarn",
        freq_base=1e4,
        freq_scale=0.5,
        yarn_orig_ctx=1024,
        yarn_ext_factor=0.0,
        yarn_attn_factor=2.0,
        yarn_beta_fast=16.0,
        yarn_beta_slow=2.0,
    )
    assert given.apply(ROPE) == RopeScaling(
        freq_base=1e4,
        freq_scale=0.5,
        type="yarn",
        n_ctx_orig=1024,
        ext_factor=0.0,
        yarn_attn_factor=2.0,
        beta_fast=16.0,
        beta_slow=2.0,
    )


def test_no_scaling_squeezes_nothing_and_can_be_turned_on_again() -> None:
    assert RopeOverrides(scaling="none").apply(ROPE).freq_scale == 1.0
    off = replace(ROPE, type="none")
    assert RopeOverrides().apply(off).freq_scale == 1.0
    assert RopeOverrides(scaling="linear").apply(off).freq_scale == 0.25


def test_layers_with_a_window_keep_their_frequencies() -> None:
    own = RopeScaling(freq_base=1e4, freq_scale=1.0, n_ctx_orig=8192)
    hp = hparams(rope=ROPE, rope_swa=own, n_swa=16, is_swa=(True, True, False))
    changed = RopeOverrides(freq_base=7e5, freq_scale=0.125, yarn_beta_slow=3.0).apply_all(hp)
    assert (changed.rope.freq_base, changed.rope.freq_scale) == (7e5, 0.125)
    assert changed.rope_swa is not None
    assert (changed.rope_swa.freq_base, changed.rope_swa.freq_scale) == (1e4, 1.0)
    assert changed.rope_swa.beta_slow == 3.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"freq_base": -1.0}, "freq_base is -1, it must be positive"),
        ({"freq_base": float("nan")}, "freq_base is nan"),
        ({"freq_scale": -0.5}, "freq_scale is -0.5"),
        ({"freq_scale": float("inf")}, "freq_scale is inf"),
        ({"scaling": "yarn", "yarn_orig_ctx": -5}, "n_ctx_orig is -5"),
        ({"scaling": "yarn", "yarn_beta_fast": 0.0}, "beta_fast is 0"),
        ({"scaling": "yarn", "freq_base": 1.0}, "all frequencies would be equal"),
        ({"yarn_ext_factor": 1.0, "yarn_beta_slow": 0.0}, "beta_slow is 0"),
    ],
)
def test_useless_rope_numbers_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeOverrides(**given).apply(ROPE)


def test_unknown_scaling() -> None:
    with pytest.raises(ConfigError, match="--rope-scaling dynamic: one of none, linear, yarn"):
        RopeOverrides(scaling="dynamic")
