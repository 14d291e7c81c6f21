"""gemma3: Gemma 3 text models; sliding window in five of six layers, norms on both sides."""

import math
from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import (
    HParams,
    common,
    gemma_scale,
    not_negative,
    rope_of_window,
    swa_pattern,
    swa_window,
)
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import GluOp, RopeMode
from pyggml.tensor import Tensor

LAYERS_OF_27B = 62


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    n_swa = swa_window(kv)
    return replace(
        hp,
        n_swa=n_swa,
        is_swa=swa_pattern(kv, hp.n_layer, 6) if n_swa else (),
        rope_swa=rope_of_window(kv, hp.rope) if n_swa else None,
        attention_scale=gemma_scale(hp, LAYERS_OF_27B),
        final_logit_softcap=not_negative(kv, "gemma3.final_logit_softcapping", 0.0),
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp)
        want.qk_norms(il, hp)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
        want.norm(il, "post_ffw_norm", hp.n_embd)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"], scale=math.sqrt(hp.n_embd))
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        q, k = b.qk_norms(layer, q, k)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        q = b.scale(q, hp.kq_scale, "Qcur_scaled", il)
        h = b.attention(layer, q, k, v, scale=1.0)
        h, x = b.last_rows(il, h, x)
        h = b.norm(h, layer["post_attention_norm.weight"], "attn_post_norm", il)
        x = b.add(h, x, "sa_out", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il)
        h = b.ffn(layer, h, GluOp.GEGLU)
        h = b.norm(h, layer["post_ffw_norm.weight"], "ffn_post_norm", il)
        x = b.add(h, x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
