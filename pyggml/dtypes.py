"""The ggml types: one table; sizes, names and partners come from it (ggml: type traits)."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class GGMLType(IntEnum):
    """Type ids as GGUF files store them; the gaps are removed formats."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def info(self) -> "TypeInfo":
        return TYPES[self]

    @property
    def block_size(self) -> int:
        """Elements per block."""
        return TYPES[self].block_size

    @property
    def type_size(self) -> int:
        """Bytes per block."""
        return TYPES[self].type_size

    @property
    def is_quantized(self) -> bool:
        return TYPES[self].dot is not None

    @property
    def label(self) -> str:
        """The name ggml prints: lower case, the K kept upper case."""
        return self.name.lower().replace("_k", "_K")

    def row_size(self, n: int) -> int:
        """Bytes of a row of n elements; n must be a multiple of the block size."""
        return TYPES[self].type_size * n // TYPES[self].block_size


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """One row of the type table."""

    block_size: int
    type_size: int
    dot: GGMLType | None = (
        None  # the activation type of ggml's CPU dot product; quantized types only
    )
    numpy: npt.DTypeLike | None = None  # element dtype of the plain types (BF16 as its raw bits)


_T = GGMLType
TYPES: dict[GGMLType, TypeInfo] = {
    _T.F32: TypeInfo(1, 4, numpy=np.float32),
    _T.F16: TypeInfo(1, 2, numpy=np.float16),
    _T.BF16: TypeInfo(1, 2, numpy=np.uint16),
    _T.F64: TypeInfo(1, 8, numpy=np.float64),
    _T.I8: TypeInfo(1, 1, numpy=np.int8),
    _T.I16: TypeInfo(1, 2, numpy=np.int16),
    _T.I32: TypeInfo(1, 4, numpy=np.int32),
    _T.I64: TypeInfo(1, 8, numpy=np.int64),
    _T.Q1_0: TypeInfo(128, 18, _T.Q8_0),
    _T.Q2_0: TypeInfo(64, 18, _T.Q8_0),
    _T.Q4_0: TypeInfo(32, 18, _T.Q8_0),
    _T.Q4_1: TypeInfo(32, 20, _T.Q8_1),
    _T.Q5_0: TypeInfo(32, 22, _T.Q8_0),
    _T.Q5_1: TypeInfo(32, 24, _T.Q8_1),
    _T.Q8_0: TypeInfo(32, 34, _T.Q8_0),
    _T.Q8_1: TypeInfo(32, 36, _T.Q8_1),
    _T.MXFP4: TypeInfo(32, 17, _T.Q8_0),
    _T.NVFP4: TypeInfo(64, 36, _T.Q8_0),
    _T.Q2_K: TypeInfo(256, 84, _T.Q8_K),
    _T.Q3_K: TypeInfo(256, 110, _T.Q8_K),
    _T.Q4_K: TypeInfo(256, 144, _T.Q8_K),
    _T.Q5_K: TypeInfo(256, 176, _T.Q8_K),
    _T.Q6_K: TypeInfo(256, 210, _T.Q8_K),
    _T.Q8_K: TypeInfo(256, 292, _T.Q8_K),
    _T.IQ1_S: TypeInfo(256, 50, _T.Q8_K),
    _T.IQ1_M: TypeInfo(256, 56, _T.Q8_K),
    _T.IQ2_XXS: TypeInfo(256, 66, _T.Q8_K),
    _T.IQ2_XS: TypeInfo(256, 74, _T.Q8_K),
    _T.IQ2_S: TypeInfo(256, 82, _T.Q8_K),
    _T.IQ3_XXS: TypeInfo(256, 98, _T.Q8_K),
    _T.IQ3_S: TypeInfo(256, 110, _T.Q8_K),
    _T.IQ4_NL: TypeInfo(32, 18, _T.Q8_0),
    _T.IQ4_XS: TypeInfo(256, 136, _T.Q8_K),
    _T.TQ1_0: TypeInfo(256, 54, _T.Q8_K),
    _T.TQ2_0: TypeInfo(256, 66, _T.Q8_K),
}
