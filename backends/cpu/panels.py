"""Memory layouts of the matrix products: weights in panels of 16 rows, activations as int8.

The lanes of a vector are rows of the weights: 64 bytes hold, for each of 16 rows, 4 consecutive
quants, and the activation side is 4 bytes repeated. So dot products need no sums across lanes and
the scales of 16 rows are one vector. A panel is read from front to back, in one stream, which the
hardware follows at the full speed of memory (two panels of 8 rows side by side had two thirds of
it). Its *units* are given here for half a panel, 8 rows: each field of the one half is followed
by the same field of the other, so all offsets double.

    type   values  bytes  fields
    Q4_0       64    288  f16 d[2][8], 2 x u8 q[4][8][4]
    Q4_1       32    160  f16 d[8], m[8], u8 q[4][8][4]
    Q5_0       64    352  f16 d[2][8], 2 x (u8 h[8][4], q[4][8][4])
    Q5_1       32    192  f16 d[8], m[8], u8 h[8][4], q[4][8][4]
    Q8_0       64    544  f16 d[2][8], 2 x i8 q[8][8][4]
    IQ4_NL     64    288  as Q4_0
    MXFP4      32    160  f32 d[8], u8 q[4][8][4]
    Q2_K      256    672  f16 d[8], dmin[8], u8 scale and min[4][8][4], q[2][8][8][4]
    Q3_K      256    928  i8 scale[4][8][4], u8 h[8][8][4], q[2][8][8][4], f16 d[8], 16 unused
    IQ4_XS    256   1120  f16 d[8], 16 unused, i8 scale[2][8][4], u8 q[8][4][8][4]
    Q4_K      256   1184  f16 d[8], dmin[8], u8 scale[2][8][4], min[2][8][4], q[4][8][8][4]
    Q5_K      256   1440  the same with u8 h[8][8][4] before q
    Q6_K      256   1696  i8 scale[4][8][4], 16 x u8 (ql, ql + 32, qh)[3][8][4], f16 d[8], 16 unused
    Q1_0      256    288  f16 d[2][8], 2 x u8 q[4][8][4]
    Q2_0      128    288  the same
    NVFP4      64    288  u8 d[8][4] (unsigned floats), q[8][8][4]
    TQ1_0     256    544  f16 d[8], 16 unused, u8 q[16][8][4]
    TQ2_0     256    544  the same
    IQ1_S     256    608  f16 d[8], 16 unused, u32 scale[8], shift[8], u8 q[16][8][4]
    IQ1_M     256    640  the same with u32 scale[2][8]
    IQ2_XXS   256    832  f16 d[8], 16 unused, u32 scale[8], u8 h[8][8][4], q[16][8][4]
    IQ2_XS    256    864  the same with u32 scale[2][8]
    IQ2_S     256    864  the same
    IQ3_XXS   256   1088  f16 d[8], 16 unused, u32 scale[8], u8 q[32][8][4]
    IQ3_S     256   1088  the same

Two blocks share a unit where one would not be a multiple of 32 bytes: vectors that cross a cache
line load at half speed. The second block of a last odd unit has d = 0.

In q, the low nibbles of a 32-block's bytes are its values 0..15 and the high ones 16..31 (as in the
file; K types: 32-block 2i and 2i + 1). h holds the fifth bits: Q5_0 and Q5_1 value 4c + j is bit c
of byte j; Q5_K as in the file.

From Q1_0 on (kernels/codes.py) a byte of q or h holds fields of 1, 2 or 4 bits, lowest first. They
belong to groups of 32 values and, where a block has fewer groups than a byte has fields, also to
the next 4 values of the groups (codes.place). Rows of a codebook are stored as their values: IQ1 in
2 bits, IQ2 in 3 (h is the sign), IQ3 in 4. Products look into no codebook; the price is memory:
up to 1.6 times the file's size (IQ2_XXS: 3.25 bits instead of 2.06). Without repacking the file's
blocks are packed in scratch memory each time they are used.

Activations lie in groups of GROUP columns (or alone): block by block, and in it column by column.

    q8    32 values  f32 d, f32 d * sum(q) or i32 -zero * sum(q), i8 q[32]         40 bytes
    q8_halves 32     f32 d, i32 -zero * sum(q)[2], 4 unused, i8 q[32]              48 bytes
    q8_K  256        f32 d, 12 unused, i16 sums16[16], i16 sums32[8], i8 q[256]   320 bytes

The sums of each 4 neighbours are stored in the order 0 2 1 3, as the bytes of scales unpack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyggml.dtypes import GGMLType

ROWS: Final = 16  # of a panel
HALF: Final = 8  # rows that a unit is described for
GROUP: Final = 8  # columns that a group of activations holds
FLOAT_GROUP: Final = 6  # the same for float32 activations
FLOAT_PIECE: Final = 512  # values of k that float products take at a time
FLOAT_ROWS: Final = 64  # most rows of float weights that pass a piece of activations
FLOAT_SUMS: Final = 64 * FLOAT_GROUP * FLOAT_ROWS  # bytes of their sums, 16 lanes each
FEW_COLUMNS: Final = 4  # fewer than this are computed one by one
ROUTE_HEAD_BYTES: Final = 16  # of MUL_MAT_ID's routes (kernels/route.py)
ROUTE_EXPERT_BYTES: Final = 24
LISTED_BYTES: Final = 16  # of a column of an expert in scratch memory (kernels/mul_mat_id.py)
Q8_BYTES: Final = 40
Q8_HALVES_BYTES: Final = 48
Q8K_BYTES: Final = 320


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How a column of activations is quantized."""

    kernel: str  # that makes it
    values: int  # per block
    nbytes: int
    zero: int = 0  # subtracted from every weight; 0: the block keeps d * sum(q)


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """How a type's weights lie in a panel."""

    values: int  # per unit and row
    nbytes: int  # per unit of half a panel
    activations: ActivationFormat

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a panel."""
        return ROWS // HALF * self.nbytes

    @property
    def blocks_per_unit(self) -> int:
        """Blocks of a column of activations that a unit is multiplied with."""
        return self.values // self.activations.values

    def panel_bytes(self, k: int) -> int:
        """Bytes of a panel of k columns."""
        return self.units(k) * self.unit_bytes

    def matrix_bytes(self, k: int, rows: int) -> int:
        """Bytes of the panels of a matrix; the last may be filled only in part."""
        return -(-rows // ROWS) * self.panel_bytes(k)

    def units(self, k: int) -> int:
        return -(-k // self.values)


_Q8 = ActivationFormat("quantize_q8", 32, Q8_BYTES)
_Q8_HALVES = ActivationFormat("quantize_q8_halves", 32, Q8_HALVES_BYTES, 12)
_Q8K = ActivationFormat("quantize_q8_k", 256, Q8K_BYTES)


def _q8_zero(zero: int) -> ActivationFormat:
    return ActivationFormat("quantize_q8", 32, Q8_BYTES, zero)


LAYOUTS: dict[GGMLType, PanelLayout] = {
    GGMLType.Q4_0: PanelLayout(64, 288, _q8_zero(8)),
    GGMLType.Q4_1: PanelLayout(32, 160, _Q8),
    GGMLType.Q5_0: PanelLayout(64, 352, _q8_zero(16)),
    GGMLType.Q5_1: PanelLayout(32, 192, _Q8),
    GGMLType.Q8_0: PanelLayout(64, 544, _q8_zero(128)),
    GGMLType.IQ4_NL: PanelLayout(64, 288, _q8_zero(128)),
    GGMLType.MXFP4: PanelLayout(32, 160, _q8_zero(128)),
    GGMLType.Q2_K: PanelLayout(256, 672, _Q8K),
    GGMLType.Q3_K: PanelLayout(256, 928, _Q8K),
    GGMLType.IQ4_XS: PanelLayout(256, 1120, _Q8K),
    GGMLType.Q4_K: PanelLayout(256, 1184, _Q8K),
    GGMLType.Q5_K: PanelLayout(256, 1440, _Q8K),
    GGMLType.Q6_K: PanelLayout(256, 1696, _Q8K),
    GGMLType.Q1_0: PanelLayout(256, 288, _q8_zero(1)),
    GGMLType.Q2_0: PanelLayout(128, 288, _q8_zero(1)),
    GGMLType.NVFP4: PanelLayout(64, 288, _Q8_HALVES),
    GGMLType.TQ1_0: PanelLayout(256, 544, _Q8K),
    GGMLType.TQ2_0: PanelLayout(256, 544, _Q8K),
    GGMLType.IQ1_S: PanelLayout(256, 608, _Q8K),
    GGMLType.IQ1_M: PanelLayout(256, 640, _Q8K),
    GGMLType.IQ2_XXS: PanelLayout(256, 832, _Q8K),
    GGMLType.IQ2_XS: PanelLayout(256, 864, _Q8K),
    GGMLType.IQ2_S: PanelLayout(256, 864, _Q8K),
    GGMLType.IQ3_XXS: PanelLayout(256, 1088, _Q8K),
    GGMLType.IQ3_S: PanelLayout(256, 1088, _Q8K),
}
