"""What each cell of a KV cache holds: position, pending shift, sequences. No tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

EMPTY = -1
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Cells:
    """`size` cells; a cell belongs to any number of the n_seq_max sequences, or is empty."""

    def __init__(self, size: int, n_seq_max: int) -> None:
        self.size = size
        self.n_seq_max = n_seq_max
        self.pos: IntArray = np.full(size, EMPTY, np.int32)
        self.shift: IntArray = np.zeros(size, np.int32)
        self.seq: BoolArray = np.zeros((n_seq_max, size), np.bool_)
        self.head = 0  # where the search for free cells starts

    # ------------------------------------------------------------ questions
    @property
    def n_used(self) -> int:
        return int(np.count_nonzero(self.pos >= 0))

    @property
    def has_shift(self) -> bool:
        return bool(self.shift.any())

    def last_used(self) -> int:
        """Highest used index, -1 if all cells are empty."""
        used = np.flatnonzero(self.pos >= 0)
        return int(used[-1]) if used.size else -1

    def pos_min(self, seq: int) -> int:
        """Smallest position of a sequence, -1 if it has none."""
        held = self.pos[self.seq[seq]]
        return int(held.min()) if held.size else EMPTY

    def pos_max(self, seq: int) -> int:
        """Largest position of a sequence, -1 if it has none."""
        held = self.pos[self.seq[seq]]
        return int(held.max()) if held.size else EMPTY

    def can_continue(self, seq: int, n: int, n_swa: int = 0) -> bool:
        """Whether a token at position n finds all that it may see, and nothing lies beyond it."""
        first = max(0, n - n_swa + 1) if n_swa else 0
        pos = self.pos[self.seq[seq]]
        return np.array_equal(np.sort(pos[pos >= first]), np.arange(first, n))

    def find_slot(self, n: int, n_swa: int = 0) -> IntArray | None:
        """Indices of n cells to write, from `head` on and wrapping; None if there are not enough.

        Free is an empty cell, or with a sliding window one whose only sequence has moved past it.
        """
        free = self.pos < 0
        if n_swa:
            free |= self._out_of_window(n_swa)
        start = 0 if self.head > self.n_used + 2 * n or self.head >= self.size else self.head
        found = np.flatnonzero(free)
        ordered = np.concatenate([found[found >= start], found[found < start]])
        return ordered[:n].astype(np.int32) if ordered.size >= n else None

    def _out_of_window(self, n_swa: int) -> BoolArray:
        gone = np.zeros(self.size, np.bool_)
        alone = self.seq.sum(axis=0) == 1
        for s in range(self.n_seq_max):
            mine = self.seq[s] & alone
            if mine.any():
                gone |= mine & (self.pos_max(s) + 1 - self.pos >= n_swa)
        return gone

    # ------------------------------------------------------------ writing
    def occupy(self, indices: IntArray, pos: IntArray, seq_ids: Sequence[tuple[int, ...]]) -> None:
        """Put new tokens into cells; what they held is gone, and what came before it too."""
        self._evict(indices)
        self.pos[indices] = pos
        self.shift[indices] = 0
        for cell, ids in zip(indices, seq_ids, strict=True):
            for s in ids:
                self.seq[s, cell] = True
        self.head = int(indices[-1]) + 1 if indices.size else self.head

    def _evict(self, indices: IntArray) -> None:
        # a sequence must stay one range: losing position p loses everything up to p
        for s in range(self.n_seq_max):
            lost = self.pos[indices][self.seq[s, indices]]
            if lost.size:
                self.remove(s, 0, int(lost.max()) + 1)
        self._free(indices)

    def _free(self, indices: IntArray | BoolArray) -> None:
        self.pos[indices] = EMPTY
        self.shift[indices] = 0
        self.seq[:, indices] = False

    def clone(self) -> Cells:
        """An independent copy, to try things out."""
        twin = copy.copy(self)
        twin.pos, twin.shift, twin.seq = self.pos.copy(), self.shift.copy(), self.seq.copy()
        return twin

    def clear(self) -> None:
        """Empty every cell."""
        self._free(np.ones(self.size, np.bool_))
        self.head = 0

    # ------------------------------------------------------------ sequence operations
    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Forget positions p0..p1-1 of a sequence (-1: of all)."""
        inside = (self.pos >= p0) & (self.pos < p1)
        for s in self._sequences(seq):
            self.seq[s] &= ~inside
        self._drop_orphans()

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let `dst` share the cells of `src`."""
        self.seq[dst] |= self.seq[src] & (self.pos >= p0) & (self.pos < p1)

    def keep(self, seq: int) -> None:
        """Forget every other sequence."""
        others = [s for s in range(self.n_seq_max) if s != seq]
        self.seq[others] = False
        self._drop_orphans()

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions; cells that would become negative are freed."""
        if delta == 0:
            return
        moved = self.seq[seq] & (self.pos >= p0) & (self.pos < p1)
        self.pos[moved] += delta
        self.shift[moved] += delta
        negative = moved & (self.pos < 0)
        self._free(negative)
        freed = np.flatnonzero(negative)
        self.head = int(freed[0]) if freed.size else 0

    def divide(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide positions (self-extend)."""
        moved = self.seq[seq] & (self.pos >= p0) & (self.pos < p1)
        before = self.pos[moved].copy()
        self.pos[moved] //= d
        self.shift[moved] += self.pos[moved] - before

    def _sequences(self, seq: int) -> Iterable[int]:
        return range(self.n_seq_max) if seq < 0 else (seq,)

    def _drop_orphans(self) -> None:
        orphans = (self.pos >= 0) & ~self.seq.any(axis=0)
        freed = np.flatnonzero(orphans)
        if freed.size:
            self._free(orphans)
            self.head = min(self.head, int(freed[0]))
