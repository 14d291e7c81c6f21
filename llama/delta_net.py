"""Linear attention by the gated delta rule, and the gated attention of the models that have it.

A layer's state is a matrix per head that maps keys to values. Each token lets it decay and
corrects what it says of the token's key. Before that, q, k and v pass a short convolution over
the latest tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pyggml import build
from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import DeltaNet, HParams
from pyggml.llama.weights import Layer, WantList, Weights
from pyggml.ops import Op
from pyggml.tensor import Tensor


# ---------------------------------------------------------------- hyper-parameters
def with_delta_net(kv: Metadata, hp: HParams) -> HParams:
    """The numbers with those of the layers that attend linearly, checked."""
    a = hp.arch
    shape = DeltaNet(
        n_kernel=kv.get_int(f"{a}.ssm.conv_kernel"),
        n=kv.get_int(f"{a}.ssm.state_size"),
        n_head_k=kv.get_int(f"{a}.ssm.group_count"),
        n_head=kv.get_int(f"{a}.ssm.time_step_rank"),
    )
    n_inner = kv.get_int(f"{a}.ssm.inner_size")
    sizes = (shape.n_kernel - 1, shape.n, shape.n_head_k, shape.n_head)
    if min(sizes) < 1 or shape.n_head % shape.n_head_k or n_inner != shape.n * shape.n_head:
        raise ModelError(
            f"{a}.ssm.*: conv_kernel {shape.n_kernel}, state_size {shape.n}, group_count "
            f"{shape.n_head_k}, time_step_rank {shape.n_head} and inner_size {n_inner} do not fit "
            "together"
        )
    if hp.n_embd_head_k != hp.n_embd_head_v:
        raise ModelError(
            f"{a}: heads of keys are {hp.n_embd_head_k} wide, those of values {hp.n_embd_head_v}; "
            "they must be equal"
        )
    return replace(hp, delta_net=shape, is_recurrent=_recurrent_layers(kv, hp))


def _recurrent_layers(kv: Metadata, hp: HParams) -> tuple[bool, ...]:
    """A list, or n for "every n-th layer attends fully"."""
    key = f"{hp.arch}.attention.recurrent_layers"
    if key in kv:
        listed = kv.get_per_layer(key, hp.n_layer + hp.n_nextn)
        flags = tuple(bool(flag) for flag in listed[: hp.n_layer])
    else:
        key = f"{hp.arch}.full_attention_interval"
        n = kv.get_int(key, 4)
        flags = tuple(n < 1 or (il + 1) % n != 0 for il in range(hp.n_layer))
    if all(flags):
        raise ModelError(f"{key}: none of the {hp.n_layer} layers attends fully")
    return flags


def rope_sections(kv: Metadata) -> tuple[int, int, int, int]:
    """How many pairs are turned by time, height, width and another position."""
    key = f"{kv.get_str('general.architecture')}.rope.dimension_sections"
    t, h, w, e = kv.get_per_layer(key, 4)
    if min(t, h, w, e) < 0 or t + h + w + e < 1:
        raise ModelError(f"{key} is {[t, h, w, e]}; the sections must have pairs")
    return t, h, w, e


# ---------------------------------------------------------------- wanted tensors
def want_either_attention(want: WantList, il: int, hp: HParams, *, grouped: bool) -> None:
    """Linear attention in recurrent layers, the gated one in the others.

    `grouped`: beta and alpha come from one matrix, head by head of k; older files have q, k, v and
    the gate in one matrix too.
    """
    if hp.recurrent(il):
        _want_linear_attention(want, il, hp, grouped=grouped)
    else:
        _want_gated_attention(want, il, hp)


def _want_linear_attention(want: WantList, il: int, hp: HParams, *, grouped: bool) -> None:
    d, n_embd, prefix = _delta_net(hp), hp.n_embd, f"blk.{il}."
    n_value = d.n * d.n_head
    merged = "ssm_in" if grouped else ""
    want.linear(il, "attn_qkv", n_embd, d.n_channels, unless=merged)
    want.linear(il, "attn_gate", n_embd, n_value, unless=merged)
    if grouped:
        shape = (n_embd, d.n_channels + n_value)
        want.add(f"{prefix}ssm_in.weight", *shape, op=Op.MUL_MAT, required=False, layer=il)
        want.linear(il, "ssm_ba", n_embd, 2 * d.n_head)
    else:
        want.linear(il, "ssm_beta", n_embd, d.n_head)
        want.linear(il, "ssm_alpha", n_embd, d.n_head)
    kernel = (d.n_kernel, d.n_channels)
    want.add(f"{prefix}ssm_conv1d.weight", *kernel, op=Op.SSM_CONV, layer=il)
    want.add(f"{prefix}ssm_dt.bias", d.n_head, op=Op.ADD, layer=il)
    want.add(f"{prefix}ssm_a", d.n_head, op=Op.MUL, layer=il)
    want.norm(il, "ssm_norm", d.n)
    want.linear(il, "ssm_out", n_value, n_embd)


def _want_gated_attention(want: WantList, il: int, hp: HParams) -> None:
    """attn_q, whose heads are followed by their gates, attn_k, attn_v and attn_output."""
    n_q = hp.n_embd_head_k * hp.n_head[il]
    want.linear(il, "attn_q", hp.n_embd, 2 * n_q)
    want.linear(il, "attn_k", hp.n_embd, hp.n_embd_k_gqa(il))
    want.linear(il, "attn_v", hp.n_embd, hp.n_embd_v_gqa(il))
    want.linear(il, "attn_output", n_q, hp.n_embd)
    want.qk_norms(il, hp)


def _delta_net(hp: HParams) -> DeltaNet:
    assert hp.delta_net is not None
    return hp.delta_net


# ---------------------------------------------------------------- graph
def either_attention(b: Builder, layer: Layer, x: Tensor, w: Weights) -> Tensor:
    """Linear attention in recurrent layers, the gated one in the others: [n_embd, n_tokens]."""
    if b.hp.recurrent(layer.il):
        return _linear_attention(b, layer, x)
    return _gated_attention(b, layer, x, w)


# ---------------------------------------------------------------- full attention
def _gated_attention(b: Builder, layer: Layer, x: Tensor, w: Weights) -> Tensor:
    """Attention whose output is multiplied by sigmoid(gate) before it is projected."""
    hp, il, n_tokens = b.hp, layer.il, x.ne[1]
    n, n_head, n_head_kv = hp.n_embd_head_k, hp.n_head[il], hp.n_head_kv[il]
    both = b.name(b.linear(layer, "attn_q", x), "Qcur_full", il)
    head = both.type.row_size(n)
    q, gate = (
        build.view(both, (n, n_head, n_tokens), (2 * head, both.nb[1]), offset)
        for offset in (0, head)
    )
    k = build.reshape(b.linear(layer, "attn_k", x), n, n_head_kv, n_tokens)
    v = build.reshape(b.linear(layer, "attn_v", x), n, n_head_kv, n_tokens)
    q, k = b.qk_norms(layer, q, k)
    q, k = (b.name(b.rope(t, il, w), name, il) for t, name in ((q, "Qcur"), (k, "Kcur")))
    gate = build.sigmoid(build.cont(gate, n * n_head, n_tokens))
    b.name(gate, "gate_sigmoid", il)
    return b.attention(layer, q, k, b.name(v, "Vcur", il), scale=hp.kq_scale, gate=gate)


# ---------------------------------------------------------------- linear attention
def _linear_attention(b: Builder, layer: Layer, x: Tensor) -> Tensor:
    """[n_embd, n_tokens], the tokens of each sequence one after the other."""
    il, d, state, inputs = layer.il, _delta_net(b.hp), b.memory.state, b.inputs.state
    assert state is not None and inputs is not None
    n_seqs, n_all = b.shape.n_seqs, x.ne[1]
    n_tokens = n_all // n_seqs
    grouped = layer.get("ssm_ba.weight") is not None
    mixed, z = _projections(b, layer, x)
    beta, gate = _grouped_gates(b, layer, x) if grouped else _gates(b, layer, x)
    beta, gate = (build.reshape(t, 1, d.n_head, n_tokens, n_seqs) for t in (beta, gate))
    mixed = _convolution(b, layer, build.reshape(mixed, d.n_channels, n_tokens, n_seqs))
    q, k, v = _heads(b, mixed, il)
    if grouped:
        q, k = (_each_for_neighbours(t, d.n_head) for t in (q, k))
    old = b.name(state.states(il, inputs), "state_predelta", il)
    both = build.gated_delta_net(q, k, v, gate, beta, old)
    offset = both.type.row_size(d.n * d.n_head * n_all)
    new = build.view(both, (d.n, d.n, d.n_head, n_seqs), offset=offset)
    b.graph.expand(state.store_states(il, b.name(new, "new_state", il), inputs))
    out = b.name(build.view(both, (d.n, d.n_head, n_all)), "attn_output", il)
    out = b.norm(out, layer["ssm_norm.weight"], "ssm_norm", il)
    out = build.mul(out, build.silu(build.reshape(z, d.n, d.n_head, n_all)))
    out = b.name(build.reshape(out, d.n * d.n_head, n_all), "final_output", il)
    return b.name(b.linear(layer, "ssm_out", out), "linear_attn_out", il)


def _projections(b: Builder, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of q, k and v [n_channels, n_tokens]; the output's gate [n * n_head, n_tokens]."""
    il, d = layer.il, _delta_net(b.hp)
    if layer.get("ssm_in.weight") is None:
        mixed = b.name(b.linear(layer, "attn_qkv", x), "linear_attn_qkv_mixed", il)
        return mixed, b.name(b.linear(layer, "attn_gate", x), "z", il)
    # for each head of k: q, k, and its heads of v and of the gate
    per_head = d.n * (d.n_head // d.n_head_k)
    rows = b.name(b.linear(layer, "ssm_in", x), "linear_attn_mixed_qkvz", il)
    widths, offset, parts = (d.n, d.n, per_head, per_head), 0, []
    for width in widths:
        nb = (rows.type.row_size(sum(widths)), rows.nb[1])
        part = build.view(rows, (width, d.n_head_k, x.ne[1]), nb, rows.type.row_size(offset))
        parts.append(build.cont(part, width * d.n_head_k, x.ne[1]))
        offset += width
    q, k, v, z = parts
    return build.concat(build.concat(q, k, 0), v, 0), b.name(z, "z", il)


def _gates(b: Builder, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """How much of a correction is learned, and logarithms of decay: [n_head, n_tokens]."""
    beta = b.name(build.sigmoid(b.linear(layer, "ssm_beta", x)), "beta_sigmoid", layer.il)
    return beta, _decay(b, layer, b.linear(layer, "ssm_alpha", x))


def _grouped_gates(b: Builder, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """As `_gates`; a row holds, for each head of k, its betas and then its alphas."""
    d = _delta_net(b.hp)
    both, n = b.linear(layer, "ssm_ba", x), d.n_head // d.n_head_k
    b.name(both, "linear_attn_mixed_ba", layer.il)
    group = both.type.row_size(n)
    beta, alpha = (
        build.cont(
            build.view(both, (n, d.n_head_k, x.ne[1]), (2 * group, both.nb[1]), offset),
            *(d.n_head, x.ne[1]),
        )
        for offset in (0, group)
    )
    return build.sigmoid(beta), _decay(b, layer, alpha)


def _decay(b: Builder, layer: Layer, alpha: Tensor) -> Tensor:
    """softplus(alpha + dt) * a, where a is negative."""
    rate = b.name(build.softplus(build.add(alpha, layer["ssm_dt.bias"])), "a_softplus", layer.il)
    return b.name(build.mul(rate, layer["ssm_a"]), "gate", layer.il)


def _convolution(b: Builder, layer: Layer, mixed: Tensor) -> Tensor:
    """silu of the causal convolution: [n_channels, n_tokens, n_seqs]; remembers the end."""
    il, state, inputs = layer.il, b.memory.state, b.inputs.state
    assert state is not None and inputs is not None
    past = state.past_inputs(il, inputs)
    x = b.name(build.concat(past, build.transpose(mixed), 0), "conv_input", il)
    offset = mixed.ne[1] * x.nb[0]
    latest = build.view(x, past.ne[:3], x.nb[1:3], offset)
    b.graph.expand(state.store_inputs(il, latest, inputs))
    out = build.ssm_conv(x, layer["ssm_conv1d.weight"])
    return b.name(build.silu(b.name(out, "conv_output_raw", il)), "conv_output_silu", il)


def _heads(b: Builder, mixed: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k of unit length [n, n_head_k, n_tokens, n_seqs] and v [n, n_head, n_tokens, n_seqs]."""
    d, eps = _delta_net(b.hp), b.hp.rms_eps
    _, n_tokens, n_seqs, _ = mixed.ne

    def heads(n_head: int, first: int) -> Tensor:
        nb = (mixed.type.row_size(d.n), *mixed.nb[1:3])
        offset = mixed.type.row_size(d.n * first)
        return build.view(mixed, (d.n, n_head, n_tokens, n_seqs), nb, offset)

    q = b.name(_unit(heads(d.n_head_k, 0), eps), "q_conv", il)
    k = b.name(_unit(heads(d.n_head_k, d.n_head_k), eps), "k_conv", il)
    return q, k, b.name(heads(d.n_head, 2 * d.n_head_k), "v_conv", il)


def _unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x**2) + eps), as llama.cpp has it: L2_NORM applies eps in another way."""
    n = x.ne[0]
    return build.scale(build.rms_norm(x, eps / n), 1 / math.sqrt(n))


def _each_for_neighbours(x: Tensor, n_head: int) -> Tensor:
    """Each head of [n, n_head_k, n_tokens, n_seqs] several times, one after the other."""
    n, n_head_k, n_tokens, n_seqs = x.ne
    if n_head == n_head_k:
        return x
    many = (n, n_head // n_head_k, n_head_k, n_tokens * n_seqs)
    rows = build.repeat_to(build.reshape(x, n, 1, n_head_k, n_tokens * n_seqs), many)
    return build.reshape(rows, n, n_head, n_tokens, n_seqs)
