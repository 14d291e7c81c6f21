"""granite: Granite 3 and 4 (dense); embedding, residual, attention and logits have scales."""

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, refuse_experts, with_granite_keys
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    refuse_experts(kv)
    return with_granite_keys(kv, common(kv, RopeMode.NORMAL))


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
        h = b.ffn(layer, b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il))
        x = b.add(b.scale(h, hp.residual_scale, "ffn_scaled", il), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
