"""Stages that look back at the text: repetition penalties and DRY."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.llama.sampling_candidates import Candidates, Stage

Tail = tuple[int, ...]
Breakers = Mapping[int, frozenset[Tail]]  # first token -> the tokens that may complete it

LONGEST_BREAKER = 40  # bytes
LONGEST_TAIL = 20  # tokens
LOG_FLOAT32_MAX = 88.7228391


class Penalties(Stage):
    """Lower the logits of tokens among the last n of the text (repeat, frequency, presence)."""

    name = "penalties"

    def __init__(self, last_n: int, repeat: float, frequency: float, presence: float) -> None:
        self._repeat = np.float32(repeat)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        self._recent: deque[int] = deque(maxlen=last_n)
        self._counts: Counter[int] = Counter()

    def __call__(self, c: Candidates) -> Candidates:
        if not self._counts:
            return c
        at = c.find(np.fromiter(self._counts, dtype=np.int32))
        counts = np.array([self._counts[int(token)] for token in c.ids[at]], dtype=np.float32)
        seen = c.logits[at]
        scaled = np.where(seen <= 0, seen * self._repeat, seen / self._repeat)
        logits = c.logits.copy()
        logits[at] = scaled - (counts * self._frequency + self._presence)
        return c.with_logits(logits, sorted=False)

    def accept(self, token: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(token)
        self._counts[token] += 1

    def forget(self) -> None:
        self._recent.clear()
        self._counts.clear()

    def reset(self) -> None:
        self.forget()

    def clone(self) -> Penalties:
        twin = Penalties(
            self._recent.maxlen or 0,
            float(self._repeat),
            float(self._frequency),
            float(self._presence),
        )
        twin._recent.extend(self._recent)
        twin._counts.update(self._counts)
        return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRule:
    """How strongly DRY punishes a token that would prolong a repeated passage."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: Breakers

    def penalty(self, length: int) -> np.float32:
        """multiplier * base^(length - allowed_length), at most the largest float32."""
        exponent = length - self.allowed_length
        if self.base > 1.000001:
            most = int(np.float32(LOG_FLOAT32_MAX) / np.float32(math.log(self.base)))
            exponent = min(exponent, most) if most > 0 else exponent
        power = float(np.float32(self.base)) ** exponent
        largest = float(np.finfo(np.float32).max)
        return np.float32(min(float(np.float32(self.multiplier)) * power, largest))


class Dry(Stage):
    """Don't Repeat Yourself: lower the tokens that would prolong a repeated passage."""

    name = "dry"

    def __init__(self, rule: DryRule) -> None:
        self._rule = rule
        self._recent: deque[int] = deque(maxlen=rule.last_n)

    def __call__(self, c: Candidates) -> Candidates:
        lengths = repeat_lengths(self._recent, self._rule)
        if not lengths:
            return c
        at = c.find(np.fromiter(lengths, dtype=np.int32))
        penalties = [self._rule.penalty(lengths[int(token)]) for token in c.ids[at]]
        logits = c.logits.copy()
        logits[at] -= np.array(penalties, dtype=np.float32)
        return c.with_logits(logits, sorted=False)

    def accept(self, token: int) -> None:
        self._recent.append(token)

    def forget(self) -> None:
        self._recent.clear()

    def reset(self) -> None:
        self.forget()

    def clone(self) -> Dry:
        twin = Dry(self._rule)
        twin._recent.extend(self._recent)
        return twin


def repeat_lengths(recent: Iterable[int], rule: DryRule) -> dict[int, int]:
    """Per token that would prolong a repetition: the length it already has."""
    newest_first = list(recent)[::-1]
    if len(newest_first) <= rule.allowed_length:
        return {}
    limit = passage_limit(newest_first, rule.breakers)
    if limit < rule.allowed_length:
        return {}
    longest: dict[int, int] = {}
    for k, common in enumerate(prefix_matches(newest_first)):
        length = min(common, limit)
        if k and length >= rule.allowed_length:
            follower = newest_first[k - 1]
            longest[follower] = max(longest.get(follower, 0), length)
    single = {token for token, tails in rule.breakers.items() if () in tails}
    return {token: length for token, length in longest.items() if token not in single}


def passage_limit(newest_first: Sequence[int], breakers: Breakers) -> int:
    """Tokens since the last sequence breaker: no repetition reaches across it."""
    for i, token in enumerate(newest_first):
        fitting = [
            len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= i and all(newest_first[i - 1 - j] == t for j, t in enumerate(tail))
        ]
        if fitting:
            return i - max(fitting)
    return len(newest_first)


def prefix_matches(tokens: Sequence[int]) -> list[int]:
    """For each k, how many tokens from k on equal those from 0 on (Z-algorithm, linear time)."""
    n = len(tokens)
    matches = [n] + [0] * (n - 1)
    left = right = 0  # the match found so far that ends furthest right: [left, right)
    for k in range(1, n):
        length = min(right - k, matches[k - left]) if k < right else 0
        while k + length < n and tokens[length] == tokens[k + length]:
            length += 1
        matches[k] = length
        if k + length > right:
            left, right = k, k + length
    return matches


def token_breakers(
    texts: Iterable[str],
    pieces: Sequence[bytes],
    tokenize: Callable[[str], Sequence[int]],
) -> Breakers:
    """Sequence breakers as tokens: those that contain one, or begin one and its rest.

    pieces: text of every token of the vocabulary, special tokens included.
    """
    found: dict[int, set[Tail]] = {}
    for text in texts:
        wanted = text.encode()[:LONGEST_BREAKER]
        if not wanted:
            continue
        rests = [(wanted[:i], _tail(wanted[i:], tokenize)) for i in range(1, len(wanted))]
        for token, piece in enumerate(pieces):
            if wanted in piece:
                found.setdefault(token, set()).add(())
                continue
            for start, tail in rests:
                if tail is not None and piece.endswith(start):
                    found.setdefault(token, set()).add(tail)
    return {token: frozenset(tails) for token, tails in found.items()}


def _tail(rest: bytes, tokenize: Callable[[str], Sequence[int]]) -> Tail | None:
    """The tokens of the rest of a breaker; None if it starts inside a character."""
    try:
        text = rest.decode()
    except UnicodeDecodeError:
        return None
    return tuple(tokenize(text)[:LONGEST_TAIL])
