"""Rows of tiny models in which most layers attend linearly (tiny.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_arch import ATTENTION, DENSE, HEAD_NORMS, ROUTED, SHARED, UNTIED, Arch, Scalar

# Of the convolution, and of a state: its heads, those of q and k, those of v.
LINEAR_SIZES = {"n_kernel": 4, "n_state": 16, "n_state_k": 3, "n_state_v": 18}

LINEAR = ("attn_norm", "attn_qkv", "attn_gate", "ssm_conv1d", "ssm_a", "ssm_dt.bias")
LINEAR += ("ssm_norm", "ssm_out", "post_attention_norm")
FULL = (*ATTENTION, *HEAD_NORMS, "post_attention_norm")
EXPERTS = (*ROUTED, *SHARED, "ffn_gate_inp_shexp")
SHAPES = {"attn_q": ("n_embd", "n_q_gate"), "attn_qkv": ("n_embd", "n_mixed")}
# Ten pairs: of time, height, width and another position.
SECTIONS: dict[str, Scalar] = {
    "rope.dimension_count": 20,
    "rope.dimension_sections": [4, 3, 3, 0],
}

# A state carries each rounding on to all later tokens: layers add little to what they get.
GENTLE = {"ssm_out": 0.1, "ffn_down_shexp": 0.3}

LINEAR_ARCHS = {
    "qwen3next": Arch(
        "qwen2",
        UNTIED,
        (*FULL, *EXPERTS),
        {"rope.freq_base": 1e6, "rope.dimension_count": 20},
        n_layer=4,
        shapes=SHAPES,
        linear=(*LINEAR, "ssm_ba", *EXPERTS),
        gains=GENTLE,
    ),
    "qwen35": Arch(
        "qwen35",
        UNTIED,
        (*FULL, *DENSE[-3:]),
        SECTIONS,
        n_layer=4,
        shapes=SHAPES,
        linear=(*LINEAR, "ssm_beta", "ssm_alpha", *DENSE[-3:]),
        gains=GENTLE,
    ),
    "qwen35moe": Arch(
        "qwen35",
        UNTIED,
        (*FULL, *EXPERTS),
        SECTIONS,
        n_layer=5,
        shapes=SHAPES,
        linear=(*LINEAR, "ssm_beta", "ssm_alpha", *EXPERTS),
        gains=GENTLE,
    ),
}

# As VARIANTS of tiny.py.
LINEAR_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # as the first files were made: q, k, v and the gate in one matrix
    "qwen3next-ssm_in": (
        "qwen3next",
        {
            "extra": tuple(f"blk.{il}.ssm_in" for il in (0, 1, 3)),
            "omit": ("attn_qkv", "attn_gate"),
        },
    ),
    # some pairs are turned by the fourth position, which is 0 for text
    "qwen35-sections": (
        "qwen35",
        {"metadata": {"rope.freq_base": 100.0, "rope.dimension_sections": [2, 1, 1, 6]}},
    ),
    "qwen35-tied": ("qwen35", {"omit": ("output",), "n_kernel": 3}),
    # a layer at the end that only predicts more tokens
    "qwen35moe-next_n": (
        "qwen35moe",
        {
            "n_layer": 6,
            "extra": tuple(f"blk.5.nextn.{part}" for part in ("eh_proj", "enorm", "hnorm")),
            "metadata": {"nextn_predict_layers": 1},
        },
    ),
}


def linear_sizes(size: Mapping[str, int]) -> dict[str, int]:
    """Sizes that follow from others."""
    n_value = size["n_state"] * size["n_state_v"]
    n_mixed = 2 * size["n_state"] * size["n_state_k"] + n_value
    return {
        "n_q_gate": 2 * size["n_q"],
        "n_value": n_value,
        "n_mixed": n_mixed,
        "n_mixed_gate": n_mixed + n_value,
        "n_beta_alpha": 2 * size["n_state_v"],
    }


def linear_keys(size: Mapping[str, int]) -> dict[str, Scalar]:
    """The keys of layers that attend linearly."""
    return {
        "full_attention_interval": 3,
        "ssm.conv_kernel": size["n_kernel"],
        "ssm.state_size": size["n_state"],
        "ssm.group_count": size["n_state_k"],
        "ssm.time_step_rank": size["n_state_v"],
        "ssm.inner_size": size["n_value"],
    }
