"""hunyuan-moe: Hunyuan A13B; heads are normalized after they are rotated."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.moe import experts, moe_ffn, shared_expert_width, want_experts, want_shared
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    shared = shared_expert_width(kv, hp)
    found = experts(kv, hp, n_ff=hp.n_ff[0], n_ff_shared=shared, norm_weights=True)
    return replace(hp, experts=found)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.qk_norms(il, hp)
        want.norm(il, "ffn_norm", hp.n_embd)
        want_experts(want, il, hp)
        want_shared(want, il, hp)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        q = b.norm(b.rope(q, il, w), layer["attn_q_norm.weight"], "Qcur_norm", il)
        k = b.norm(b.rope(k, il, w), layer["attn_k_norm.weight"], "Kcur_norm", il)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il)
        x = b.add(moe_ffn(b, layer, h), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
