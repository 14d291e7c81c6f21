"""minicpm3: MiniCPM3 4B; latent attention whose heads are cached, and fixed scales."""

import math
from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.mla import latent_attention, latent_qkv, want_latent_attention
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor

# The model's own numbers, which its files do not hold.
EMBEDDING_SCALE, DEPTH_SCALE, N_EMBD_BASE = 12.0, 1.4, 256


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NEOX)
    return replace(
        hp,
        mla=latent_attention(kv, hp),
        embedding_scale=EMBEDDING_SCALE,
        residual_scale=DEPTH_SCALE / math.sqrt(hp.n_layer),
        logit_scale=N_EMBD_BASE / hp.n_embd,
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    want.rope_factors(hp)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want_latent_attention(want, il, hp)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"], scale=hp.embedding_scale)
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = latent_qkv(b, layer, h, w)
        h = b.attention(layer, q, k, v, scale=hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(b.scale(h, hp.residual_scale, "hidden_scaled", il), x, "ffn_inp", il)
        h = b.ffn(layer, b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il))
        x = b.add(b.scale(h, hp.residual_scale, "hidden_scaled_ffn", il), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
