"""gpt-oss: OpenAI's open models; attention with sinks, a window in every other layer, experts."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import Gating, HParams, common, rope_of_window, swa_pattern, swa_window
from pyggml.llama.moe import Activation, experts, moe_ffn, want_experts
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import Op, RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    n_swa = swa_window(kv)
    found = experts(kv, hp, n_ff=kv.get_int("gpt-oss.expert_feed_forward_length"))
    return replace(
        hp,
        n_swa=n_swa,
        is_swa=swa_pattern(kv, hp.n_layer, 2) if n_swa else (),
        rope_swa=rope_of_window(kv, hp.rope, freq_base=hp.rope.freq_base, squeezed=True),
        experts=replace(found, gating=Gating.SOFTMAX_WEIGHT),
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.add(f"blk.{il}.attn_sinks.weight", hp.n_head[il], op=Op.SOFT_MAX, layer=il)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want_experts(want, il, hp, bias=True)
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
        h = b.norm(x, layer["post_attention_norm.weight"], "attn_post_norm", layer.il)
        x = b.add(moe_ffn(b, layer, h, Activation.SWIGLU_OAI), x, "l_out", layer.il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
