"""The dynamic allocator behind the graph allocator: it only plans, there is no memory yet."""

from __future__ import annotations

from pyggml.backend import NO_LIMIT, pad
from pyggml.errors import OutOfMemory

MAX_CHUNKS = 16
UNLIMITED = NO_LIMIT // 2


class _Chunk:
    """One future buffer: free blocks [offset, size] sorted by offset, and the highest byte used."""

    __slots__ = ("blocks", "max_size")

    def __init__(self, size: int) -> None:
        self.blocks = [[0, size]]
        self.max_size = 0


class DynamicAllocator:
    """Best fit over chunks of at most `max_size` bytes; an address is (chunk, offset).

    The sixteenth chunk has no limit: the backend may then complain about its size.
    """

    def __init__(self, alignment: int, max_size: int) -> None:
        self._alignment = alignment
        self._max_size = min(max_size, UNLIMITED)
        self._chunks: list[_Chunk] = []

    @property
    def chunk_sizes(self) -> list[int]:
        """Bytes that each chunk needs."""
        return [chunk.max_size for chunk in self._chunks]

    def alloc(self, size: int) -> tuple[int, int]:
        """Reserve size bytes. Raises OutOfMemory."""
        size = pad(size, self._alignment)
        found = self._inner_fit(size) or self._tail_fit(size) or self._grow(size)
        c, b = found
        chunk = self._chunks[c]
        block = chunk.blocks[b]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del chunk.blocks[b]
        chunk.max_size = max(chunk.max_size, offset + size)
        return c, offset

    def _inner_fit(self, size: int) -> tuple[int, int] | None:
        """The smallest block that fits, the last of each chunk aside; later chunks go first."""
        for c in range(len(self._chunks) - 1, -1, -1):
            blocks = self._chunks[c].blocks
            best, best_size = -1, NO_LIMIT
            for b in range(len(blocks) - 1):
                if size <= blocks[b][1] <= best_size:
                    best, best_size = b, blocks[b][1]
            if best >= 0:
                return c, best
        return None

    def _tail_fit(self, size: int) -> tuple[int, int] | None:
        """Among the last blocks: the least waste without growth, else the least growth."""
        found = None
        best = -NO_LIMIT
        for c, chunk in enumerate(self._chunks):
            if not chunk.blocks or chunk.blocks[-1][1] < size:
                continue
            left = chunk.max_size - chunk.blocks[-1][0] - size  # negative: the chunk has to grow
            if left > best if best < 0 else 0 <= left < best:
                found, best = (c, len(chunk.blocks) - 1), left
        return found

    def _grow(self, size: int) -> tuple[int, int]:
        """A new chunk."""
        n = len(self._chunks)
        room = UNLIMITED if n == MAX_CHUNKS - 1 else max(size, self._max_size)
        if n == MAX_CHUNKS or size > room:
            blocks = [b[1] for chunk in self._chunks for b in chunk.blocks]
            largest = max(blocks, default=0)
            raise OutOfMemory(f"{size} bytes wanted, the largest free block has {largest}")
        self._chunks.append(_Chunk(room))
        return n, 0

    def free(self, chunk: int, offset: int, size: int) -> None:
        """Give size bytes back; neighbouring free blocks become one."""
        size = pad(size, self._alignment)
        if size == 0:
            return
        blocks = self._chunks[chunk].blocks
        for i, block in enumerate(blocks):
            if block[0] + block[1] == offset:
                block[1] += size
                if i + 1 < len(blocks) and block[0] + block[1] == blocks[i + 1][0]:
                    block[1] += blocks.pop(i + 1)[1]
                return
            if offset + size == block[0]:
                block[0] = offset
                block[1] += size
                return
            if block[0] > offset:
                blocks.insert(i, [offset, size])
                return
        blocks.append([offset, size])
