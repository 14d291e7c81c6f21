"""Tensors of some layers that stay between graphs: what caches and recurrent states share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pyggml.backend import Buffer, BufferType, alloc_tensors
from pyggml.errors import OutOfMemory
from pyggml.tensor import Tensor

# alloc_tensors, or what only plans
Alloc = Callable[[Sequence[Tensor], BufferType], Buffer | None]

Where = Callable[[int, str], BufferType]  # the place of a layer's tensor, by its name


class MemoryPart(ABC):
    """Tensors of layers, without memory until `allocate`."""

    buffers: tuple[Buffer, ...] = ()  # one for each buffer type

    @property
    @abstractmethod
    def by_layer(self) -> Sequence[tuple[int, Tensor]]:
        """All tensors with their layers."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return tuple(t for _, t in self.by_layer)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def allocate(self, where: Where, alloc: Alloc = alloc_tensors) -> None:
        """Place the tensors; they start as zeros. Raises OutOfMemory, then none has memory."""
        groups: dict[BufferType, list[Tensor]] = {}
        for il, t in self.by_layer:
            groups.setdefault(where(il, t.name), []).append(t)
        for buft in sorted(groups, key=lambda buft: buft.name):
            try:
                buffer = alloc(groups[buft], buft)
            except OutOfMemory:
                self.free()
                raise
            assert buffer is not None
            self.buffers += (buffer,)
            buffer.clear(0)

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()
        self.buffers = ()
