"""smollm3: SmolLM 3; every fourth layer knows no positions."""

from dataclasses import replace

from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common, not_negative
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor

NO_ROPE_STEP = 4  # no key of the file says so


def hparams(kv: Metadata) -> HParams:
    hp = common(kv, RopeMode.NORMAL)
    return replace(
        hp,
        no_rope=tuple((il + 1) % NO_ROPE_STEP == 0 for il in range(hp.n_layer)),
        attention_scale=not_negative(kv, "smollm3.attention.scale", 0.0),
    )


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.ffn(il, hp.n_embd, hp.n_ff[il])
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    hp = b.hp
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        if hp.rotates(il):
            q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il)
        x = b.add(b.ffn(layer, h), x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
