"""Batches: tokens with positions, sequences and output marks, cut into ubatches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pyggml.errors import UserError

IntArray = npt.NDArray[np.int32]
MAX_POS = (1 << 31) - 1  # exclusive
SeqIds = tuple[tuple[int, ...], ...]


class BatchError(UserError):
    """A batch that cannot be decoded: token, sequence or position out of place."""


@dataclass(frozen=True, slots=True)
class Ubatch:
    """Tokens that one graph computes."""

    tokens: IntArray
    pos: IntArray
    seq_ids: SeqIds
    outputs: IntArray  # indices (into this ubatch) of the tokens whose logits are wanted
    places: IntArray  # of its tokens in the batch
    n_seqs: int = 1  # of `Batch.split_equal`: so many sequences, one after the other

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens for one decode. `pos[i]` is a position in every sequence of `seq_ids[i]`."""

    tokens: IntArray
    pos: IntArray
    seq_ids: SeqIds
    wants_logits: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.tokens, self.pos, self.seq_ids, self.wants_logits)}
        if len(lengths) > 1:
            raise BatchError(f"the parts of a batch differ in length: {sorted(lengths)}")

    @staticmethod
    def of(
        tokens: Sequence[int] | IntArray,
        pos: int,
        *,
        seq: int = 0,
        logits: Literal["last", "all", "none"] = "last",
    ) -> Batch:
        """One sequence from position `pos` on, with the logits of some of the tokens."""
        ids = _as_ids(tokens)
        wants = np.full(len(ids), logits == "all")
        if logits == "last":
            wants[-1:] = True
        positions = np.arange(pos, pos + len(ids), dtype=np.int32)
        return Batch(ids, positions, ((seq,),) * len(ids), wants)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def check(self, n_vocab: int, n_seq_max: int) -> None:
        """Raise BatchError for a token, a position or a sequence that cannot be."""
        if not self.n_tokens:
            raise BatchError("the batch is empty")
        bad = np.flatnonzero((self.tokens < 0) | (self.tokens >= n_vocab))
        if bad.size:
            i = int(bad[0])
            raise BatchError(
                f"token {i} of the batch is {self.tokens[i]}: ids are 0..{n_vocab - 1}"
            )
        bad = np.flatnonzero((self.pos < 0) | (self.pos >= MAX_POS))
        if bad.size:
            i = int(bad[0])
            raise BatchError(f"token {i} of the batch has position {self.pos[i]}")
        for i, ids in enumerate(self.seq_ids):
            if not ids or min(ids) < 0 or max(ids) >= n_seq_max:
                raise BatchError(
                    f"token {i} of the batch has sequences {ids}: "
                    f"they are 0..{n_seq_max - 1} (n_seq_max)"
                )

    def follows(self, last: Callable[[int], int]) -> None:
        """Raise BatchError unless every sequence goes on, without a gap, after position last(seq).

        A sequence of which nothing is known (-1) may start anywhere.
        """
        latest: dict[int, int] = {}
        for pos, ids in zip(self.pos.tolist(), self.seq_ids, strict=True):
            for seq in ids:
                before = latest[seq] if seq in latest else last(seq)
                if before >= 0 and pos != before + 1:
                    raise BatchError(
                        f"sequence {seq}: position {pos} follows {before}; "
                        "positions must be consecutive"
                    )
            latest.update(dict.fromkeys(ids, pos))

    def check_shared(self, history: Callable[[int], Hashable]) -> None:
        """Raise BatchError for a token in sequences that have a different past.

        Its keys and values could be right for one of them only. `history(seq)` identifies what a
        sequence holds already.
        """
        if all(len(ids) == 1 for ids in self.seq_ids):
            return
        past: dict[int, Hashable] = {}
        for i, ids in enumerate(self.seq_ids):
            for seq in ids:
                if seq not in past:
                    past[seq] = history(seq)
            if len({past[seq] for seq in ids}) > 1:
                raise BatchError(
                    f"token {i} of the batch is in sequences {ids}, whose earlier tokens differ: "
                    "copy a sequence before sharing tokens, or give it tokens of its own"
                )
            past.update(dict.fromkeys(ids, i))

    def split(self, n_ubatch: int) -> Iterator[Ubatch]:
        """Runs of at most n_ubatch tokens, in order."""
        for start in range(0, self.n_tokens, n_ubatch):
            yield self._part(range(start, min(start + n_ubatch, self.n_tokens)))

    def split_equal(self, n_ubatch: int) -> Iterator[Ubatch]:
        """Ubatches of sequences that have equally many tokens in it, one after the other.

        Layers with a recurrent state need them. No sequence is in two of the sets of a ubatch.
        """
        left = list(range(self.n_tokens))
        while left:
            runs = self._disjoint_runs(left)[:n_ubatch]
            n = min(n_ubatch // len(runs), *map(len, runs))
            taken = [i for run in runs for i in run[:n]]
            yield self._part(taken, len(runs))
            left = sorted(set(left).difference(taken))

    def _disjoint_runs(self, tokens: Sequence[int]) -> list[list[int]]:
        """The next tokens of each set of sequences, up to one of a set that shares a sequence."""
        runs: dict[frozenset[int], list[int]] = {}
        taken: set[int] = set()
        blocked: set[int] = set()
        for i in tokens:
            ids = frozenset(self.seq_ids[i])
            if blocked & ids or (ids not in runs and taken & ids):
                blocked |= ids
            else:
                runs.setdefault(ids, []).append(i)
                taken |= ids
        return list(runs.values())

    def _part(self, tokens: Sequence[int], n_seqs: int = 1) -> Ubatch:
        places = np.array(tokens, np.int32)
        return Ubatch(
            self.tokens[places],
            self.pos[places],
            tuple(self.seq_ids[i] for i in tokens),
            np.flatnonzero(self.wants_logits[places]).astype(np.int32),
            places,
            n_seqs,
        )


def _as_ids(tokens: Sequence[int] | IntArray) -> IntArray:
    """Ids as the graph takes them; what is no 32-bit integer must not silently become one."""
    ids = np.asarray(tokens)
    if not ids.size:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BatchError(f"the tokens of a batch must be one row of integers, not {ids.dtype}")
    limits = np.iinfo(np.int32)
    for i in np.flatnonzero((ids < limits.min) | (ids > limits.max))[:1]:
        raise BatchError(f"token {i} of the batch is {ids[i]}: no vocabulary is that large")
    return ids.astype(np.int32)
