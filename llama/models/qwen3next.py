"""qwen3next: Qwen 3 Next, linear attention in most layers, experts in all."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.delta_net import (
    either_attention,
    want_either_attention,
    with_delta_net,
)
from pyggml.llama.hparams import HParams, common
from pyggml.llama.moe import (
    expert_width,
    experts,
    moe_ffn,
    shared_expert_width,
    want_experts,
    want_shared,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = with_delta_net(kv, common(kv, RopeMode.NEOX))
    width = expert_width(kv, hp)
    shared = shared_expert_width(kv, hp)
    found = experts(kv, hp, n_ff=width, n_ff_shared=shared, norm_weights=True)
    return replace(hp, experts=found)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want_either_attention(want, il, hp, grouped=True)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want_experts(want, il, hp)
        want_shared(want, il, hp, gated=True)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", layer.il)
        h = either_attention(b, layer, h, w)
        h, x = b.last_rows(layer.il, h, x)
        x = b.add(h, x, "attn_residual", layer.il)
        h = b.norm(x, layer["post_attention_norm.weight"], "attn_post_norm", layer.il)
        x = b.add(moe_ffn(b, layer, h), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
