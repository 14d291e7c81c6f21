"""ernie4_5-moe: ERNIE 4.5 with experts in every n-th layer behind dense first ones."""

from dataclasses import replace

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.moe import (
    experts,
    ffn_or_moe,
    leading_dense,
    want_ffn_or_moe,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    step = kv.get_int("ernie4_5-moe.interleave_moe_layer_step")
    if step != 1:
        raise ModelError(
            f"ernie4_5-moe.interleave_moe_layer_step is {step}; only 1 is supported: "
            "experts in every layer behind the leading ones"
        )
    found = experts(
        kv,
        hp,
        n_ff=kv.get_int("ernie4_5-moe.expert_feed_forward_length"),
        n_ff_shared=kv.get_int("ernie4_5-moe.expert_shared_feed_forward_length", 0),
        norm_weights=True,
    )
    return replace(hp, experts=replace(found, n_dense=leading_dense(kv, hp)))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want_ffn_or_moe(want, il, hp, selection_bias=False)
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
