"""llama: Llama 1-3, SmolLM2, Mistral and their kin; Mixtral, which has experts."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, not_negative, require_full_rotation
from pyggml.llama.moe import experts, ffn_or_moe, want_experts
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    require_full_rotation(hp)
    if kv.get_int("llama.expert_count", 0):
        hp = replace(hp, experts=experts(kv, hp, n_ff=hp.n_ff[0], norm_weights=True))
    return replace(hp, attention_scale=not_negative(kv, "llama.attention.scale", 0.0))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        if hp.experts:
            want_experts(want, il, hp)
        else:
            want.ffn(il, hp.n_embd, hp.n_ff[il], bias=True)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", layer.il)
        q, k, v = b.qkv(layer, h)
        q, k = b.rope(q, layer.il, w), b.rope(k, layer.il, w)
        h = b.attention(layer, q, k, v, scale=hp.kq_scale)
        h, x = b.last_rows(layer.il, h, x)
        x = b.add(h, x, "ffn_inp", layer.il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", layer.il)
        x = b.add(ffn_or_moe(b, layer, h), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
