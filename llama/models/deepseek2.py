"""deepseek2: models with latent attention and, after a few layers, experts.

DeepSeek-V2, V3 and R1, Kimi K2, Moonlight, GLM-4.7-Flash, Mistral Large 3.
"""

import math
from dataclasses import replace

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder, rope_params
from pyggml.llama.hparams import Experts, Gating, HParams, common, not_negative, without_nextn
from pyggml.llama.mla import latent_attention, latent_qkv, want_latent_attention
from pyggml.llama.moe import (
    experts,
    ffn_or_moe,
    leading_dense,
    routing,
    shared_width,
    want_ffn_or_moe,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor

GLM_LAYERS, GLM_VOCAB = (47, 48), 154880  # GLM-4.7-Flash, whose first files name no gating


def hparams(kv: Metadata) -> HParams:
    hp = without_nextn(kv, common(kv, RopeMode.NORMAL))
    # the file holds a tenth of it
    mscale = kv.get_float("deepseek2.rope.scaling.yarn_log_multiplier", 0.0) * 10
    rope = replace(hp.rope, mscale=mscale or 1.0, log_multiplier=mscale)
    temperature = not_negative(kv, "deepseek2.attention.temperature_scale", 0.0)
    stretch = kv.get_int("deepseek2.attention.temperature_length", 0)
    if temperature and stretch < 1:
        raise ModelError(
            f"deepseek2.attention.temperature_length is {stretch}; it must be positive where "
            "deepseek2.attention.temperature_scale is given"
        )
    return replace(
        hp,
        rope=rope,
        mla=latent_attention(kv, hp),
        experts=_experts(kv, hp),
        attn_temp_scale=temperature,
        attn_temp_length=stretch,
    )


def _experts(kv: Metadata, hp: HParams) -> Experts:
    n_ff = kv.get_int("deepseek2.expert_feed_forward_length")
    found = experts(kv, hp, n_ff=n_ff, n_ff_shared=shared_width(kv, n_ff))
    is_glm = hp.n_layer in GLM_LAYERS and hp.n_vocab == GLM_VOCAB
    found = routing(kv, found, Gating.SIGMOID if is_glm else Gating.SOFTMAX)
    return replace(found, n_dense=leading_dense(kv, hp))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want_latent_attention(want, il, hp)
        want.norm(il, "ffn_norm", hp.n_embd)
        want_ffn_or_moe(want, il, hp, selection_bias=False)
    want.ignore_nextn(hp)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", layer.il)
        q, k, v = latent_qkv(b, layer, h, w)
        h = b.attention(layer, q, k, v, scale=kq_scale(hp))
        h, x = b.last_rows(layer.il, h, x)
        x = b.add(h, x, "ffn_inp", layer.il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", layer.il)
        x = b.add(ffn_or_moe(b, layer, h), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])


def kq_scale(hp: HParams) -> float:
    """Grows with the factor that positions are squeezed by, also if it is not YaRN that does it."""
    mla, rope = hp.mla, hp.rope
    assert mla is not None
    growth = -0.1 * math.log(rope.freq_scale)
    mscale = rope_params(hp, rope).attn_factor * (1.0 + growth)
    mscale *= 1.0 + rope.log_multiplier * growth
    return mscale * mscale / math.sqrt(mla.n_head_k)
