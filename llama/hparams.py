"""Hyper-parameters of a model: read once from GGUF metadata, then frozen.

Keys and defaults are llama.cpp's; a key `x` here means `<architecture>.x` in the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

from pyggml.errors import ModelError
from pyggml.gguf import Metadata, ValueType
from pyggml.ops import RopeMode

MAX_LAYERS = 512
MAX_WINDOW = 1 << 30  # a sliding window as wide as this hides nothing
MAX_FLOAT = 1e38  # kernels compute in float32
ROPE_TYPES = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How positions beyond the training context are squeezed."""

    freq_base: float = 10000.0
    freq_scale: float = 1.0  # without effect if the type is none
    type: str = "linear"  # one of ROPE_TYPES
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    ext_factor: float = -1.0  # negative: 1 for yarn, else 0
    yarn_attn_factor: float = 1.0  # without effect if ext_factor is not 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0  # YaRN: how strongly rotated vectors grow with the factor
    log_multiplier: float = 0.0  # YaRN: as strongly they shrink again

    @property
    def extrapolation(self) -> float:
        """YaRN's ext_factor: 0 stretches all frequencies alike."""
        if self.ext_factor < 0:
            return 1.0 if self.type == "yarn" else 0.0
        return self.ext_factor

    def problem(self) -> str:
        """What makes these numbers useless; "" if they are fine."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "type"}
        for name, number in numbers.items():
            if not abs(number) < MAX_FLOAT:
                return f"{name} is {number:g}"
        positive = ["freq_base", "freq_scale"]
        if self.extrapolation:
            positive += ["n_ctx_orig", "beta_fast", "beta_slow"]
        for name in positive:
            if numbers[name] <= 0:
                return f"{name} is {numbers[name]:g}, it must be positive"
        if self.extrapolation and self.freq_base == 1:
            return "freq_base is 1: all frequencies would be equal"
        return ""


class Gating(IntEnum):
    """What makes weights of the router's logits (expert_gating_func)."""

    SOFTMAX = 1  # over all experts
    SIGMOID = 2
    SOFTMAX_WEIGHT = 3  # over the experts that were chosen by their logits
    SQRT_SOFTPLUS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a token's experts are chosen and weighed; `llama/moe.py` reads and builds them."""

    n_expert: int
    n_used: tuple[int, ...]  # per layer
    n_ff: int  # width of one expert
    n_ff_shared: int = 0  # width of the expert that sees every token; 0: there is none
    n_dense: int = 0  # so many first layers have an ordinary feed-forward
    gating: Gating = Gating.SOFTMAX
    norm_weights: bool = False  # the weights of a token's experts add up to 1
    weights_scale: float = 1.0
    n_groups: int = 0  # more than 1: the experts are chosen from the best groups
    n_groups_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA: keys and values are made of one compressed row per token, and a rotated part."""

    n_lora_q: int  # width of compressed queries; 0: they are projected at once
    n_lora_kv: int  # width of a compressed row
    n_head_k: int  # width of a head's query and key: first the part without position
    n_head_v: int
    absorbed: bool  # the cache holds compressed rows, not keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of layers that attend linearly; `llama/delta_net.py` reads and builds them."""

    n_kernel: int  # of the convolution
    n: int  # of a head, for keys and values
    n_head_k: int  # of q and k
    n_head: int  # of v and of the state

    @property
    def n_channels(self) -> int:
        """Channels of q, k and v, which the convolution sees."""
        return self.n * (2 * self.n_head_k + self.n_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """One model's numbers; per-layer values are tuples of n_layer items."""

    arch: str
    name: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_vocab: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    rms_eps: float
    rope_mode: RopeMode
    rope: RopeScaling = field(default_factory=RopeScaling)
    rope_swa: RopeScaling | None = None  # None: sliding-window layers rotate like the others
    n_swa: int = 0  # 0: no sliding window
    is_swa: tuple[bool, ...] = ()
    attention_scale: float = 0.0  # 0: 1 / sqrt(n_embd_head_k)
    attn_logit_softcap: float = 0.0  # 0: none
    attn_temp_scale: float = 0.0  # 0: attention is equally sharp at all positions
    attn_temp_length: int = 0  # positions of equal sharpness
    final_logit_softcap: float = 0.0  # 0: none
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    is_recurrent: tuple[bool, ...] = ()  # layers that keep a state instead of keys and values
    rope_sections: tuple[int, int, int, int] = (0, 0, 0, 0)  # of modes with four positions
    layer_norm: bool = False  # norms subtract the mean, too; rms_eps is their epsilon
    no_rope: tuple[bool, ...] = ()  # layers that know no positions
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer's parts add to the residual stream
    logit_scale: float = 1.0
    n_nextn: int = 0  # layers behind the last that predict further tokens: they are ignored
    mla: LatentAttention | None = None

    @property
    def kq_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.attention_scale or 1.0 / math.sqrt(self.n_embd_head_k)

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the beginning of keys, and not stored themselves."""
        return self.mla is not None and self.mla.absorbed

    @property
    def rope_offset(self) -> int:
        """The first channel of a cached key that is rotated."""
        return self.n_embd_head_k - self.n_rot if self.mla else 0

    def n_embd_k_gqa(self, il: int) -> int:
        """Width of one cached key row."""
        return self.n_embd_head_k * self.n_head_kv[il]

    def n_embd_v_gqa(self, il: int) -> int:
        """Width of one cached value row."""
        return self.n_embd_head_v * self.n_head_kv[il]

    def recurrent(self, il: int) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        return bool(self.is_recurrent) and self.is_recurrent[il]

    @property
    def n_pos(self) -> int:
        """Positions per token: one, or time, height, width and another."""
        return 4 if self.rope_mode & RopeMode.MROPE else 1

    def swa(self, il: int) -> bool:
        """Whether a layer sees only the last n_swa positions."""
        return bool(self.is_swa) and self.is_swa[il]

    def rope_of(self, il: int) -> RopeScaling:
        """How a layer rotates."""
        return self.rope_swa if self.swa(il) and self.rope_swa else self.rope

    def rotates(self, il: int) -> bool:
        """Whether q and k of a layer are rotated by position."""
        return not (self.no_rope and self.no_rope[il])


def swa_window(kv: Metadata, default: int = 0) -> int:
    """Positions that a layer with a sliding window sees; 0: there are no such layers."""
    key = f"{kv.get_str('general.architecture')}.attention.sliding_window"
    return min(kv.get_int(key, default), MAX_WINDOW)


def swa_pattern(kv: Metadata, n_layer: int, default: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: a list, or n for "every n-th layer sees everything"."""
    key = f"{kv.get_str('general.architecture')}.attention.sliding_window_pattern"
    if key in kv and kv.type_of(key) is ValueType.ARRAY:
        return tuple(bool(v) for v in kv.get_per_layer(key, n_layer))
    n = kv.get_int(key, default)
    if n == 0:
        return (True,) * n_layer
    return tuple(il % n < n - 1 for il in range(n_layer))


def not_negative(kv: Metadata, key: str, default: float | None = None) -> float:
    """A finite number that is at least 0; without a default the key must be there."""
    value = kv.get_float(key) if default is None else kv.get_float(key, default)
    if not 0 <= value < MAX_FLOAT:
        raise ModelError(f"{key} is {value:g}; it must be a number of at least 0")
    return value


def rope_of_window(
    kv: Metadata, rope: RopeScaling, *, freq_base: float = 10000.0, squeezed: bool = False
) -> RopeScaling:
    """Rotation in layers with a sliding window: a base of their own (default `freq_base`).

    Positions are not squeezed unless `squeezed`.
    """
    key = f"{kv.get_str('general.architecture')}.rope.freq_base_swa"
    freq_scale = rope.freq_scale if squeezed else 1.0
    scaling = replace(rope, freq_base=kv.get_float(key, freq_base), freq_scale=freq_scale)
    return _checked(scaling, f"{key} or others")


def yarn_keys(kv: Metadata, rope: RopeScaling) -> RopeScaling:
    """The rope.scaling.yarn_* keys, which few architectures read."""
    prefix = f"{kv.get_str('general.architecture')}.rope.scaling.yarn_"
    scaling = replace(
        rope,
        beta_fast=kv.get_float(f"{prefix}beta_fast", rope.beta_fast),
        beta_slow=kv.get_float(f"{prefix}beta_slow", rope.beta_slow),
        log_multiplier=kv.get_float(f"{prefix}log_multiplier", 0.0),
    )
    return _checked(scaling, f"{prefix}*")


def rope_scaling(kv: Metadata, n_ctx_train: int) -> RopeScaling:
    """The rope.* keys except those of `yarn_keys`."""
    a = kv.get_str("general.architecture")
    type_ = kv.get_str(f"{a}.rope.scaling.type", "linear")
    if type_ not in ROPE_TYPES:
        raise ModelError(f"{a}.rope.scaling.type is {type_!r}; known are {', '.join(ROPE_TYPES)}")
    factor = kv.get_float(f"{a}.rope.scaling.factor", 0.0)
    factor = factor or kv.get_float(f"{a}.rope.scale_linear", 0.0)
    scaling = RopeScaling(
        freq_base=kv.get_float(f"{a}.rope.freq_base", 10000.0),
        freq_scale=1.0 / factor if factor else 1.0,
        type=type_,
        n_ctx_orig=kv.get_int(f"{a}.rope.scaling.original_context_length", n_ctx_train),
        attn_factor=kv.get_float(f"{a}.rope.scaling.attn_factor", 1.0),
    )
    return _checked(scaling, f"{a}.rope.*")


def _checked(scaling: RopeScaling, keys: str) -> RopeScaling:
    if scaling.problem():
        raise ModelError(f"{keys}: {scaling.problem()}")
    return scaling


def common(kv: Metadata, rope_mode: RopeMode, *, layer_norm: bool = False) -> HParams:
    """The keys that every decoder shares; architectures refine the result with `replace`."""
    a = kv.get_str("general.architecture")
    n_layer = kv.get_int(f"{a}.block_count")
    if not 1 <= n_layer <= MAX_LAYERS:
        raise ModelError(f"{a}.block_count is {n_layer}; it must lie in 1..{MAX_LAYERS}")
    n_embd = kv.get_int(f"{a}.embedding_length")
    n_head = tuple(kv.get_per_layer(f"{a}.attention.head_count", n_layer))
    n_head_kv = tuple(kv.get_per_layer(f"{a}.attention.head_count_kv", n_layer, n_head))
    _check_heads(a, n_embd, n_head, n_head_kv)
    head = n_embd // n_head[0]
    head_k = kv.get_int(f"{a}.attention.key_length", head)
    n_ctx_train = kv.get_int(f"{a}.context_length")
    hp = HParams(
        arch=a,
        name=_printable(kv.get_str("general.name", "")),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_vocab=_n_vocab(kv, a),
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=tuple(kv.get_per_layer(f"{a}.feed_forward_length", n_layer, (0,) * n_layer)),
        n_embd_head_k=head_k,
        n_embd_head_v=kv.get_int(f"{a}.attention.value_length", head),
        n_rot=kv.get_int(f"{a}.rope.dimension_count", head_k),
        rms_eps=not_negative(kv, f"{a}.attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon"),
        layer_norm=layer_norm,
        rope_mode=rope_mode,
        rope=rope_scaling(kv, n_ctx_train),
    )
    _check_sizes(hp, mixture=kv.get_int(f"{a}.expert_count", 0) > 0)
    return hp


def gemma_scale(hp: HParams, n_layer: int) -> float:
    """The attention scale of Gemma 2 and 3; of `n_layer` layers is the largest model.

    Only that one divides by the width of the residual stream per head.
    """
    head = hp.n_embd // hp.n_head[0] if hp.n_layer == n_layer else hp.n_embd_head_k
    return 1.0 / math.sqrt(head)


def refuse_experts(kv: Metadata) -> None:
    """For architectures of which only the dense models are computed."""
    key = f"{kv.get_str('general.architecture')}.expert_count"
    if kv.get_int(key, 0):
        raise ModelError(f"{key}: models with experts are not supported")


def require_full_rotation(hp: HParams) -> None:
    """Refuse heads of which only a part is rotated."""
    if hp.n_rot != hp.n_embd_head_k:
        raise ModelError(
            f"{hp.arch}.rope.dimension_count is {hp.n_rot}; "
            f"it must be the head size {hp.n_embd_head_k}"
        )


def with_granite_keys(kv: Metadata, hp: HParams) -> HParams:
    """Granite's scales, of which 0 means none but logits are divided by theirs, and its rope."""
    divisor = not_negative(kv, f"{hp.arch}.logit_scale")
    if not divisor:
        raise ModelError(f"{hp.arch}.logit_scale is 0; logits are divided by it")
    unrotated = not kv.get_bool(f"{hp.arch}.rope.scaling.finetuned", True)
    return replace(
        hp,
        logit_scale=1.0 / divisor,
        residual_scale=not_negative(kv, f"{hp.arch}.residual_scale", 0.0) or 1.0,
        embedding_scale=not_negative(kv, f"{hp.arch}.embedding_scale", 0.0) or 1.0,
        attention_scale=not_negative(kv, f"{hp.arch}.attention.scale", 0.0),
        no_rope=(True,) * hp.n_layer if unrotated else (),
    )


def without_nextn(kv: Metadata, hp: HParams) -> HParams:
    """Without the last layers of block_count, which predict further tokens, if there are any."""
    key = f"{hp.arch}.nextn_predict_layers"
    n = kv.get_int(key, 0)
    if not 0 <= n < hp.n_layer:
        raise ModelError(f"{key} is {n}; it must be less than the {hp.n_layer} layers")
    n_layer = hp.n_layer - n
    return replace(
        hp,
        n_nextn=n,
        n_layer=n_layer,
        n_head=hp.n_head[:n_layer],
        n_head_kv=hp.n_head_kv[:n_layer],
        n_ff=hp.n_ff[:n_layer],
    )


def _check_heads(arch: str, n_embd: int, n_head: Sequence[int], n_head_kv: Sequence[int]) -> None:
    if n_embd < 1:
        raise ModelError(f"{arch}.embedding_length is {n_embd}; it must be positive")
    for heads, heads_kv in zip(n_head, n_head_kv, strict=True):
        if heads < 1 or heads_kv < 1 or heads % heads_kv:
            raise ModelError(
                f"{arch}.attention.head_count is {heads} and head_count_kv {heads_kv}; "
                "both must be positive, and the first a multiple of the second"
            )


def _check_sizes(hp: HParams, *, mixture: bool) -> None:
    sizes = {
        "context_length": hp.n_ctx_train,
        "attention.key_length": hp.n_embd_head_k,
        "attention.value_length": hp.n_embd_head_v,
        "feed_forward_length": min(hp.n_ff),
        "vocab_size": hp.n_vocab,
    }
    if mixture:  # a width of the layers without experts, which there may not be
        del sizes["feed_forward_length"]
    for key, n in sizes.items():
        if n < 1:
            raise ModelError(f"{hp.arch}.{key} is {n}; it must be positive")
    if hp.n_rot % 2 or not 0 < hp.n_rot <= hp.n_embd_head_k:
        raise ModelError(
            f"{hp.arch}.rope.dimension_count is {hp.n_rot}; "
            f"it must be even and at most the head size {hp.n_embd_head_k}"
        )


def _printable(text: str) -> str:
    """Text that cannot move the cursor of a terminal."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _n_vocab(kv: Metadata, arch: str) -> int:
    if "tokenizer.ggml.tokens" in kv:
        return kv.array_len("tokenizer.ggml.tokens")
    return kv.get_int(f"{arch}.vocab_size")
