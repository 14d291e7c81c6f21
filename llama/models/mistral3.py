"""mistral3: Ministral 3 and Devstral 2 (dense); YaRN, and attention that sharpens with position."""

from dataclasses import replace

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, not_negative, refuse_experts, yarn_keys
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    refuse_experts(kv)
    temperature = not_negative(kv, "mistral3.attention.temperature_scale", 0.0)
    if temperature and hp.rope.n_ctx_orig < 1:
        raise ModelError(
            "mistral3.rope.scaling.original_context_length must be positive where "
            "mistral3.attention.temperature_scale is given"
        )
    return replace(
        hp,
        rope=yarn_keys(kv, hp.rope),
        attention_scale=not_negative(kv, "mistral3.attention.scale", 0.0),
        attn_temp_scale=temperature,
        attn_temp_length=hp.rope.n_ctx_orig,
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il], bias=True)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        if hp.attn_temp_scale:
            q = b.temper(q, il)
        h = b.attention(layer, q, k, v, scale=hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il)
        x = b.add(b.ffn(layer, h), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
