"""Buffers that take no memory: what a model or a graph would need, without having it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pyggml.backend import Buffer, BufferType, alloc_planned
from pyggml.tensor import Tensor

BASE = 1 << 60  # a multiple of every alignment; whoever reads or writes there is stopped


class PlaceholderBuffer(Buffer):
    """A size, and addresses that nobody may use."""

    def __init__(self, buft: BufferType, size: int) -> None:
        self.buft = buft
        self.base = BASE
        self.size = size

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        raise AssertionError(f"{tensor!r} is planned only: it has no memory")

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        raise AssertionError(f"{tensor!r} is planned only: it has no memory")

    def clear(self, value: int = 0) -> None:
        """There is nothing to set."""


def plan_tensors(tensors: Sequence[Tensor], buft: BufferType) -> Buffer | None:
    """As `alloc_tensors`, with placeholders of the same sizes; None if nothing is to be placed."""
    return alloc_planned(tensors, buft, partial(PlaceholderBuffer, buft))
