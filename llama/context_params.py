"""Parameters of a context: frozen, validated once (llama_context_params)."""

from dataclasses import dataclass, replace

from pyggml.backend import pad
from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError
from pyggml.llama.cpu_params import CpuParams
from pyggml.llama.hparams import ROPE_TYPES, HParams, RopeScaling
from pyggml.threads import ThreadParams

FLASH_ATTN = ("auto", "on", "off")
CACHE_TYPES = {
    t.label: t
    for t in (
        *(GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0),
        *(GGMLType.Q4_1, GGMLType.IQ4_NL, GGMLType.Q5_0, GGMLType.Q5_1),
    )
}
CTX_STEP = 256
MAX_SEQ = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOverrides:
    """Rope parameters given by the user; None, 0 (YaRN: negative) means the model's own."""

    scaling: str | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0

    def __post_init__(self) -> None:
        if self.scaling not in (None, *ROPE_TYPES):
            raise ConfigError(f"--rope-scaling {self.scaling}: one of {', '.join(ROPE_TYPES)}")

    def apply(self, rope: RopeScaling) -> RopeScaling:
        """The model's scaling with the user's changes; raises ConfigError."""
        type_ = self.scaling or rope.type
        changed = replace(
            rope,
            type=type_,
            freq_base=self.freq_base or rope.freq_base,
            freq_scale=1.0 if type_ == "none" else self.freq_scale or rope.freq_scale,
            n_ctx_orig=self.yarn_orig_ctx or rope.n_ctx_orig,
            ext_factor=_given(self.yarn_ext_factor, rope.ext_factor),
            yarn_attn_factor=_given(self.yarn_attn_factor, rope.yarn_attn_factor),
            beta_fast=_given(self.yarn_beta_fast, rope.beta_fast),
            beta_slow=_given(self.yarn_beta_slow, rope.beta_slow),
        )
        if changed.problem():
            raise ConfigError(f"--rope-* and --yarn-*: {changed.problem()}")
        return changed

    def apply_all(self, hp: HParams) -> HParams:
        """The hyper-parameters with the user's changes.

        Layers with a sliding window keep their own frequencies: they see no long context.
        """
        rope, swa = self.apply(hp.rope), hp.rope_swa
        if swa is not None and swa.type == "none":
            swa = replace(swa, freq_base=self.freq_base or swa.freq_base)
        elif swa is not None:
            swa = replace(rope, freq_base=swa.freq_base, freq_scale=swa.freq_scale)
        return replace(hp, rope=rope, rope_swa=swa)


def _given(value: float, default: float) -> float:
    return default if value < 0 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What a context is made for. n_ctx 0 means the model's training context."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0  # 0: one for each CPU that may be used
    n_threads_batch: int = 0  # 0: like n_threads
    cpu: CpuParams = CpuParams()
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    kv_offload: bool = True  # keys, values and states on their layer's device; else on the CPU
    op_offload: bool = True  # large batches on a GPU even where weights are on the CPU
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
        if self.n_seq_max > MAX_SEQ:
            raise ConfigError(f"n_seq_max {self.n_seq_max}: there can be {MAX_SEQ} sequences")
        if self.flash_attn not in FLASH_ATTN:
            raise ConfigError(f"--flash-attn {self.flash_attn}: one of {', '.join(FLASH_ATTN)}")
        for flag, name in (("--cache-type-k", self.type_k), ("--cache-type-v", self.type_v)):
            if name not in CACHE_TYPES:
                raise ConfigError(f"{flag} {name}: one of {', '.join(CACHE_TYPES)}")
        if self.flash_attn == "off" and CACHE_TYPES[self.type_v].is_quantized:
            raise ConfigError(
                f"--cache-type-v {self.type_v}: quantized values need flash attention: leave "
                "--flash-attn off away, or use f16, bf16 or f32"
            )

    def resolved(self, hp: HParams, n_cores: int) -> "ContextParams":
        """Every "0 means" replaced; llama.cpp's order: batch limited first, then n_ctx padded."""
        n_ctx = self.n_ctx or hp.n_ctx_train
        n_batch = min(self.n_batch, n_ctx)
        n_threads = self.n_threads or len(self.cpu.cpus or ()) or n_cores
        n_threads_batch = self.n_threads_batch or len(self.cpu.cpus_batch or ()) or n_threads
        return replace(
            self,
            n_ctx=pad(n_ctx, CTX_STEP),
            n_batch=n_batch,
            n_ubatch=min(self.n_ubatch or n_batch, n_batch),
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
        )

    def check_cache(self, hp: HParams) -> None:
        """Raises ConfigError if the model cannot have keys and values of these types."""
        if hp.values_in_keys and self.type_k != self.type_v:
            raise ConfigError(
                f"--cache-type-k {self.type_k}, --cache-type-v {self.type_v}: the values of this "
                "model lie in its keys: give both the same type"
            )
        for flag, name, head in (
            ("--cache-type-k", self.type_k, hp.n_embd_head_k),
            ("--cache-type-v", self.type_v, hp.n_embd_head_v),
        ):
            step = CACHE_TYPES[name].block_size
            if head % step:
                raise ConfigError(
                    f"{flag} {name}: its blocks of {step} values do not divide the model's heads "
                    f"of {head}: use f16, bf16 or f32"
                )

    def threads(self, n_tokens: int) -> ThreadParams:
        """How a graph of so many tokens runs; of resolved parameters."""
        if n_tokens == 1:
            return self.cpu.generation(self.n_threads)
        return self.cpu.batch(self.n_threads_batch)
