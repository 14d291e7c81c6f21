"""glm4: GLM-4 (dense); half of each head is rotated, norms on both sides, ffn_up holds the gate."""

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, common
from pyggml.llama.weights import WantList, Weights
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor


def hparams(kv: Metadata) -> HParams:
    for key in ("glm4.rope.dimension_sections", "glm4.nextn_predict_layers"):
        if key in kv:
            raise ModelError(f"{key}: models for images (GLM-4.1V, GLM-OCR) are not supported")
    return common(kv, RopeMode.NORMAL)


def weights(hp: HParams) -> WantList:
    want = WantList()
    want.embeddings(hp.n_embd, hp.n_vocab)
    for il in range(hp.n_layer):
        want.norm(il, "attn_norm", hp.n_embd)
        want.attention(il, hp, bias=True)
        want.norm(il, "post_attention_norm", hp.n_embd)
        want.norm(il, "ffn_norm", hp.n_embd)
        want.fused_ffn(il, hp.n_embd, hp.n_ff[il])
        want.norm(il, "post_ffw_norm", hp.n_embd)
    return want


def graph(b: Builder, w: Weights) -> Tensor:
    x = b.embed(w["token_embd.weight"])
    for layer in w.layers:
        il = layer.il
        h = b.norm(x, layer["attn_norm.weight"], "attn_norm", il)
        q, k, v = b.qkv(layer, h)
        q, k = b.rope(q, il, w), b.rope(k, il, w)
        h = b.attention(layer, q, k, v, scale=b.hp.kq_scale)
        h, x = b.last_rows(il, h, x)
        h = b.norm(h, layer["post_attention_norm.weight"], "post_attn_norm", il)
        x = b.add(h, x, "ffn_inp", il)
        h = b.norm(x, layer["ffn_norm.weight"], "ffn_norm", il)
        h = b.norm(b.ffn(layer, h), layer["post_ffw_norm.weight"], "post_mlp_norm", il)
        x = b.add(h, x, "l_out", il)
    return b.logits(b.norm(x, w["output_norm.weight"], "result_norm"), w["output.weight"])
