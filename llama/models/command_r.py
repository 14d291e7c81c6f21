"""command-r: Command R (35B); layer norms without bias, attention beside the feed-forward."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, not_negative
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL, layer_norm=True)
    return replace(hp, logit_scale=not_negative(kv, "command-r.logit_scale", 0.0) or 1.0)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        normed = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, normed)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x, normed = b.last_rows(il, h, x, normed)
        x = b.add(b.ffn(layer, normed), x, "ffn_res", il)
        x = b.add(x, h, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
