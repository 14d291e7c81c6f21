"""phi2: Phi 1.5 and 2; attention and feed-forward side by side after one layer norm."""

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.weights import OUTPUT, WantList, Weights
from pyggml.ops import Op, RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    return common(kv, RopeMode.NEOX, layer_norm=True)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.add("output_norm.bias", hp.n_embd, op=Op.ADD, layer=OUTPUT)
    want.add("output.bias", hp.n_vocab, op=Op.ADD, layer=OUTPUT)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd, bias=True)
        want.attention(il, hp, bias=True)
        want.plain_ffn(il, hp.n_embd, hp.n_ff[il])
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        normed = b.norm(x, layer["attn_norm.weight"], "attn_norm", il, bias=layer["attn_norm.bias"])
        q, k, v = b.qkv(layer, normed)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        q = b.scale(q, b.hp.kq_scale, "Qcur_scaled", il)
        h = b.attention(layer, q, k, v, scale=1.0)
        h, x, normed = b.last_rows(il, h, x, normed)
        h = b.add(h, b.plain_ffn(layer, normed), "attn_ffn", il)
        x = b.add(h, x, "l_out", il)
    x = b.norm(x, w["output_norm.weight"], "result_norm", bias=w["output_norm.bias"])
    return b.logits(x, w["output.weight"], w["output.bias"])
