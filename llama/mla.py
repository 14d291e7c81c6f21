"""Latent attention (MLA): its keys, its weights and its part of the graph.

Keys and values are made of one compressed row per token and a rotated part that the heads share.
Newer files hold the matrices that take queries into the compressed space (attn_k_b) and results
out of it (attn_v_b): then the rows themselves are cached, as one head of keys whose beginning is
the values. Older files hold attn_kv_b, and every head's keys and values are cached.
"""

from __future__ import annotations

from pyggml import build
from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams, LatentAttention
from pyggml.llama.weights import Layer, WantList, Weights
from pyggml.ops import Op
from pyggml.tensor import Tensor


def latent_attention(kv: Metadata, hp: HParams) -> LatentAttention:
    """The keys of MLA; a file with absorbed matrices describes the cache by key_length."""
    a = f"{hp.arch}.attention"
    n_head_k = kv.get_int(f"{a}.key_length_mla", 0)
    n_head_v = kv.get_int(f"{a}.value_length_mla", 0)
    absorbed = bool(n_head_k and n_head_v)
    mla = LatentAttention(
        n_lora_q=kv.get_int(f"{a}.q_lora_rank", 0),
        n_lora_kv=kv.get_int(f"{a}.kv_lora_rank"),
        n_head_k=n_head_k if absorbed else hp.n_embd_head_k,
        n_head_v=n_head_v if absorbed else hp.n_embd_head_v,
        absorbed=absorbed,
    )
    if not (mla.n_lora_kv > 0 and mla.n_head_v > 0 and mla.n_head_k > hp.n_rot):
        raise ModelError(
            f"{a}.kv_lora_rank is {mla.n_lora_kv}, a head's key {mla.n_head_k} wide and its value "
            f"{mla.n_head_v}, of which rope.dimension_count rotates {hp.n_rot}: "
            "all must be positive, and keys wider than their rotated part"
        )
    cached = (mla.n_lora_kv + hp.n_rot, mla.n_lora_kv)
    if absorbed and (hp.n_embd_head_k, hp.n_embd_head_v) != cached:
        raise ModelError(
            f"{a}.key_length is {hp.n_embd_head_k} and value_length {hp.n_embd_head_v}; with "
            f"kv_lora_rank {mla.n_lora_kv} they must be {cached[0]} and {cached[1]}"
        )
    return mla


def want_latent_attention(want: WantList, il: int, hp: HParams) -> None:
    """Queries, compressed rows, what makes heads of them, and attn_output."""
    mla, n_head = hp.mla, hp.n_head[il]
    assert mla is not None
    n_q, n_nope = n_head * mla.n_head_k, mla.n_head_k - hp.n_rot
    if mla.n_lora_q:
        want.linear(il, "attn_q_a", hp.n_embd, mla.n_lora_q)
        want.norm(il, "attn_q_a_norm", mla.n_lora_q)
        want.linear(il, "attn_q_b", mla.n_lora_q, n_q)
    else:
        want.linear(il, "attn_q", hp.n_embd, n_q)
    want.linear(il, "attn_kv_a_mqa", hp.n_embd, mla.n_lora_kv + hp.n_rot)
    want.norm(il, "attn_kv_a_norm", mla.n_lora_kv)
    if mla.absorbed:
        k_b, v_b = (n_nope, mla.n_lora_kv, n_head), (mla.n_lora_kv, mla.n_head_v, n_head)
        want.add(f"blk.{il}.attn_k_b.weight", *k_b, op=Op.MUL_MAT, layer=il)
        want.add(f"blk.{il}.attn_v_b.weight", *v_b, op=Op.MUL_MAT, layer=il)
    else:
        want.linear(il, "attn_kv_b", mla.n_lora_kv, n_head * (n_nope + mla.n_head_v))
    want.linear(il, "attn_output", n_head * mla.n_head_v, hp.n_embd)


def latent_qkv(b: Builder, layer: Layer, x: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """q [head, n_head, n_tokens], k and v with a head for each query or just one.

    The last n_rot channels of queries and keys are rotated.
    """
    hp, mla, il, n = b.hp, b.hp.mla, layer.il, b.shape.n_tokens
    assert mla is not None
    q = _queries(b, layer, x)
    q_nope, q_pe = _split(build.reshape(q, mla.n_head_k, hp.n_head[il], n), hp.n_rot)
    kv = b.name(b.linear(layer, "attn_kv_a_mqa", x), "kv_cmpr_pe", il)
    kv, k_pe = _split(build.reshape(kv, kv.ne[0], 1, n), hp.n_rot)
    q_pe = b.name(b.rope(q_pe, il, w), "q_pe", il)
    k_pe = b.name(b.rope(k_pe, il, w), "k_pe", il)
    kv = b.norm(kv, layer["attn_kv_a_norm.weight"], "kv_cmpr", il)
    if mla.absorbed:
        q_nope = build.mul_mat(layer["attn_k_b.weight"], build.permute(q_nope, 0, 2, 1, 3))
        q_nope = build.permute(b.name(q_nope, "q_nope_absorbed", il), 0, 2, 1, 3)
        k, v = kv, kv
    else:
        heads = b.linear(layer, "attn_kv_b", build.reshape(kv, mla.n_lora_kv, n))
        heads = build.reshape(
            b.name(heads, "kv", il), heads.ne[0] // hp.n_head[il], hp.n_head[il], n
        )
        k, v = _split(heads, mla.n_head_v)
        k_pe, v = build.repeat(k_pe, q_pe), b.name(build.cont(v), "Vcur_cont", il)
    q = b.name(build.concat(q_nope, q_pe, 0), "Qcur", il)
    if hp.attn_temp_scale:
        q = b.temper(q, il)
    return q, b.name(build.concat(k, k_pe, 0), "Kcur", il), v


def _queries(b: Builder, layer: Layer, x: Tensor) -> Tensor:
    """All heads' queries, made of compressed ones if the model has them."""
    il = layer.il
    if layer.get("attn_q_a.weight") is None:
        return b.name(b.linear(layer, "attn_q", x), "q", il)
    q = b.name(b.linear(layer, "attn_q_a", x), "q", il)
    q = b.norm(q, layer["attn_q_a_norm.weight"], "q", il)
    return b.name(b.linear(layer, "attn_q_b", q), "q", il)


def _split(x: Tensor, n_last: int) -> tuple[Tensor, Tensor]:
    """Views of the first channels and of the last n_last ones."""
    n_first = x.ne[0] - n_last
    first = build.view(x, (n_first, *x.ne[1:3]), x.nb[1:3])
    return first, build.view(x, (n_last, *x.ne[1:3]), x.nb[1:3], x.type.row_size(n_first))
