"""Candidates, the tokens still in the running, and the shape every sampling stage has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Positions = NDArray[np.intp]

SMALL = 2048  # below it a stable argsort beats the packed keys of `descending`


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids with their logits; never changed in place, stages return new ones."""

    ids: I32
    logits: F32
    probs: F32 | None = None  # set by the last stage that took a softmax
    sorted: bool = False  # by logit, highest first
    selected: int = -1  # position of the drawn token, set by the last stage of a chain

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, chosen: NDArray[Any] | slice, *, sorted: bool | None = None) -> Candidates:
        """The candidates at `chosen` (positions, mask or slice), in that order."""
        return Candidates(
            ids=self.ids[chosen],
            logits=self.logits[chosen],
            probs=None if self.probs is None else self.probs[chosen],
            sorted=self.sorted if sorted is None else sorted,
        )

    def with_logits(self, logits: F32, *, sorted: bool | None = None) -> Candidates:
        """The same tokens with other logits."""
        order = self.sorted if sorted is None else sorted
        return replace(self, logits=logits, sorted=order)

    def top(self, k: int) -> Candidates:
        """The k highest logits, highest first; equal logits keep their order."""
        if self.sorted:
            return self.keep(slice(k))
        return self.keep(highest(self.logits, k), sorted=True)

    def in_order(self) -> Candidates:
        """All candidates, highest logit first."""
        return self.top(len(self))

    def softmax(self) -> Candidates:
        """The same candidates with probabilities, summed in float32 in the present order."""
        weights = exp(self.logits - self.peak())
        return replace(self, probs=weights / running_sum(weights)[-1])

    def peak(self) -> np.float32:
        """The highest logit."""
        return np.float32(self.logits[0] if self.sorted else self.logits.max())

    def find(self, tokens: I32) -> Positions:
        """Positions of those of `tokens` that are still candidates."""
        inside = tokens[(tokens >= 0) & (tokens < len(self))]
        if len(inside) == len(tokens) and (self.ids[inside] == inside).all():
            return inside.astype(np.intp)  # nothing has moved yet: position = id
        return np.flatnonzero(np.isin(self.ids, tokens))


class Stage(ABC):
    """One step of a chain; stages without history or randomness need only be callable."""

    name: str

    @abstractmethod
    def __call__(self, c: Candidates) -> Candidates:
        """Filter, reweigh or select."""

    def accept(self, token: int) -> None:
        """Take note of a token of the text (prompt or generated)."""

    def forget(self) -> None:
        """Drop the text, but not random numbers and what was learned from drawing them."""

    def reset(self) -> None:
        """Return to the state before the first token."""

    def clone(self) -> Stage:
        """An independent copy with the same state."""
        return self


@dataclass(frozen=True, slots=True)
class Pure(Stage):
    """A stage made of a function without state."""

    name: str
    step: Callable[[Candidates], Candidates]

    def __call__(self, c: Candidates) -> Candidates:
        return self.step(c)


def off(name: str) -> Pure:
    """A stage that is listed, with llama.cpp's question mark, and does nothing."""
    return Pure(f"?{name}", lambda c: c)


def exp(x: F32) -> F32:
    """float32 e^x, rounded once from float64: what the C library's expf returns."""
    return np.exp(x.astype(np.float64)).astype(np.float32)


def log(x: F32) -> F32:
    """float32 natural logarithm, rounded once from float64; log(0) is -inf."""
    with np.errstate(divide="ignore"):
        return np.log(x.astype(np.float64)).astype(np.float32)


def running_sum(x: F32) -> F32:
    """Partial sums in float32, one after the other as a C loop adds them."""
    return np.cumsum(x, dtype=np.float32)


def highest(logits: F32, k: int) -> Positions:
    """Positions of the k highest logits, highest first, equal ones by position."""
    n = len(logits)
    if k >= n:
        return descending(logits)
    threshold = np.partition(logits, n - k)[n - k]
    kept = np.flatnonzero(logits >= threshold)
    return kept[descending(logits[kept])[:k]]


def descending(logits: F32) -> Positions:
    """Positions by falling logit, equal ones by position."""
    falling = np.float32(0) - logits  # 0 - x, not -x: both zeros must compare equal below
    if len(falling) < SMALL:
        return np.argsort(falling, kind="stable")
    bits = falling.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = ordered.astype(np.uint64) << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)
