"""Parameters of a context: frozen, validated once (llama_context_params)."""

from dataclasses import dataclass, replace

from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError
from pyggml.llama.hparams import HParams, RopeScaling

FLASH_ATTN = ("auto", "on", "off")
CACHE_TYPES = {"f16": GGMLType.F16, "f32": GGMLType.F32}
MIN_CTX = 8
CTX_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOverrides:
    """Rope parameters given by the user; None (YaRN: negative) means the model's own."""

    scaling: str | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0

    def apply(self, rope: RopeScaling) -> RopeScaling:
        """The model's scaling with the user's changes."""
        type_ = self.scaling or rope.type
        freq_scale = rope.freq_scale if self.freq_scale is None else self.freq_scale
        return replace(
            rope,
            type=type_,
            freq_base=rope.freq_base if self.freq_base is None else self.freq_base,
            freq_scale=1.0 if type_ == "none" else freq_scale,
            n_ctx_orig=self.yarn_orig_ctx or rope.n_ctx_orig,
            ext_factor=_given(self.yarn_ext_factor, rope.ext_factor),
            attn_factor=_given(self.yarn_attn_factor, rope.attn_factor),
            beta_fast=_given(self.yarn_beta_fast, rope.beta_fast),
            beta_slow=_given(self.yarn_beta_slow, rope.beta_slow),
        )


def _given(value: float, default: float) -> float:
    return default if value < 0 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What a context is made for. n_ctx 0 means the model's training context."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0  # 0: all cores
    n_threads_batch: int = 0  # 0: like n_threads
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    warmup: bool = True
    rope: RopeOverrides = RopeOverrides()

    def __post_init__(self) -> None:
        for flag, n, low in (
            ("--ctx-size", self.n_ctx, 0),
            ("--batch-size", self.n_batch, 1),
            ("--ubatch-size", self.n_ubatch, 0),
            ("--threads", self.n_threads, 0),
            ("--threads-batch", self.n_threads_batch, 0),
            ("n_seq_max", self.n_seq_max, 1),
        ):
            if n < low:
                raise ConfigError(f"{flag} {n} is too small: it must be at least {low}")
        if self.flash_attn not in FLASH_ATTN:
            raise ConfigError(f"--flash-attn {self.flash_attn}: one of {', '.join(FLASH_ATTN)}")
        for flag, name in (("--cache-type-k", self.type_k), ("--cache-type-v", self.type_v)):
            if name not in CACHE_TYPES:
                raise ConfigError(f"{flag} {name}: one of {', '.join(CACHE_TYPES)}")

    def resolved(self, hp: HParams, n_cores: int) -> "ContextParams":
        """Every "0 means" replaced; llama.cpp's order: batch limited first, then n_ctx padded."""
        n_ctx = self.n_ctx or hp.n_ctx_train
        n_batch = min(self.n_batch, n_ctx)
        n_threads = self.n_threads or n_cores
        return replace(
            self,
            n_ctx=-(-max(n_ctx, MIN_CTX) // CTX_STEP) * CTX_STEP,
            n_batch=n_batch,
            n_ubatch=min(self.n_ubatch or n_batch, n_batch),
            n_threads=n_threads,
            n_threads_batch=self.n_threads_batch or n_threads,
        )
