"""deepseek: DeepSeek-MoE and other models of the first generation."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, require_full_rotation
from pyggml.llama.moe import (
    experts,
    ffn_or_moe,
    leading_dense,
    shared_width,
    want_ffn_or_moe,
    weights_scale,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    require_full_rotation(hp)
    n_ff = kv.get_int("deepseek.expert_feed_forward_length")
    found = experts(kv, hp, n_ff=n_ff, n_ff_shared=shared_width(kv, n_ff))
    found = replace(found, n_dense=leading_dense(kv, hp), weights_scale=weights_scale(kv))
    return replace(hp, experts=found)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want_ffn_or_moe(want, il, hp)
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
        x = b.add(ffn_or_moe(b, layer, h), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
