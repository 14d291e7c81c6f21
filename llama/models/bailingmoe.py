"""bailingmoe: Ling (lite and plus); experts and a shared one in every layer."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.moe import (
    experts,
    moe_ffn,
    shared_width,
    want_experts,
    want_shared,
    weights_scale,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    n_ff = kv.get_int("bailingmoe.expert_feed_forward_length")
    found = experts(
        kv,
        hp,
        n_ff=n_ff,
        n_ff_shared=shared_width(kv, n_ff),
        norm_weights=kv.get_bool("bailingmoe.expert_weights_norm", False),
    )
    return replace(hp, experts=replace(found, weights_scale=weights_scale(kv)))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want_experts(want, il, hp)
        want_shared(want, il, hp)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", layer.il)
        q, k, v = b.qkv(layer, h)
        q, k = b.rope(q, layer.il, w), b.rope(k, layer.il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(layer.il, h, x)
        x = b.add(h, x, "ffn_inp", layer.il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", layer.il)
        x = b.add(moe_ffn(b, layer, h), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
