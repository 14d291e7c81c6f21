"""The stages without state: each makes a function from candidates to candidates.

Arithmetic follows llama.cpp: float32 values, sums in list order, a cut that always
leaves at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from pyggml.errors import ConfigError
from pyggml.llama.sampling_candidates import F32, Candidates, log, running_sum

Step = Callable[[Candidates], Candidates]

TOP_P_FIRST_TRY = 256  # a sort of so few tokens almost always reaches top_p


def logit_bias(bias: Mapping[int, float]) -> Step:
    """Add a number to the logits of some tokens; -inf forbids a token."""
    tokens = np.fromiter(bias.keys(), dtype=np.int32)

    def step(c: Candidates) -> Candidates:
        at = c.find(tokens)
        logits = c.logits.copy()
        logits[at] += np.array([bias[int(token)] for token in c.ids[at]], dtype=np.float32)
        if not np.isfinite(logits.max()):
            raise ConfigError("logit_bias forbids every token: leave at least one possible")
        return c.with_logits(logits, sorted=False)

    return step


def top_k(k: int) -> Step:
    """Keep the k highest logits, sorted."""
    return lambda c: c.top(k)


def top_p(p: float, min_keep: int) -> Step:
    """Keep the shortest sorted prefix whose probabilities add up to p."""
    enough = np.float32(p)

    def step(c: Candidates) -> Candidates:
        c = c.softmax()
        for width in (TOP_P_FIRST_TRY, len(c)):
            ordered = c.top(width)
            last = first_reaching(running_sum(_probs(ordered)), enough, min_keep)
            if last is not None:
                return ordered.keep(slice(last + 1))
        return ordered

    return step


def first_reaching(sums: F32, enough: np.float32, min_keep: int) -> int | None:
    """The first position that closes the set: sum reached and min_keep tokens counted."""
    closing = np.flatnonzero(sums >= enough)
    closing = closing[closing + 1 >= min_keep]
    return int(closing[0]) if len(closing) else None


def min_p(p: float, min_keep: int) -> Step:
    """Keep tokens at least p times as probable as the best one."""
    margin = np.float32(math.log(p))

    def step(c: Candidates) -> Candidates:
        wanted = c.logits >= c.peak() + margin
        count = int(np.count_nonzero(wanted))
        if count >= max(min_keep, 1) and not c.sorted:
            return c.keep(wanted)
        return c.top(max(count, min_keep, 1))

    return step


def typical(p: float, min_keep: int) -> Step:
    """Keep the tokens whose surprise is nearest to the entropy, until they add up to p."""
    limit = np.float32(p)

    def step(c: Candidates) -> Candidates:
        c = c.in_order().softmax()
        probs = _probs(c)
        distance = np.abs(-log(probs) - entropy(probs))
        order = np.argsort(distance, kind="stable")
        over = np.flatnonzero(running_sum(probs[order]) > limit)
        over = over[over + 1 >= min_keep]
        return c.keep(order[: over[0] + 1] if len(over) else order, sorted=False)

    return step


def top_n_sigma(n: float) -> Step:
    """Forbid logits more than n standard deviations below the highest one."""
    width = np.float32(n)

    def step(c: Candidates) -> Candidates:
        if len(c) <= 1:
            return c
        possible = c.logits[c.logits != -np.inf]
        count = np.float32(len(possible))
        mean = running_sum(possible)[-1] / count
        variance = running_sum((possible - mean) ** 2)[-1] / count
        lowest = c.peak() - width * np.sqrt(variance)
        logits = np.where(c.logits < lowest, np.float32(-np.inf), c.logits)
        return c.with_logits(logits)

    return step


def temperature(temp: float, delta: float = 0.0, exponent: float = 1.0) -> Step:
    """Divide logits by a temperature, fixed or (delta > 0) following the entropy."""
    fixed = np.float32(temp)
    if delta <= 0:
        return lambda c: cooled(c, fixed)

    low = max(np.float32(0), fixed - np.float32(delta))
    high = fixed + np.float32(delta)

    def step(c: Candidates) -> Candidates:
        if len(c) <= 1:
            return c
        c = c.in_order().softmax()
        most = -log(np.array([1 / len(c)], dtype=np.float32))[0]
        share = np.float32(float(entropy(_probs(c)) / most) ** exponent)
        return cooled(c, low + (high - low) * share).softmax()

    return step


def cooled(c: Candidates, temp: np.float32) -> Candidates:
    """Logits divided by temp; at temp <= 0 only the first highest one stays possible."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        usable = temp > 0 and np.isfinite(c.peak() / temp)
        if usable:
            return c.with_logits(c.logits / temp)
    best = int(np.argmax(c.logits))
    logits = np.full(len(c), -np.inf, dtype=np.float32)
    logits[best] = c.logits[best]
    return c.with_logits(logits)


def entropy(probs: F32) -> np.float32:
    """Sum of -p ln p; an impossible token adds nothing."""
    possible = probs[probs > 0]
    return np.float32(running_sum(-possible * log(possible))[-1])


def _probs(c: Candidates) -> F32:
    assert c.probs is not None, "a softmax comes first"
    return c.probs
