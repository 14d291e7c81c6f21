"""Rows of tiny models with experts (tiny.py)."""

from __future__ import annotations

from typing import Any

from tiny_arch import (
    ATTENTION,
    DENSE,
    GRANITE,
    GRANITE_GAINS,
    HEAD_NORMS,
    QKV_BIAS,
    ROUTED,
    SHARED,
    TIED,
    UNTIED,
    Arch,
)

NEXTN = tuple(f"blk.3.nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm"))
BIASES_OF_PHIMOE = (*QKV_BIAS, "attn_output.bias", "attn_norm.bias", "ffn_norm.bias")

MOE_ARCHS = {
    "qwen3moe": Arch(
        "qwen2", UNTIED, (*ATTENTION, "ffn_norm", *HEAD_NORMS, *ROUTED), {"rope.freq_base": 1e6}
    ),
    "qwen2moe": Arch(
        "qwen2",
        UNTIED,
        (*ATTENTION, *QKV_BIAS, "ffn_norm", *ROUTED, *SHARED, "ffn_gate_inp_shexp"),
        {"rope.freq_base": 1e6},
        square=True,
    ),
    "glm4moe": Arch(
        "qwen2",
        UNTIED,
        (*ATTENTION, *QKV_BIAS, "post_attention_norm", *ROUTED, "exp_probs_b.bias", *SHARED),
        {
            "rope.dimension_count": 16,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
        },
        n_layer=3,
        first=(*ATTENTION, *QKV_BIAS, "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down"),
        sizes={"n_ff_shexp": "2*n_ff_exp"},
    ),
    "dots1": Arch(
        "qwen2",
        UNTIED,
        (*ATTENTION, *HEAD_NORMS, "ffn_norm", *ROUTED, "exp_probs_b.bias", *SHARED),
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
        },
        n_layer=3,
        first=(*DENSE, *HEAD_NORMS),
        sizes={"n_head_kv": "n_head", "n_ff_shexp": "2*n_ff_exp"},
    ),
    "bailingmoe": Arch(
        "qwen2",
        UNTIED,
        (*ATTENTION, "ffn_norm", *ROUTED, *SHARED),
        {
            "leading_dense_block_count": 0,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
        sizes={"n_ff_shexp": "2*n_ff_exp"},
    ),
    "hunyuan-moe": Arch(
        "qwen2",
        TIED,
        (*ATTENTION, *HEAD_NORMS, "ffn_norm", *ROUTED, *SHARED),
        {},
        sizes={"n_ff_exp": "n_ff"},
    ),
    "olmoe": Arch(
        "dbrx",
        UNTIED,
        (*ATTENTION, *HEAD_NORMS, "ffn_norm", *ROUTED),
        {},
        square=True,
        sizes={"n_ff_exp": "n_ff", "n_head_kv": "n_head"},
        shapes={"attn_q_norm": ("n_q",), "attn_k_norm": ("n_kv",)},
    ),
    "granitemoe": Arch(
        "refact",
        TIED,
        (*ATTENTION, "ffn_norm", *ROUTED, *SHARED),
        GRANITE,
        gains=GRANITE_GAINS,
        sizes={"n_ff_exp": "n_ff"},
    ),
    "phimoe": Arch(
        "spm",
        (*UNTIED, "output_norm.bias", "output.bias"),
        (*ATTENTION, *BIASES_OF_PHIMOE, "ffn_norm", *ROUTED),
        {"rope.scaling.attn_factor": 1.2},
        square=True,
        sizes={"n_ff_exp": "n_ff"},
    ),
    "ernie4_5-moe": Arch(
        "qwen2",
        TIED,
        (*ATTENTION, "ffn_norm", *ROUTED, "exp_probs_b.bias", *SHARED),
        {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
        n_layer=3,
        first=DENSE,
    ),
    "bailingmoe2": Arch(
        "qwen2",
        UNTIED,
        ("attn_norm", "attn_qkv", "attn_output", *HEAD_NORMS, "ffn_norm", *ROUTED, *SHARED)
        + ("exp_probs_b.bias",),
        {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
        n_layer=3,
        square=True,
        first=("attn_norm", "attn_qkv", "attn_output", *HEAD_NORMS, *DENSE[5:]),
    ),
}

# As VARIANTS of tiny.py.
MOE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-experts": (
        "llama",
        {
            "extra": ROUTED,
            "omit": DENSE[-3:],
            "metadata": {"expert_count": 12, "expert_used_count": 2},
            "n_ff_exp": "n_ff",
        },
    ),
    "llama-scaled_experts": (
        "llama",
        {
            "extra": (*ROUTED, *(f"{name}.scale" for name in ROUTED[1:])),
            "omit": DENSE[-3:],
            "metadata": {"expert_count": 12, "expert_used_count": 3},
            "n_ff_exp": "n_ff",
        },
    ),
    "qwen3moe-one": ("qwen3moe", {"metadata": {"expert_used_count": 1}}),
    "qwen3moe-all": ("qwen3moe", {"metadata": {"expert_used_count": 12}}),
    "qwen2moe-widths": (
        "qwen2moe",
        {
            "metadata": {
                "expert_feed_forward_length": 0,
                "expert_shared_feed_forward_length": 0,
            },
            "n_ff": "3*n_ff_exp",
            "n_ff_shexp": "n_ff",
        },
    ),
    "dots1-softmax": ("dots1", {"metadata": {"expert_gating_func": 1}}),
    "dots1-softmax_weight": ("dots1", {"metadata": {"expert_gating_func": 3}}),
    "dots1-sqrt_softplus": ("dots1", {"metadata": {"expert_gating_func": 4}}),
    "dots1-groups": (
        "dots1",
        {"metadata": {"expert_group_count": 3, "expert_group_used_count": 1}},
    ),
    "dots1-unbiased": (
        "dots1",
        {"omit": ("exp_probs_b.bias",), "metadata": {"expert_weights_norm": False}},
    ),
    "glm4moe-normed": ("glm4moe", {"extra": HEAD_NORMS}),
    "glm4moe-sections": ("glm4moe", {"metadata": {"rope.dimension_sections": [4, 2, 2, 0]}}),
    "glm4moe-nextn": (
        "glm4moe",
        {"n_layer": 4, "extra": NEXTN, "metadata": {"nextn_predict_layers": 1}},
    ),
    "granitemoe-unshared": (
        "granitemoe",
        {"omit": SHARED, "metadata": {"expert_shared_feed_forward_length": 0}},
    ),
}
