"""Tensors of some layers that stay between graphs: what caches and recurrent states share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pyggml.backend import Buffer, BufferType, alloc_tensors
from pyggml.tensor import Tensor

# alloc_tensors, or what only plans
Alloc = Callable[[Sequence[Tensor], BufferType], Buffer | None]


class MemoryPart(ABC):
    """Tensors without memory until `allocate`."""

    buffer: Buffer | None = None

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def allocate(self, buft: BufferType, alloc: Alloc = alloc_tensors) -> None:
        """Place the tensors; they start as zeros. Raises OutOfMemory."""
        self.buffer = alloc(self.tensors, buft)
        assert self.buffer is not None
        self.buffer.clear(0)

    def free(self) -> None:
        """Give the memory back."""
        if self.buffer is not None:
            self.buffer.free()
            self.buffer = None
