"""starcoder2: StarCoder 2 and Granite Code; layer norms, biases everywhere, no gate."""

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
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd, bias=True)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd, bias=True)
        want.plain_ffn(il, hp.n_embd, hp.n_ff[il])
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il, bias=layer["attn_norm.bias"])
        q, k, v = b.qkv(layer, h)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il, bias=layer["ffn_norm.bias"])
        x = b.add(b.plain_ffn(layer, h), x, "l_out", il)
    x = b.norm(x, w["output_norm.weight"], "result_norm", bias=w["output_norm.bias"])
    return b.logits(x, w["output.weight"])
