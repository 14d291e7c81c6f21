"""phimoe: Phi 3.5 MoE; norms and the output have biases, longrope."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.moe import experts, moe_ffn, want_experts
from pyggml.llama.weights import OUTPUT, WantList, Weights
from pyggml.ops import Op, RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    return replace(hp, experts=experts(kv, hp, n_ff=hp.n_ff[0], norm_weights=True))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.add("output_norm.bias", hp.n_embd, op=Op.ADD, layer=OUTPUT)
    want.add("output.bias", hp.n_vocab, op=Op.ADD, layer=OUTPUT)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.attention(il, hp, bias=True)
        for name in ("attn_norm", "ffn_norm"):
            want.norm(il, name, hp.n_embd, bias=True)
        want_experts(want, il, hp)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il, bias=layer["attn_norm.bias"])
        q, k, v = b.qkv(layer, h)
        q = b.scale(b.rope(q, il, w), hp.kq_scale, "Qcur_scaled", il)
        k = b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=1.0)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il, bias=layer["ffn_norm.bias"])
        x = b.add(moe_ffn(b, layer, h), x, "l_out", il)
    x = b.norm(x, w["output_norm.weight"], "result_norm", bias=w["output_norm.bias"])
    return b.logits(x, w["output.weight"], w["output.bias"])
