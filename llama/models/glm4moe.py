"""glm4moe: GLM 4.5 and 4.6; dense first layers, then experts chosen with a balancing bias."""

from dataclasses import replace

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import Gating, HParams, common, without_nextn
from pyggml.llama.moe import (
    experts,
    ffn_or_moe,
    leading_dense,
    routing,
    shared_width,
    want_ffn_or_moe,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    # text has one position for all sections of a rotated head, which makes them one
    key = "glm4moe.rope.dimension_sections"
    if key in kv and any(kv.get_ints(key)[3:]):
        raise ModelError(f"{key}: a fourth section is not supported")
    hp = without_nextn(kv, common(kv, RopeMode.NEOX))
    n_ff = kv.get_int("glm4moe.expert_feed_forward_length")
    found = experts(kv, hp, n_ff=n_ff, n_ff_shared=shared_width(kv, n_ff))
    found = replace(found, n_dense=leading_dense(kv, hp, 0))
    return replace(hp, experts=routing(kv, found, Gating.SIGMOID))


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.ignore_nextn(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.qk_norms(il, hp, required=False)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want_ffn_or_moe(want, il, hp, selection_bias=True)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        q, k = b.qk_norms(layer, q, k)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["post_attention_norm.weight"], "post_attn_norm", il)
        x = b.add(ffn_or_moe(b, layer, h), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
