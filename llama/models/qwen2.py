"""qwen2: Qwen 1.5, 2 and 2.5 (dense); biases on q, k and v."""

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.weights import OUTPUT, WantList, Weights
from pyggml.ops import Op, RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    return common(kv, RopeMode.NEOX)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.add("output.bias", hp.n_vocab, op=Op.ADD, required=False, layer=OUTPUT)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
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
        x = b.add(b.ffn(layer, h), x, "l_out", layer.il)
    x = b.norm(x, w["output_norm.weight"], "result_norm")
    return b.logits(x, w["output.weight"], w.get("output.bias"))
