"""Dequantizing one block of the types of codes.py: spread in memory, then looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pyggml.backends.cpu.kernels.block_parts import (
    entries,
    load_byte,
    load_bytes,
    load_half,
    small_floats,
)
from pyggml.backends.cpu.kernels.codes import CODES, Codes
from pyggml.backends.cpu.kernels.emit import V
from pyggml.backends.cpu.kernels.spread import SCALES, SPREAD_BYTES, D, stack_memory
from pyggml.dtypes import GGMLType


def _values(type: GGMLType, codes: Codes, b: Any, block: Any) -> Iterator[V]:
    """All products are exact, so their order does not matter."""
    area = stack_memory(b, SPREAD_BYTES)
    codes.spread(b, block, area)
    for k in range(type.block_size // 16):
        q = entries(load_bytes(b, area, 16 * k), codes.entries())
        if type == GGMLType.NVFP4:
            yield q.to_float() * small_floats(load_byte(b, area, SCALES + k) << 7)
            continue
        if codes.scaled:
            scale = load_byte(b, area, SCALES + 16 * k // codes.scaled)
            q = q * ((scale << 1) + 1)
        yield q.to_float() * (load_half(b, area, D) * codes.factor)


CODE_BLOCKS: dict[GGMLType, Callable[[Any, Any], Iterator[V]]] = {
    type: partial(_values, type, codes) for type, codes in CODES.items()
}
