"""What tiny models are made of: shapes of tensors, usual groups of them, and what a row holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = bool | int | float | str | list[int] | None  # a key without value is left out

# In ggml order: columns (the inputs) first. One dimension is a norm.
SHAPES: dict[str, tuple[str, ...]] = {
    "token_embd": ("n_embd", "n_vocab"),
    "output": ("n_embd", "n_vocab"),
    "attn_q": ("n_embd", "n_q"),
    "attn_k": ("n_embd", "n_kv"),
    "attn_v": ("n_embd", "n_kv"),
    "attn_qkv": ("n_embd", "n_qkv"),
    "attn_output": ("n_attn_out", "n_embd"),
    "attn_q_a": ("n_embd", "n_lora_q"),
    "attn_q_a_norm": ("n_lora_q",),
    "attn_q_b": ("n_lora_q", "n_q"),
    "attn_kv_a_mqa": ("n_embd", "n_latent"),
    "attn_kv_a_norm": ("n_lora_kv",),
    "attn_kv_b": ("n_lora_kv", "n_kv_b"),
    "attn_k_b": ("n_nope", "n_lora_kv", "n_head"),
    "attn_v_b": ("n_lora_kv", "n_head_v", "n_head"),
    "attn_sinks": ("n_head",),
    "ffn_gate": ("n_embd", "n_ff"),
    "ffn_up": ("n_embd", "n_ff"),
    "ffn_down": ("n_ff", "n_embd"),
    "ffn_gate_inp": ("n_embd", "n_expert"),
    "ffn_gate_exps": ("n_embd", "n_ff_exp", "n_expert"),
    "ffn_up_exps": ("n_embd", "n_ff_exp", "n_expert"),
    "ffn_down_exps": ("n_ff_exp", "n_embd", "n_expert"),
    "ffn_gate_shexp": ("n_embd", "n_ff_shexp"),
    "ffn_up_shexp": ("n_embd", "n_ff_shexp"),
    "ffn_down_shexp": ("n_ff_shexp", "n_embd"),
    "ffn_gate_inp_shexp": ("n_embd",),
    "ffn_gate_up_exps": ("n_embd", "n_gate_up_exps", "n_expert"),
    "exp_probs_b": ("n_embd", "n_expert"),  # there is only its bias
    "attn_gate": ("n_embd", "n_value"),
    "ssm_conv1d": ("n_kernel", "n_mixed"),
    "ssm_a": ("n_state_v",),
    "ssm_dt": ("n_embd", "n_state_v"),  # there is only its bias
    "ssm_in": ("n_embd", "n_mixed_gate"),
    "ssm_ba": ("n_embd", "n_beta_alpha"),
    "ssm_beta": ("n_embd", "n_state_v"),
    "ssm_alpha": ("n_embd", "n_state_v"),
    "ssm_norm": ("n_state",),
    "ssm_out": ("n_value", "n_embd"),
    "eh_proj": ("n_embd_twice", "n_embd"),
    "enorm": ("n_embd",),
    "hnorm": ("n_embd",),
    "shared_head_norm": ("n_embd",),
    "output_norm": ("n_embd",),
    "attn_norm": ("n_embd",),
    "attn_q_norm": ("head_dim",),
    "attn_k_norm": ("head_dim",),
    "post_attention_norm": ("n_embd",),
    "ffn_norm": ("n_embd",),
    "post_ffw_norm": ("n_embd",),
}
LONGROPE = ("rope_factors_long", "rope_factors_short")
TOP_ONLY = ("rope_freqs", *LONGROPE)
# Standard deviation of a tensor's outputs where it is not that of its inputs: the logits spread
# by 2, which leaves about a tenth of the vocabulary likely.
GAINS = {"token_embd": 2.0, "output": 2.0, "ffn_gate_inp": 2.0, "attn_sinks": 2.0}
GAINS |= {"ffn_down_exps": 0.3}  # near relatives add up
# How far the values of other experts are from those of the first, as a part of their difference
# in a model of strangers. Activations of 8 bits are rounded by each program in its own way, which
# now and then turns a near-tie of the router: between strangers the distribution would then be
# another one altogether, and the mean over a few hundred positions would count such ties. So
# experts are near relatives, as in upcycled models. In F32 the wrong one is seen all the same:
# tests/llama/test_wrong_experts.py.
EXPERT_SPREAD = 0.1

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
DENSE = (*ATTENTION, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
FUSED = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
FUSED_SHAPES = {"ffn_up": ("n_embd", "n_gate_up")}
QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
ROUTED = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
POST_NORMS = ("post_attention_norm", "post_ffw_norm")
TIED = ("token_embd", "output_norm")
UNTIED = (*TIED, "output")
YARN: dict[str, Scalar] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
LONGROPE_KEYS: dict[str, Scalar] = {"rope.scaling.type": "longrope"}
# What Granite's files scale, and gains that leave logits as spread as elsewhere.
GRANITE: dict[str, Scalar] = {
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "attention.scale": 0.25,
    "logit_scale": 2.0,
}
GRANITE_GAINS = {"token_embd": 0.2, "output_norm": 20.0}


@dataclass(frozen=True, slots=True)
class Arch:
    """What a GGUF file of one architecture holds."""

    vocab: str  # a row of VOCABS
    top: tuple[str, ...]  # tensors outside the layers
    layer: tuple[str, ...]  # tensors of each layer
    metadata: Mapping[str, Scalar]  # "<arch>." keys beyond the common ones
    n_layer: int = 2
    gains: Mapping[str, float] = field(default_factory=dict)  # where not as in GAINS
    square: bool = False  # the heads must add up to n_embd
    sizes: Mapping[str, str] = field(default_factory=dict)  # numbers, or like "2*n_ff"
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # where not as in SHAPES
    first: tuple[str, ...] = ()  # tensors of the first layer, if not those of `layer`
    linear: tuple[str, ...] = ()  # tensors of layers that attend linearly: two of three

    @property
    def has_experts(self) -> bool:
        return "ffn_gate_inp" in self.layer
