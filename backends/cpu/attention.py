"""What the attention kernels and the planner of their tiles agree on."""

from __future__ import annotations

from typing import Final

from pyggml.dtypes import GGMLType

BLOCK: Final = 64  # keys whose scores are computed together
SEGMENT: Final = 512  # keys that share a record: maximum, sum and output of each row
HEAD: Final = 64  # bytes of a record before its output

# Types of keys and values; a kernel gets the place of a type here.
KINDS: Final = (
    *(GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q4_1),
    *(GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.IQ4_NL),
)
