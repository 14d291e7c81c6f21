"""Parameters of the operations: one frozen record per kind (ggml packs them into 64 bytes)."""

from dataclasses import dataclass

from pyggml.ops import GluOp, Precision, RopeMode, UnaryOp


@dataclass(frozen=True, slots=True)
class NormParams:
    """NORM, RMS_NORM, L2_NORM."""

    eps: float


@dataclass(frozen=True, slots=True)
class ScaleParams:
    """SCALE: x * scale + bias."""

    scale: float
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class ClampParams:
    """CLAMP to [low, high]."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class FillParams:
    """FILL with one value."""

    value: float


@dataclass(frozen=True, slots=True)
class UnaryParams:
    """UNARY: which function; the four floats are XIELU's transformed alphas, beta and eps."""

    op: UnaryOp
    xielu: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GluParams:
    """GLU: activation, order of the halves, and SWIGLU_OAI / SWIGLU_CLAMP constants."""

    op: GluOp
    swapped: bool = False
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MulMatParams:
    """MUL_MAT, MUL_MAT_ID, MUL_MAT_ID_COLD."""

    precision: Precision = Precision.DEFAULT


@dataclass(frozen=True, slots=True)
class SoftMaxParams:
    """SOFT_MAX: scale of the scores and ALiBi's max_bias (0: none)."""

    scale: float = 1.0
    max_bias: float = 0.0


@dataclass(frozen=True, slots=True)
class FlashAttnParams:
    """FLASH_ATTN_EXT."""

    scale: float
    max_bias: float = 0.0
    logit_softcap: float = 0.0
    precision: Precision = Precision.DEFAULT


@dataclass(frozen=True, slots=True)
class RopeParams:
    """ROPE; names and defaults as ggml's rope_ext."""

    n_dims: int
    mode: RopeMode = RopeMode.NORMAL
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    n_offs: int = 0


@dataclass(frozen=True, slots=True)
class ViewParams:
    """VIEW: byte offset into the source."""

    offset: int


@dataclass(frozen=True, slots=True)
class PermuteParams:
    """PERMUTE: dimension i of the source becomes dimension axes[i] of the result."""

    axes: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ConcatParams:
    """CONCAT along a dimension."""

    dim: int


@dataclass(frozen=True, slots=True)
class SortParams:
    """ARGSORT: ascending or descending."""

    descending: bool = False


@dataclass(frozen=True, slots=True)
class TopKParams:
    """TOP_K: how many."""

    k: int


@dataclass(frozen=True, slots=True)
class DeltaNetParams:
    """GATED_DELTA_NET: how many of the latest states the result holds."""

    n_snapshots: int = 1


OpParams = (
    NormParams
    | ScaleParams
    | ClampParams
    | FillParams
    | UnaryParams
    | GluParams
    | MulMatParams
    | SoftMaxParams
    | FlashAttnParams
    | RopeParams
    | ViewParams
    | PermuteParams
    | ConcatParams
    | SortParams
    | TopKParams
    | DeltaNetParams
)
