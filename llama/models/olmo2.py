"""olmo2: OLMo 2 and 3; norms after the parts only, q and k normalized over all heads together.

OLMo 3 has windows in three of four layers, whose positions are not squeezed.
"""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, rope_of_window, swa_pattern, swa_window
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    n_swa = swa_window(kv)
    if not n_swa:
        return hp
    plain = replace(hp.rope, type="none", attn_factor=1.0)
    return replace(
        hp,
        n_swa=n_swa,
        is_swa=swa_pattern(kv, hp.n_layer, 4),
        rope_swa=rope_of_window(kv, plain, freq_base=hp.rope.freq_base),
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.attention(il, hp, fused=False)
        want.qk_norms(il, hp, rows=True)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
        want.norm(il, "post_ffw_norm", hp.n_embd)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        q, k, v = b.qkv(layer, x, normed=True)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        h = b.norm(h, layer["post_attention_norm.weight"], "attn_post_norm", il)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(b.ffn(layer, x), layer["post_ffw_norm.weight"], "ffn_post_norm", il)
        x = b.add(h, x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
