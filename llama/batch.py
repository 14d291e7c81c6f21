"""Batches: tokens with positions, sequences and output marks, cut into ubatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml.errors import UserError

IntArray = npt.NDArray[np.int32]
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

    @staticmethod
    def of(
        tokens: Sequence[int] | IntArray, pos: int, *, seq: int = 0, logits: str = "last"
    ) -> Batch:
        """One sequence from position `pos` on; logits of `last`, `all` or `none` of the tokens."""
        ids = np.asarray(tokens, np.int32)
        wants = np.full(len(ids), logits == "all")
        if logits == "last" and len(ids):
            wants[-1] = True
        positions = np.arange(pos, pos + len(ids), dtype=np.int32)
        return Batch(ids, positions, ((seq,),) * len(ids), wants)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def check(self, n_vocab: int, n_seq_max: int) -> None:
        """Raise BatchError for a token or a sequence that does not exist."""
        bad = np.flatnonzero((self.tokens < 0) | (self.tokens >= n_vocab))
        if bad.size:
            i = int(bad[0])
            raise BatchError(
                f"token {i} of the batch is {self.tokens[i]}; the vocabulary has {n_vocab}"
            )
        for i, ids in enumerate(self.seq_ids):
            if not ids or min(ids) < 0 or max(ids) >= n_seq_max:
                raise BatchError(
                    f"token {i} of the batch has sequences {ids}; n_seq_max is {n_seq_max}"
                )

    def split(self, n_ubatch: int) -> Iterator[Ubatch]:
        """Runs of at most n_ubatch tokens, in order."""
        for start in range(0, self.n_tokens, n_ubatch):
            part = slice(start, start + n_ubatch)
            outputs = np.flatnonzero(self.wants_logits[part]).astype(np.int32)
            yield Ubatch(self.tokens[part], self.pos[part], self.seq_ids[part], outputs)
