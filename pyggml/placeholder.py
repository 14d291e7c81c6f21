"""Buffers that take no memory: what a model or a graph would need, without having it."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.backend import Buffer, BufferType, pad, view_init
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

    def put(self, tensor: Tensor, offset: int) -> None:
        """Let a tensor lie at an offset."""
        tensor.buffer = self
        tensor.data = self.base + offset


def plan_tensors(tensors: Sequence[Tensor], buft: BufferType) -> Buffer | None:
    """As `alloc_tensors`, with a placeholder of the same size; None if nothing is to be placed."""
    size = buft.alloc_size_n(tensors)
    if not size:
        return None
    buffer, offset = PlaceholderBuffer(buft, size), 0
    for t in tensors:
        if t.view_src is not None:
            if t.buffer is None and t.view_src.buffer is not None:
                view_init(t)
        elif t.data is None:
            buffer.put(t, offset)
            offset += pad(buft.alloc_size(t), buft.alignment)
    return buffer
