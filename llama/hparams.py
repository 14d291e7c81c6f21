"""Hyper-parameters of a model: read once from GGUF metadata, then frozen.

Keys and defaults are llama.cpp's; a key `x` here means `<architecture>.x` in the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyggml.errors import ModelError
from pyggml.gguf import Metadata, ValueType
from pyggml.ops import RopeMode

MAX_LAYERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How positions beyond the training context are squeezed; `type` none, linear or yarn."""

    freq_base: float = 10000.0
    freq_scale: float = 1.0
    type: str = "linear"
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    ext_factor: float = -1.0  # negative: 1 for yarn, else 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


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
    final_logit_softcap: float = 0.0  # 0: none

    @property
    def kq_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.attention_scale or 1.0 / math.sqrt(self.n_embd_head_k)

    def n_embd_k_gqa(self, il: int) -> int:
        """Width of one cached key row."""
        return self.n_embd_head_k * self.n_head_kv[il]

    def n_embd_v_gqa(self, il: int) -> int:
        """Width of one cached value row."""
        return self.n_embd_head_v * self.n_head_kv[il]

    def swa(self, il: int) -> bool:
        """Whether a layer sees only the last n_swa positions."""
        return bool(self.is_swa) and self.is_swa[il]


def swa_pattern(kv: Metadata, key: str, n_layer: int, default: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: a list, or n for "every n-th layer sees everything"."""
    if key in kv and kv.type_of(key) is ValueType.ARRAY:
        return tuple(bool(v) for v in kv.get_per_layer(key, n_layer))
    n = kv.get_int(key, default)
    if n == 0:
        return (True,) * n_layer
    return tuple(il % n < n - 1 for il in range(n_layer))


def rope_scaling(kv: Metadata, n_ctx_train: int) -> RopeScaling:
    """The rope.* keys."""
    a = kv.get_str("general.architecture")
    type_ = kv.get_str(f"{a}.rope.scaling.type", "linear")
    known = ("none", "linear", "yarn", "longrope")
    if type_ not in known:
        raise ModelError(f"{a}.rope.scaling.type is {type_!r}; known are {', '.join(known)}")
    factor = kv.get_float(f"{a}.rope.scaling.factor", 0.0)
    factor = factor or kv.get_float(f"{a}.rope.scale_linear", 0.0)
    return RopeScaling(
        freq_base=kv.get_float(f"{a}.rope.freq_base", 10000.0),
        freq_scale=1.0 if factor == 0 or type_ == "none" else 1.0 / factor,
        type=type_,
        n_ctx_orig=kv.get_int(f"{a}.rope.scaling.original_context_length", n_ctx_train),
        attn_factor=kv.get_float(f"{a}.rope.scaling.attn_factor", 1.0),
        ext_factor=kv.get_float(f"{a}.rope.scaling.yarn_ext_factor", -1.0),
        beta_fast=kv.get_float(f"{a}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=kv.get_float(f"{a}.rope.scaling.yarn_beta_slow", 1.0),
    )


def common(kv: Metadata, rope_mode: RopeMode) -> HParams:
    """The keys that every decoder shares; architectures refine the result with `replace`."""
    a = kv.get_str("general.architecture")
    n_layer = kv.get_int(f"{a}.block_count")
    if not 1 <= n_layer <= MAX_LAYERS:
        raise ModelError(f"{a}.block_count is {n_layer}; it must lie in 1..{MAX_LAYERS}")
    n_embd = kv.get_int(f"{a}.embedding_length")
    n_head = tuple(kv.get_per_layer(f"{a}.attention.head_count", n_layer))
    n_head_kv = tuple(kv.get_per_layer(f"{a}.attention.head_count_kv", n_layer, n_head))
    _check_heads(a, n_embd, n_head, n_head_kv)
    head_k = kv.get_int(f"{a}.attention.key_length", n_embd // n_head[0])
    n_ctx_train = kv.get_int(f"{a}.context_length")
    hp = HParams(
        arch=a,
        name=kv.get_str("general.name", ""),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_vocab=_n_vocab(kv, a),
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=tuple(kv.get_per_layer(f"{a}.feed_forward_length", n_layer, (0,) * n_layer)),
        n_embd_head_k=head_k,
        n_embd_head_v=kv.get_int(f"{a}.attention.value_length", n_embd // n_head[0]),
        n_rot=kv.get_int(f"{a}.rope.dimension_count", head_k),
        rms_eps=kv.get_float(f"{a}.attention.layer_norm_rms_epsilon"),
        rope_mode=rope_mode,
        rope=rope_scaling(kv, n_ctx_train),
    )
    _check_sizes(hp)
    return hp


def _check_heads(arch: str, n_embd: int, n_head: Sequence[int], n_head_kv: Sequence[int]) -> None:
    if n_embd < 1:
        raise ModelError(f"{arch}.embedding_length is {n_embd}; it must be positive")
    for heads, heads_kv in zip(n_head, n_head_kv, strict=True):
        if heads < 1 or heads_kv < 1 or heads % heads_kv:
            raise ModelError(
                f"{arch}.attention.head_count {heads} is not a multiple of head_count_kv {heads_kv}"
            )


def _check_sizes(hp: HParams) -> None:
    if hp.n_ctx_train < 1:
        raise ModelError(f"{hp.arch}.context_length is {hp.n_ctx_train}; it must be positive")
    for what, n in (("key_length", hp.n_embd_head_k), ("value_length", hp.n_embd_head_v)):
        if n < 1:
            raise ModelError(f"{hp.arch}.attention.{what} is {n}; it must be positive")
    if hp.n_rot % 2 or not 0 < hp.n_rot <= hp.n_embd_head_k:
        raise ModelError(
            f"{hp.arch}.rope.dimension_count is {hp.n_rot}; "
            f"it must be even and at most the head size {hp.n_embd_head_k}"
        )


def _n_vocab(kv: Metadata, arch: str) -> int:
    if "tokenizer.ggml.tokens" in kv:
        return kv.array_len("tokenizer.ggml.tokens")
    return kv.get_int(f"{arch}.vocab_size")
