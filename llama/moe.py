"""Mixture of experts: one feed-forward for all models (llama.cpp's build_moe_ffn).

A router scores the experts for each token; the best few compute and their outputs are added,
weighted. What a layer's file holds decides about biases, scales, merged matrices and the shared
expert, the hyper-parameters (`Experts`) about the routing. Node names are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from math import inf

from pyggml import build
from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import Experts, Gating, HParams, not_negative
from pyggml.llama.weights import Layer, WantList
from pyggml.ops import GluOp, Op
from pyggml.tensor import Tensor

MAX_EXPERTS = 1024
SMALLEST_SUM = 6.103515625e-5  # F16's smallest normal number: no division by zero
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


# ---------------------------------------------------------------- hyper-parameters
def experts(
    kv: Metadata, hp: HParams, *, n_ff: int, n_ff_shared: int = 0, norm_weights: bool = False
) -> Experts:
    """The keys that all mixtures share, checked; `n_ff` is the width of one expert."""
    a = hp.arch
    n_expert = kv.get_int(f"{a}.expert_count")
    if not 1 <= n_expert <= MAX_EXPERTS:
        raise ModelError(f"{a}.expert_count is {n_expert}; it must lie in 1..{MAX_EXPERTS}")
    n_used = _n_used(kv, hp)
    for n in n_used:
        if not 1 <= n <= n_expert:
            raise ModelError(
                f"{a}.expert_used_count is {n}; it must lie in 1..{n_expert}, the expert_count"
            )
    n_groups = kv.get_int(f"{a}.expert_group_count", 0)
    n_groups_used = kv.get_int(f"{a}.expert_group_used_count", 0)
    found = Experts(
        n_expert=n_expert,
        n_used=n_used,
        n_ff=n_ff,
        n_ff_shared=n_ff_shared,
        norm_weights=norm_weights,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )
    _check(a, found)
    return found


def _n_used(kv: Metadata, hp: HParams) -> tuple[int, ...]:
    """How many experts a token has in each layer."""
    n = kv.get_per_layer(f"{hp.arch}.expert_used_count", hp.n_layer + hp.n_nextn)
    return tuple(n[: hp.n_layer])


def _check(arch: str, e: Experts) -> None:
    if e.n_ff < 1 or e.n_ff_shared < 0:
        raise ModelError(
            f"{arch}: experts are {e.n_ff} wide and the shared one {e.n_ff_shared}; "
            "expert_feed_forward_length or feed_forward_length is wrong"
        )
    if e.n_groups <= 1:
        return
    size, rest = divmod(e.n_expert, e.n_groups)
    if rest or size < 2:
        raise ModelError(
            f"{arch}.expert_group_count is {e.n_groups}; "
            f"groups must be equal parts, of two at least, of {e.n_expert} experts"
        )
    if not 1 <= e.n_groups_used < e.n_groups or max(e.n_used) > e.n_groups_used * size:
        raise ModelError(
            f"{arch}.expert_group_used_count is {e.n_groups_used}; it must be less than the "
            f"{e.n_groups} groups and enough for {max(e.n_used)} experts in groups of {size}"
        )


def expert_width(kv: Metadata, hp: HParams) -> int:
    """expert_feed_forward_length, or an equal share of feed_forward_length per used expert."""
    width = kv.get_int(f"{hp.arch}.expert_feed_forward_length", 0)
    return width or hp.n_ff[0] // max(1, *_n_used(kv, hp))


def shared_expert_width(kv: Metadata, hp: HParams) -> int:
    """expert_shared_feed_forward_length, or feed_forward_length."""
    return kv.get_int(f"{hp.arch}.expert_shared_feed_forward_length", 0) or hp.n_ff[0]


def leading_dense(kv: Metadata, hp: HParams, default: int | None = None) -> int:
    """How many first layers have no experts."""
    key = f"{hp.arch}.leading_dense_block_count"
    n = kv.get_int(key) if default is None else kv.get_int(key, default)
    if not 0 <= n <= hp.n_layer:
        raise ModelError(f"{key} is {n}; there are {hp.n_layer} layers")
    return n


def shared_width(kv: Metadata, n_ff: int) -> int:
    """Shared experts lie side by side in one; each is as wide as a routed one."""
    key = f"{kv.get_str('general.architecture')}.expert_shared_count"
    n = kv.get_int(key)
    if not 0 <= n <= MAX_EXPERTS:
        raise ModelError(f"{key} is {n}; it must lie in 0..{MAX_EXPERTS}")
    return n * n_ff


def routing(kv: Metadata, e: Experts, default: Gating | None = None) -> Experts:
    """With the gating function, normalization and scale that the file names.

    A file that names no gating function (or 0) means the default; without one it must.
    """
    a = kv.get_str("general.architecture")
    key = f"{a}.expert_gating_func"
    gating = kv.get_int(key) if default is None else kv.get_int(key, 0) or default
    if gating not in tuple(Gating):
        known = ", ".join(f"{g.value} ({g.name.lower()})" for g in Gating)
        raise ModelError(f"{key} is {gating}; known are {known}")
    return replace(
        e,
        gating=Gating(gating),
        norm_weights=kv.get_bool(f"{a}.expert_weights_norm", False),
        weights_scale=weights_scale(kv),
    )


def weights_scale(kv: Metadata) -> float:
    """Factor of the experts' weights; a file that says 0 means none."""
    key = f"{kv.get_str('general.architecture')}.expert_weights_scale"
    return not_negative(kv, key, 0.0) or 1.0


# ---------------------------------------------------------------- wanted tensors
def want_experts(
    want: WantList,
    il: int,
    hp: HParams,
    *,
    gate: bool = True,
    bias: bool = False,
    selection_bias: bool | None = None,
) -> None:
    """The router and the experts of a layer.

    `bias`: router and experts have biases. `selection_bias`: exp_probs_b is required (True),
    allowed (False) or unknown (None). Gate and up may be merged into one matrix.
    """
    e = hp.experts
    assert e is not None
    prefix, n_expert = f"blk.{il}.", e.n_expert
    # a router that is not a number would send tokens anywhere, without a word
    router = f"{prefix}ffn_gate_inp"
    want.add(f"{router}.weight", hp.n_embd, n_expert, op=Op.MUL_MAT, layer=il, checked=True)
    if bias:
        want.add(f"{router}.bias", n_expert, op=Op.ADD, layer=il, checked=True)
    if selection_bias is not None:
        name = f"{prefix}exp_probs_b.bias"
        required = selection_bias
        want.add(name, n_expert, op=Op.ADD, required=required, layer=il, checked=True)
    shapes = {"ffn_up_exps": (hp.n_embd, e.n_ff), "ffn_down_exps": (e.n_ff, hp.n_embd)}
    if gate:
        shapes["ffn_gate_exps"] = (hp.n_embd, e.n_ff)
    may_merge = gate and not bias
    for part, (n_in, n_out) in shapes.items():
        unless = MERGED.format(il) if may_merge and part != "ffn_down_exps" else ""
        _want_matrices(want, il, part, (n_in, n_out, n_expert), bias=bias, unless=unless)
    if may_merge:
        shape = (hp.n_embd, 2 * e.n_ff, n_expert)
        _want_matrices(want, il, "ffn_gate_up_exps", shape, required=False)


MERGED = "blk.{}.ffn_gate_up_exps.weight"


def _want_matrices(
    want: WantList,
    il: int,
    part: str,
    shape: tuple[int, int, int],
    *,
    required: bool = True,
    bias: bool = False,
    unless: str = "",
) -> None:
    """One matrix per expert, their scales and biases."""
    name, (_, n_out, n_expert) = f"blk.{il}.{part}", shape
    op = Op.MUL_MAT_ID
    want.add(f"{name}.weight", *shape, op=op, required=required, layer=il, unless=unless)
    want.add(f"{name}.scale", n_expert, op=Op.MUL, required=False, layer=il)
    if bias:
        want.add(f"{name}.bias", n_out, n_expert, op=Op.ADD_ID, layer=il)


def want_shared(want: WantList, il: int, hp: HParams, *, gated: bool = False) -> None:
    """The expert that sees every token, `gated` by a scalar per token."""
    assert hp.experts is not None
    if not hp.experts.n_ff_shared:
        return
    want.ffn(il, hp.n_embd, hp.experts.n_ff_shared, suffix="_shexp")
    if gated:
        want.add(f"blk.{il}.ffn_gate_inp_shexp.weight", hp.n_embd, op=Op.MUL_MAT, layer=il)


def want_ffn_or_moe(
    want: WantList, il: int, hp: HParams, *, selection_bias: bool | None = None
) -> None:
    """An ordinary feed-forward in the first n_dense layers, router and experts in the others."""
    assert hp.experts is not None
    if il < hp.experts.n_dense:
        want.ffn(il, hp.n_embd, hp.n_ff[il])
        return
    want_experts(want, il, hp, selection_bias=selection_bias)
    want_shared(want, il, hp)


# ---------------------------------------------------------------- graph
class Activation(Enum):
    """Between up and down; the value is the form that gates, None if there is none."""

    SILU = GluOp.SWIGLU
    GELU = GluOp.GEGLU
    RELU = GluOp.REGLU
    SWIGLU_OAI = GluOp.SWIGLU_OAI
    RELU_SQR = None


# Experts without a gate.
PLAIN: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: build.silu,
    Activation.GELU: build.gelu,
    Activation.RELU: build.relu,
    Activation.RELU_SQR: lambda x: build.sqr(build.relu(x)),
}

GATES: dict[Gating, Callable[[Tensor], Tensor]] = {
    Gating.SOFTMAX: build.soft_max,
    Gating.SIGMOID: build.sigmoid,
    Gating.SOFTMAX_WEIGHT: lambda logits: logits,
    Gating.SQRT_SOFTPLUS: lambda logits: build.sqrt(build.softplus(logits)),
}


def ffn_or_moe(b: Builder, layer: Layer, x: Tensor) -> Tensor:
    """The ordinary feed-forward in layers without experts, the mixture in the others."""
    if layer.get("ffn_gate_inp.weight") is None:
        return b.ffn(layer, x)
    return moe_ffn(b, layer, x)


def moe_ffn(
    b: Builder,
    layer: Layer,
    x: Tensor,
    act: Activation = Activation.SILU,
    *,
    logits: Tensor | None = None,
    select_by_logits: bool = False,
    weigh_inputs: bool = False,
) -> Tensor:
    """Routed experts plus the shared one, if the layer has one: [n_embd, n_tokens].

    `logits` come from another router than ffn_gate_inp. Llama 4 selects by logits whatever the
    gating, and weighs the experts' inputs instead of their outputs.
    """
    if logits is None:
        logits = build.mul_mat(layer["ffn_gate_inp.weight"], x)
    ids, weights = _route(b, layer, logits, select_by_logits=select_by_logits)
    out = _experts(b, layer, x, ids, weights, act, weigh_inputs=weigh_inputs)
    if layer.get("ffn_up_shexp.weight") is None:
        return out
    return b.add(out, shared_expert(b, layer, x), "ffn_out", layer.il)


def shared_expert(b: Builder, layer: Layer, x: Tensor) -> Tensor:
    """The expert that sees every token; with a gate it is multiplied by sigmoid(w . x)."""
    il = layer.il
    out = b.ffn(layer, x, suffix="_shexp", name="ffn_shexp")
    w = layer.get("ffn_gate_inp_shexp.weight")
    if w is None:
        return out
    gate = b.name(build.mul_mat(w, x), "ffn_shexp_gate_inp", il)
    gate = b.name(build.sigmoid(gate), "ffn_shexp_gate", il)
    return b.name(build.mul(out, gate), "ffn_shexp_out", il)


# ---------------------------------------------------------------- which experts
def _route(
    b: Builder, layer: Layer, logits: Tensor, *, select_by_logits: bool
) -> tuple[Tensor, Tensor]:
    """Logits [n_expert, n_tokens] -> ids [n_used, n_tokens], weights [1, n_used, n_tokens]."""
    il, e = layer.il, b.hp.experts
    assert e is not None
    b.name(logits, "ffn_moe_logits", il)
    bias = layer.get("ffn_gate_inp.bias")
    if bias is not None:
        logits = b.add(logits, bias, "ffn_moe_logits_biased", il)
    probs = b.name(GATES[e.gating](logits), "ffn_moe_probs", il)
    selection = logits if select_by_logits else probs
    bias = layer.get("exp_probs_b.bias")
    if bias is not None:
        # it only balances the choice: the weights are those without it
        selection = b.add(probs, bias, "ffn_moe_probs_biased", il)
    if e.n_groups > 1 and selection.ne[1]:
        selection = _best_groups(b, selection, e, il)
    ids = build.argsort_top_k(selection, e.n_used[il])
    order = ids.src[0]
    assert order is not None
    b.name(order, "ffn_moe_argsort", il)
    b.name(ids, "ffn_moe_topk", il)
    weights = build.get_rows(build.reshape(probs, 1, *probs.ne[:2]), ids)
    return ids, _weights(b, b.name(weights, "ffn_moe_weights", il), e, il)


def _best_groups(b: Builder, selection: Tensor, e: Experts, il: int) -> Tensor:
    """Selection with -inf outside the groups whose two best experts add up to the most."""
    n_expert, n_tokens = selection.ne[:2]
    size = n_expert // e.n_groups
    groups = build.reshape(selection, size, e.n_groups, n_tokens)
    best = build.argsort_top_k(groups, 2)
    scores = build.get_rows(build.reshape(groups, 1, size, e.n_groups, n_tokens), best)
    scores = build.sum_rows(build.reshape(scores, 2, e.n_groups, n_tokens))
    scores = build.reshape(scores, e.n_groups, n_tokens)
    chosen = build.argsort_top_k(scores, e.n_groups_used)
    b.name(chosen, "ffn_moe_group_topk", il)
    kept = build.set_rows(build.fill(groups, -inf), build.get_rows(groups, chosen), chosen)
    return b.name(build.reshape(kept, n_expert, n_tokens), "ffn_moe_probs_masked", il)


def _weights(b: Builder, weights: Tensor, e: Experts, il: int) -> Tensor:
    """Of the chosen experts: normalized and scaled as the model wants, [1, n_used, n_tokens]."""
    _, n_used, n_tokens, _ = weights.ne
    if e.gating == Gating.SOFTMAX_WEIGHT:
        weights = build.soft_max(build.reshape(weights, n_used, n_tokens))
        weights = build.reshape(weights, 1, n_used, n_tokens)
        b.name(weights, "ffn_moe_weights_softmax", il)
    if e.norm_weights:
        weights = build.reshape(weights, n_used, n_tokens)
        total = b.name(build.sum_rows(weights), "ffn_moe_weights_sum", il)
        total = b.name(build.clamp(total, SMALLEST_SUM, inf), "ffn_moe_weights_sum_clamped", il)
        weights = b.name(build.div(weights, total), "ffn_moe_weights_norm", il)
        weights = build.reshape(weights, 1, n_used, n_tokens)
    if e.weights_scale != 1.0:
        weights = b.scale(weights, e.weights_scale, "ffn_moe_weights_scaled", il)
    # before the experts, as in llama.cpp: the dumps of both list the nodes alike
    b.graph.expand(weights)
    return weights


# ---------------------------------------------------------------- what they compute
def _experts(
    b: Builder,
    layer: Layer,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    act: Activation,
    *,
    weigh_inputs: bool,
) -> Tensor:
    """The weighted sum of what the chosen experts make of x: [n_embd, n_tokens]."""
    il = layer.il
    n_embd, n_tokens = x.ne[:2]
    x = build.reshape(x, n_embd, 1, n_tokens)
    if weigh_inputs:
        x = build.repeat_to(x, (n_embd, ids.ne[0], n_tokens, 1))
        x = b.name(build.mul(x, weights), "ffn_moe_weighted", il)
    hidden = _activate(b, layer, x, ids, act)
    out = _linear(b, layer, "down", hidden, ids)
    if not weigh_inputs:
        out = b.name(build.mul(out, weights), "ffn_moe_weighted", il)
    return _sum(b, out, il)


def _activate(b: Builder, layer: Layer, x: Tensor, ids: Tensor, act: Activation) -> Tensor:
    """act(gate(x)) * up(x), or act(up(x)) of experts without a gate."""
    il = layer.il
    if layer.get("ffn_gate_up_exps.weight") is not None:
        both = _linear(b, layer, "gate_up", x, ids)
        shape = (both.ne[0] // 2, *both.ne[1:3])
        gate = b.name(build.view(both, shape, both.nb[1:3]), "ffn_moe_gate", il)
        offset = shape[0] * both.nb[0]
        up = b.name(build.view(both, shape, both.nb[1:3], offset), "ffn_moe_up", il)
    else:
        up = _linear(b, layer, "up", x, ids)
        if layer.get("ffn_gate_exps.weight") is None:
            return b.name(PLAIN[act](up), f"ffn_moe_{act.name.lower()}", il)
        gate = _linear(b, layer, "gate", x, ids)
    assert act.value is not None, f"{act.name} has no form that gates"
    hidden = build.glu_split(gate, up, act.value, alpha=OAI_ALPHA, limit=OAI_LIMIT)
    return b.name(hidden, f"ffn_moe_{act.value.name.lower()}", il)


def _linear(b: Builder, layer: Layer, part: str, x: Tensor, ids: Tensor) -> Tensor:
    """Each expert's matrix times its column, scaled and biased if the layer says so."""
    il, key, name = layer.il, f"ffn_{part}_exps", f"ffn_moe_{part}"
    y = build.mul_mat_id(layer[f"{key}.weight"], x, ids)
    scale, bias = layer.get(f"{key}.scale"), layer.get(f"{key}.bias")
    if scale is None:
        b.name(y, name, il)
    else:
        n_expert, n_tokens = scale.ne[0], ids.ne[1]
        rows = build.repeat_to(build.reshape(scale, 1, n_expert), (1, n_expert, n_tokens, 1))
        y = b.name(build.mul(y, build.get_rows(rows, ids)), f"{name}_scaled", il)
    if bias is not None:
        y = b.name(build.add_id(y, bias, ids), f"{name}_biased", il)
    return y


def _sum(b: Builder, out: Tensor, il: int) -> Tensor:
    """Add the experts' columns one after the other: [n, n_used, n_tokens] -> [n, n_tokens]."""
    n, n_used, n_tokens, _ = out.ne
    columns = [build.view(out, (n, n_tokens), (out.nb[2],), i * out.nb[1]) for i in range(n_used)]
    for column in columns:
        b.graph.expand(column)
    total = columns[0]
    for column in columns[1:]:
        total = build.add(total, column)
        b.graph.expand(total)
    if n_used == 1:
        total = build.cont(total)
    return b.name(total, "ffn_moe_out", il)
