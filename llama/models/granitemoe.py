"""granitemoe: Granite 3 and 4 with experts, and in some a shared one; granite's scales."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, with_granite_keys
from pyggml.llama.moe import experts, moe_ffn, want_experts, want_shared
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = with_granite_keys(kv, common(kv, RopeMode.NORMAL))
    shared = kv.get_int("granitemoe.expert_shared_feed_forward_length", 0)
    found = experts(kv, hp, n_ff=hp.n_ff[0], n_ff_shared=shared, norm_weights=True)
    return replace(hp, experts=found)


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
    hp = b.hp
    x = b.embed(w["token_embd.weight"], scale=hp.embedding_scale)
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        if hp.rotates(il):
            q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(b.scale(h, hp.residual_scale, "attn_scaled", il), x, "ffn_inp", il)
        h = moe_ffn(b, layer, b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il))
        x = b.add(b.scale(h, hp.residual_scale, "ffn_scaled", il), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
