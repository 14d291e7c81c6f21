"""The infill stage: decide between ending and going on when filling a gap in a text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyggml.llama.sampling_candidates import F32, Candidates, running_sum

MIN_PROBABILITY = np.float32(0.2)


def infill(
    eog_ids: frozenset[int], token_to_piece: Callable[[int], bytes], end: int
) -> Callable[[Candidates], Candidates]:
    """Merge tokens that begin each other, drop improbable ones, end when that is likely.

    end: the token left when no text token is probable enough.
    """
    ending = np.array(sorted(eog_ids), dtype=np.int32)

    def step(c: Candidates) -> Candidates:
        c = c.in_order().softmax()
        ends = np.isin(c.ids, ending)
        probs = _probs(c)
        p_end = running_sum(probs * ends)[-1]
        if 3 * p_end * len(c) > running_sum(probs * ~ends)[-1]:
            return renormalized(c.keep(ends))
        c = merged(c, [token_to_piece(int(token)) for token in c.ids])
        c = c.keep(ends | (_probs(c) >= MIN_PROBABILITY))
        ends = np.isin(c.ids, ending)
        texts = int(np.count_nonzero(~ends))
        if not texts:
            only = np.array([1], dtype=np.float32)
            return Candidates(np.array([end], dtype=np.int32), only, only)
        c = renormalized(c)
        return renormalized(c.keep(ends | (_probs(c) >= np.float32(1 / (texts + 1)))))

    return step


def merged(c: Candidates, pieces: list[bytes]) -> Candidates:
    """Give the probability of tokens that begin one another to the more probable one."""
    probs, logits = _probs(c).copy(), c.logits.copy()
    for i, piece in enumerate(pieces):
        for j, longer in enumerate(pieces):
            if logits[i] == -np.inf:
                break
            if i == j or logits[j] == -np.inf or not piece or not longer.startswith(piece):
                continue
            winner, loser = (j, i) if probs[j] > probs[i] else (i, j)
            probs[winner] += probs[loser]
            probs[loser], logits[loser] = 0, -np.inf
    return Candidates(c.ids, logits, probs, sorted=False)


def renormalized(c: Candidates) -> Candidates:
    """Probabilities divided by their sum."""
    probs = _probs(c)
    return Candidates(c.ids, c.logits, probs / running_sum(probs)[-1], c.sorted)


def _probs(c: Candidates) -> F32:
    assert c.probs is not None
    return c.probs
