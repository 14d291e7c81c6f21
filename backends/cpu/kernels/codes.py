"""Types whose values are small codes: one row of a table per type.

All of them are read in two steps. First a block is spread in memory (`Codes.spread`): a byte per
value, then the scales of its parts, then d. From there the values follow by table, for panels
(repack_codes.py, tile_codes.py) and for GET_ROWS (blocks_codes.py) alike. What differs between the
types is how they are spread (spread.py, codebooks.py) and a row of this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyggml.backends.cpu.kernels import codebooks, spread
from pyggml.dtypes import GGMLType

# (builder, address of a block, address of SPREAD_BYTES bytes)
Spread = Callable[[Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class Codes:
    """A value is `d * factor * (2 * scale + 1) * table[code]`, or `d * table[code]`."""

    spread: Spread
    table: tuple[int, ...]
    bits: int  # of a code in the panel, without `high`
    scaled: int = 0  # values that share a scale
    factor: float = 1.0
    high: str = ""  # a third bit: of each "value", or shared by 8 ("eight")

    def entries(self, plus: int = 0) -> list[int]:
        """The 16 entries of a table for lookups."""
        return [v + plus for v in self.table] + [0] * (16 - len(self.table))

    @property
    def zero(self) -> int:
        """What makes the table's values unsigned."""
        return -min(self.table)

    @property
    def largest(self) -> int:
        """The largest of those."""
        return max(self.table) + self.zero

    @property
    def step(self) -> int:
        """The unsigned value of code 1 if code n has n times this; 0: a true table."""
        step = self.table[1] - self.table[0]
        linear = all(v + self.zero == step * i for i, v in enumerate(self.table))
        return step if linear and step in (1, 2) else 0


def place(groups: int, bits: int, g: int, c: int) -> tuple[int, int]:
    """Vector and field that hold 4 values from 32 * g + 4 * c on, of `groups` times 32 values.

    The fields of a byte are groups first, and c where there are too few.
    """
    per_byte = 8 // bits
    of_groups = min(groups, per_byte)
    of_c = per_byte // of_groups
    return g // of_groups * (8 // of_c) + c // of_c, of_groups * (c % of_c) + g % of_groups


# ---------------------------------------------------------------- the table
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TERNARY: Final = (-1, 0, 1, 2)  # 2 occurs only in Q2_0
_IQ2 = (8, 25, 43, 0, -8, -25, -43, 0)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_IQ3_S = tuple(range(-15, 16, 2))
_IQ1 = (-9, -1, 7, 15, -7, 1, 9, 17)  # eighths; without the shift -8, 0, 8

T = GGMLType
CODES: dict[GGMLType, Codes] = {
    T.Q1_0: Codes(spread.q1_0, (-1, 1), 1),
    T.Q2_0: Codes(spread.q2_0, TERNARY, 2),
    T.TQ1_0: Codes(spread.tq1_0, TERNARY, 2),
    T.TQ2_0: Codes(spread.tq2_0, TERNARY, 2),
    T.NVFP4: Codes(spread.nvfp4, FP4, 4),
    T.IQ1_S: Codes(codebooks.iq1_s, _IQ1, 2, 32, 1 / 8, "eight"),
    T.IQ1_M: Codes(codebooks.iq1_m, _IQ1, 2, 16, 1 / 8, "eight"),
    T.IQ2_XXS: Codes(codebooks.iq2_xxs, _IQ2, 2, 32, 1 / 8, "value"),
    T.IQ2_XS: Codes(codebooks.iq2_xs, _IQ2, 2, 16, 1 / 8, "value"),
    T.IQ2_S: Codes(codebooks.iq2_s, _IQ2, 2, 16, 1 / 8, "value"),
    T.IQ3_XXS: Codes(codebooks.iq3_xxs, _IQ3_XXS, 4, 32, 1 / 4),
    T.IQ3_S: Codes(codebooks.iq3_s, _IQ3_S, 4, 32),
}
