"""Rows of tiny models: DeepSeek and kin with latent attention, and gpt-oss (tiny.py)."""

from __future__ import annotations

from typing import Any

from tiny_arch import (
    ATTENTION,
    DENSE,
    LONGROPE,
    LONGROPE_KEYS,
    QKV_BIAS,
    ROUTED,
    SHARED,
    TIED,
    UNTIED,
    YARN,
    Arch,
    Scalar,
)
from tiny_moe import NEXTN

# absorbed: attn_kv_b is divided in two
LATENT = ("attn_norm", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa")
LATENT += ("attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")
PLAIN = tuple("attn_kv_b" if name == "attn_k_b" else name for name in LATENT if name != "attn_v_b")
SIZES = {"n_lora_q": "96", "n_lora_kv": "64", "n_nope": "32", "n_rot": "24", "head_dim": "56"}
SIZES |= {"n_head_v": "48"}

LATENT_ARCHS = {
    "deepseek": Arch(
        "deepseek-llm",
        UNTIED,
        (*ATTENTION, "ffn_norm", *ROUTED, *SHARED),
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
        n_layer=3,
        first=DENSE,
        square=True,
        sizes={"n_ff_exp": "288", "n_ff_shexp": "576"},
    ),
    "deepseek2": Arch(
        "deepseek-v3",
        UNTIED,
        (*LATENT, "ffn_norm", *ROUTED, *SHARED, "exp_probs_b.bias"),
        {
            "attention.q_lora_rank": "n_lora_q",
            "attention.kv_lora_rank": "n_lora_kv",
            "attention.head_count_kv": 1,
            "attention.key_length": "n_latent",
            "attention.value_length": "n_lora_kv",
            "attention.key_length_mla": "head_dim",
            "attention.value_length_mla": "n_head_v",
            "rope.dimension_count": "n_rot",
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
        },
        n_layer=3,
        first=(*LATENT, *DENSE[-4:]),
        # three products in a row make a score
        gains={"attn_q_b": 0.5, "attn_output": 2.0, "ffn_down_shexp": 0.3, "ffn_down_exps": 0.6},
        sizes={**SIZES, "n_ff_exp": "288", "n_ff_shexp": "576"},
    ),
    "minicpm3": Arch(
        "spm",
        TIED,
        (*PLAIN, *DENSE[-4:]),
        {
            "attention.q_lora_rank": "n_lora_q",
            "attention.kv_lora_rank": "n_lora_kv",
            "attention.head_count_kv": "n_head",
            "attention.value_length": "n_head_v",
            "rope.dimension_count": "n_rot",
        },
        n_layer=3,
        # fixed scales: 12 of the embedding, 256 / n_embd = 2 of the logits
        gains={"token_embd": 0.2, "output_norm": 5.0},
        sizes=SIZES,
    ),
    "gpt-oss": Arch(
        "gpt-4o",
        UNTIED,
        (
            *(*ATTENTION, *QKV_BIAS, "attn_output.bias", "attn_sinks", "post_attention_norm"),
            *(*ROUTED, *(f"{name}.bias" for name in ROUTED)),
        ),
        {"rope.freq_base": 1.5e5, "attention.sliding_window": 16},
        n_layer=3,
    ),
}

# A variant with queries made at once. llama.cpp knows it by its number of layers, which makes it
# too large for tests of all variants.
LITE: tuple[str, dict[str, Any]] = (
    "deepseek2",
    {
        "extra": ("attn_q",),
        "omit": ("attn_q_a", "attn_q_a_norm", "attn_q_b", "exp_probs_b.bias"),
        "n_layer": 26,
        "metadata": {"attention.q_lora_rank": None},
    },
)

V3_ROUTING: dict[str, Scalar] = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}

LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm3-longrope": (
        "minicpm3",
        {
            "extra": LONGROPE,
            "metadata": {**LONGROPE_KEYS, "rope.scaling.original_context_length": 64},
        },
    ),
    "deepseek2-plain": (
        "deepseek2",
        {
            "extra": ("attn_kv_b",),
            "omit": ("attn_k_b", "attn_v_b"),
            "metadata": {
                "attention.head_count_kv": "n_head",
                "attention.key_length": "head_dim",
                "attention.value_length": "n_head_v",
                "attention.key_length_mla": None,
                "attention.value_length_mla": None,
            },
        },
    ),
    "deepseek2-v3": ("deepseek2", {"metadata": V3_ROUTING}),
    "deepseek2-yarn": (
        "deepseek2",
        {"metadata": {**YARN, "rope.scaling.yarn_log_multiplier": 0.0707}},
    ),
    "deepseek2-v3-yarn": (
        "deepseek2",
        {"metadata": {**V3_ROUTING, **YARN, "rope.scaling.yarn_log_multiplier": 0.1}},
    ),
    "deepseek2-nextn": (
        "deepseek2",
        {"n_layer": 4, "extra": NEXTN, "metadata": {"nextn_predict_layers": 1}},
    ),
    "deepseek2-temperature": (
        "deepseek2",
        {
            "metadata": {
                "attention.temperature_scale": 0.5,
                "attention.temperature_length": 16,
            },
        },
    ),
    "gpt-oss-yarn": ("gpt-oss", {"metadata": YARN}),
}
