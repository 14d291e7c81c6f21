"""Graph parts that the models share: embedding, norms, attention, feed-forward, logits.

A builder describes one ubatch; node names are llama.cpp's, so that dumps can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pyggml import build
from pyggml.dtypes import GGMLType
from pyggml.graph import Graph
from pyggml.llama.batch import IntArray
from pyggml.llama.hparams import HParams, RopeScaling
from pyggml.llama.kv_cache import AttentionInputs, KvCache, Memory, rotate
from pyggml.llama.recurrent_state import StateInputs
from pyggml.llama.weights import Layer, Weights
from pyggml.ops import GluOp, Precision
from pyggml.params import FlashAttnParams, RopeParams
from pyggml.tensor import Tensor, new_tensor


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph depends on: two ubatches of equal shape share one graph."""

    n_tokens: int
    n_outputs: int
    n_kv: tuple[int, ...]  # cells looked at, one per cache of the memory
    n_seqs: int = 1  # for recurrent layers: the tokens are those of so many sequences


@dataclass(slots=True)
class Pins:
    """Nodes that belong on a device that the scheduler would not find; each with its layer."""

    norms: list[tuple[Tensor, int]] = field(default_factory=list)
    attention: list[tuple[Tensor, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Leafs that are filled before each run."""

    tokens: Tensor  # I32 [n_tokens]
    pos: Tensor  # I32 [n_pos * n_tokens]
    out_ids: Tensor  # I32 [n_outputs]
    attention: tuple[AttentionInputs, ...]  # one per cache
    attn_temp: Tensor  # F32 [1, 1, n_tokens], see Builder.temper
    state: StateInputs | None  # of recurrent layers


class Builder:
    """Collects the nodes of one forward pass."""

    def __init__(
        self, hp: HParams, shape: GraphShape, memory: Memory, *, flash_attn: bool, n_ctx: int
    ) -> None:
        self.hp = hp
        self.shape = shape
        self.memory = memory
        self.flash_attn = flash_attn
        self.n_ctx = n_ctx
        self.graph = Graph()
        self.pins = Pins()
        n = shape.n_tokens
        self.inputs = GraphInputs(
            tokens=new_tensor(GGMLType.I32, n, name="inp_tokens").as_input(),
            pos=new_tensor(GGMLType.I32, hp.n_pos * n, name="inp_pos").as_input(),
            out_ids=new_tensor(GGMLType.I32, shape.n_outputs, name="inp_out_ids").as_input(),
            attention=tuple(
                cache.inputs(n, n_kv, flash_attn=flash_attn)
                for cache, n_kv in zip(memory.caches, shape.n_kv, strict=True)
            ),
            attn_temp=new_tensor(GGMLType.F32, 1, 1, n, name="inp_attn_scale").as_input(),
            state=memory.state.inputs(shape.n_seqs) if memory.state else None,
        )

    # ------------------------------------------------------------ small parts
    def name(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as llama.cpp does: `name-il` inside a layer."""
        if name == "norm" and il >= 0:
            self.pins.norms.append((t, il))
        return t.named(f"{name}-{il}" if il >= 0 else name)

    def add(self, a: Tensor, b: Tensor, name: str, il: int) -> Tensor:
        return self.name(build.add(a, b), name, il)

    def scale(self, x: Tensor, s: float, name: str, il: int = -1) -> Tensor:
        return self.name(build.scale(x, s), name, il)

    def norm(
        self, x: Tensor, weight: Tensor, name: str, il: int = -1, *, bias: Tensor | None = None
    ) -> Tensor:
        """RMS norm (or the model's other norm) times weight, plus bias."""
        kind = build.norm if self.hp.layer_norm else build.rms_norm
        y = build.mul(self.name(kind(x, self.hp.rms_eps), "norm", il), weight)
        if bias is not None:
            y = build.add(self.name(y, "norm_w", il), bias)
        return self.name(y, name, il)

    def linear(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        """Matrix times x, plus the bias if the model has one."""
        y = build.mul_mat(layer[f"{name}.weight"], x)
        bias = layer.get(f"{name}.bias")
        return y if bias is None else build.add(y, bias)

    # ------------------------------------------------------------ embedding and output
    def embed(self, table: Tensor, *, scale: float = 1.0) -> Tensor:
        """Rows of the embedding table: [n_embd, n_tokens]."""
        x = self.name(build.get_rows(table, self.inputs.tokens), "embd")
        return x if scale == 1.0 else self.scale(x, scale, "inp_scaled")

    def last_rows(self, il: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer keep only the rows whose logits are wanted."""
        if il != self.hp.n_layer - 1:
            return tensors
        return tuple(build.get_rows(t, self.inputs.out_ids) for t in tensors)

    def logits(self, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """[n_vocab, n_outputs], scaled and soft-capped if the model asks for it."""
        y = build.mul_mat(output, x)
        if bias is not None:
            y = build.add(y, bias)
        if self.hp.logit_scale != 1.0:
            y = build.scale(y, self.hp.logit_scale)
        cap = self.hp.final_logit_softcap
        if cap:
            y = build.scale(build.tanh(build.scale(y, 1.0 / cap)), cap)
        return self.name(y, "result_output").as_output()

    # ------------------------------------------------------------ attention
    def qkv(
        self, layer: Layer, x: Tensor, *, normed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [head, n_head, n_tokens], k and v [head, n_head_kv, n_tokens].

        With `normed` q and k are normalized over their whole width, all heads together.
        """
        hp, il, n = self.hp, layer.il, self.shape.n_tokens
        if layer.get("attn_qkv.weight") is not None:
            return self._fused_qkv(layer, x)
        q = self.name(self.linear(layer, "attn_q", x), "Qcur", il)
        k = self.name(self.linear(layer, "attn_k", x), "Kcur", il)
        v = self.name(self.linear(layer, "attn_v", x), "Vcur", il)
        if normed:
            q, k = self.qk_norms(layer, q, k)
        return (
            build.reshape(q, hp.n_embd_head_k, hp.n_head[il], n),
            build.reshape(k, hp.n_embd_head_k, hp.n_head_kv[il], n),
            build.reshape(v, hp.n_embd_head_v, hp.n_head_kv[il], n),
        )

    def qk_norms(self, layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k normalized by those of attn_q_norm and attn_k_norm that the layer has."""

        def normed(x: Tensor, weight: Tensor | None, name: str) -> Tensor:
            return x if weight is None else self.norm(x, weight, name, layer.il)

        q = normed(q, layer.get("attn_q_norm.weight"), "Qcur_normed")
        return q, normed(k, layer.get("attn_k_norm.weight"), "Kcur_normed")

    def _fused_qkv(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `qkv`: heads of q, k and v lie one after the other in each row of one product."""
        hp, il = self.hp, layer.il
        qkv = self.name(self.linear(layer, "attn_qkv", x), "wqkv", il)

        def heads(name: str, size: int, count: int, offset: int) -> Tensor:
            nb = (qkv.type.row_size(size), qkv.nb[1])
            part = build.view(qkv, (size, count, qkv.ne[1]), nb, qkv.type.row_size(offset))
            # what rope does not copy must lie in one piece to be stored
            copied = name == "Vcur" or not hp.rotates(il)
            return self.name(build.cont(part) if copied else part, name, il)

        n_q = hp.n_embd_head_k * hp.n_head[il]
        q = heads("Qcur", hp.n_embd_head_k, hp.n_head[il], 0)
        k = heads("Kcur", hp.n_embd_head_k, hp.n_head_kv[il], n_q)
        v = heads("Vcur", hp.n_embd_head_v, hp.n_head_kv[il], n_q + hp.n_embd_k_gqa(il))
        return q, k, v

    def rope(self, x: Tensor, il: int, w: Weights) -> Tensor:
        """Rotate heads by position with the layer's frequencies."""
        hp = self.hp
        scaling = hp.rope_of(il)
        params = rope_params(hp, scaling)
        factors = rope_factors(w.layer(il), self.n_ctx > scaling.n_ctx_orig)
        return build.rope_ext(x, self.inputs.pos, factors, params)

    def temper(self, q: Tensor, il: int) -> Tensor:
        """Sharpen attention with the distance from the start, where plain scores grow dull."""
        return self.name(build.mul(q, self.inputs.attn_temp), "Qcur_attn_temp_scaled", il)

    def attention(
        self,
        layer: Layer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Store k and v, attend, multiply by a gate, project: [n_embd, n_tokens].

        Of the layer's weights it also uses attn_sinks, if there are any, and attn_v_b, which
        turns compressed values into a head's own.
        """
        il = layer.il
        cache, inputs = self._cache(il)
        q, k = rotate(q, inputs.k_rot), rotate(k, inputs.k_rot)
        v = rotate(v, inputs.v_rot)
        # llama.cpp's order of expansion: the dumps of both list the nodes alike
        for t in (q, v, k):
            self.graph.expand(t)
        self.graph.expand(cache.store_k(il, k, inputs))
        if not self.hp.values_in_keys:
            self.graph.expand(cache.store_v(il, v, inputs))
        n_kv = inputs.mask.ne[0]
        keys, values = cache.keys(il, n_kv), cache.values(il, n_kv)
        attend = self._attend_flash if self.flash_attn else self._attend
        out = self.name(attend(layer, q, keys, values, inputs.mask, scale), "kqv_out", il)
        out = rotate(out, inputs.v_rot)
        if gate is not None:
            out = self.name(build.mul(out, gate), "attn_gated", il)
        return self.linear(layer, "attn_output", out)

    def _cache(self, il: int) -> tuple[KvCache, AttentionInputs]:
        index = self.memory.index_of_layer(il)
        return self.memory.caches[index], self.inputs.attention[index]

    def _attend_flash(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        il, sinks, v_b = layer.il, layer.get("attn_sinks.weight"), layer.get("attn_v_b.weight")
        q = build.permute(q, 0, 2, 1, 3)
        params = FlashAttnParams(
            scale, logit_softcap=self.hp.attn_logit_softcap, precision=Precision.F32
        )
        out = self.name(build.flash_attn_ext(q, k, v, mask, params, sinks), "__fattn__", il)
        self.pins.attention.append((out, il))
        if v_b is not None:
            out = build.mul_mat(v_b, build.permute(out, 0, 2, 1, 3))
            out = build.cont(build.permute(self.name(out, "fattn_mla", il), 0, 2, 1, 3))
        return build.reshape(out, out.ne[0] * out.ne[1], out.ne[2])

    def _attend(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        il, sinks, v_b = layer.il, layer.get("attn_sinks.weight"), layer.get("attn_v_b.weight")
        q = build.permute(q, 0, 2, 1, 3)
        kq = self.name(build.mul_mat(k, q, Precision.F32), "kq", il)
        cap = self.hp.attn_logit_softcap
        if cap:
            kq = build.scale(build.tanh(build.scale(kq, 1.0 / cap)), cap)
        kq = self.name(build.soft_max_ext(kq, mask, scale, sinks=sinks), "kq_soft_max", il)
        if self.hp.values_in_keys:  # which are stored by rows
            v = self.name(build.cont(build.transpose(v)), "v_cont", il)
        kqv = self.name(build.mul_mat(v, kq), "kqv", il)
        if v_b is not None:
            kqv = self.name(build.mul_mat(v_b, kqv), "kqv_mla", il)
        kqv = build.permute(kqv, 0, 2, 1, 3)
        out = build.cont(kqv, kqv.ne[0] * kqv.ne[1], kqv.ne[2])
        self.pins.attention.append((out, il))
        return out

    # ------------------------------------------------------------ feed-forward
    def ffn(
        self,
        layer: Layer,
        x: Tensor,
        act: GluOp = GluOp.SWIGLU,
        *,
        suffix: str = "",
        name: str = "ffn_out",
    ) -> Tensor:
        """down(act(gate(x)) * up(x)); without a gate, `up` holds it in its first half.

        The suffix chooses other tensors, e.g. ffn_up_shexp.
        """
        il = layer.il
        up = self.name(self.linear(layer, f"ffn_up{suffix}", x), "ffn_up", il)
        if layer.get(f"ffn_gate{suffix}.weight") is None:
            hidden = build.glu(up, act)
        else:
            gate = self.name(self.linear(layer, f"ffn_gate{suffix}", x), "ffn_gate", il)
            hidden = build.glu_split(gate, up, act)
        self.name(hidden, f"ffn_{act.name.lower()}", il)
        return self.name(self.linear(layer, f"ffn_down{suffix}", hidden), name, il)

    def plain_ffn(self, layer: Layer, x: Tensor) -> Tensor:
        """down(gelu(up(x))): no gate."""
        il = layer.il
        up = self.name(self.linear(layer, "ffn_up", x), "ffn_up", il)
        hidden = self.name(build.gelu(up), "ffn_gelu", il)
        return self.name(self.linear(layer, "ffn_down", hidden), "ffn_out", il)


def attn_temperatures(hp: HParams, pos: IntArray) -> npt.NDArray[np.float32]:
    """What `Builder.temper` multiplies the q of each position by: 1 in the first stretch."""
    stretch = np.floor(pos / hp.attn_temp_length)
    return (np.log(stretch + 1.0) * hp.attn_temp_scale + 1.0).astype(np.float32)


def rope_positions(hp: HParams, pos: IntArray) -> IntArray:
    """Positions as rope wants them: of text, time, height and width are alike, the last is 0."""
    return pos if hp.n_pos == 1 else np.concatenate([pos, pos, pos, np.zeros_like(pos)])


def rope_params(hp: HParams, scaling: RopeScaling) -> RopeParams:
    """The rope operation's parameters."""
    # llama.cpp: one magnitude for all layers but those that know nothing of squeezed positions
    magnitude = scaling if scaling.type == "none" else hp.rope
    return RopeParams(
        n_dims=hp.n_rot,
        mode=hp.rope_mode,
        n_ctx_orig=scaling.n_ctx_orig,
        freq_base=scaling.freq_base,
        freq_scale=scaling.freq_scale,
        ext_factor=scaling.extrapolation,
        attn_factor=_attn_factor(magnitude),
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        sections=hp.rope_sections,
    )


def _attn_factor(scaling: RopeScaling) -> float:
    if not scaling.extrapolation:
        return scaling.yarn_attn_factor * scaling.attn_factor
    # attention is sharpened when positions are squeezed
    wanted = _yarn_magnitude(scaling, scaling.mscale)
    wanted /= _yarn_magnitude(scaling, scaling.log_multiplier)
    return wanted / _own_magnitude(scaling) * scaling.attn_factor


def _yarn_magnitude(scaling: RopeScaling, m: float) -> float:
    """How much longer rotated vectors become, for a model whose mscale is m; at least 1."""
    return max(1.0, 1.0 - 0.1 * m * math.log(scaling.freq_scale))


def _own_magnitude(scaling: RopeScaling) -> float:
    """What the operation multiplies by on its own."""
    return 1.0 - 0.1 * math.log(scaling.freq_scale) if scaling.extrapolation else 1.0


def shift_params(hp: HParams, scaling: RopeScaling) -> RopeParams:
    """Parameters that rotate cached keys further without scaling them a second time."""
    return replace(rope_params(hp, scaling), attn_factor=1.0 / _own_magnitude(scaling))


def rope_factors(layer: Layer, is_long: bool) -> Tensor | None:
    """Frequency factors: rope_freqs, else longrope's pair chosen by the context's length."""
    freqs = layer.get("rope_freqs.weight")
    if freqs is not None:
        return freqs
    return layer.get("rope_factors_long.weight" if is_long else "rope_factors_short.weight")
