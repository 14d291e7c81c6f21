"""Stages with a random generator: XTC, and those that end a chain by drawing the token.

The draws are llama.cpp's own (std::mt19937 and libstdc++'s distributions), so a seed
gives the same tokens as there, given the same logits.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from pyggml.llama.sampling_candidates import F32, Candidates, Stage, exp, log, running_sum

RANDOM_SEED = 0xFFFFFFFF  # stands for a seed drawn at the start, as -1 does
MIROSTAT_M = 100  # tokens from which mirostat 1 estimates the Zipf exponent

ADAPTIVE_WIDTH = np.float32(1) / np.float32(0.3)
ADAPTIVE_PEAK = np.float32(5)
ADAPTIVE_SHARPNESS = np.float32(10)
ADAPTIVE_DECAY_MAX = 0.99


class Generator:
    """The 32-bit Mersenne Twister seeded with one integer, as std::mt19937 is."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Start again from the seed."""
        self._state = np.random.RandomState(self._seed)

    def clone(self) -> Generator:
        """A generator that goes on with the same numbers."""
        twin = Generator(self._seed)
        twin._state = copy.deepcopy(self._state)
        return twin

    def word(self) -> int:
        """The next 32 bits."""
        return int(self._state.randint(0, 2**32, dtype=np.uint32))

    def float64(self) -> float:
        """Uniform in [0, 1) from two words, the low one first."""
        low, high = self.word(), self.word()
        return min((low + high * 2.0**32) / 2.0**64, math.nextafter(1.0, 0.0))

    def float32(self) -> np.float32:
        """Uniform in [0, 1) from one word."""
        one = np.float32(1)
        below_one = np.nextafter(one, np.float32(0))
        return min(np.float32(self.word()) / np.float32(2**32), below_one)


def draw(probs: F32, generator: Generator) -> int:
    """A position with these probabilities (std::discrete_distribution)."""
    if len(probs) < 2:
        return 0
    exact = probs.astype(np.float64)
    cumulative = np.cumsum(exact / np.cumsum(exact)[-1])
    cumulative[-1] = 1.0
    return int(np.searchsorted(cumulative, generator.float64()))


class Random(Stage):
    """Common part of the stages with a generator."""

    def __init__(self, seed: int) -> None:
        self._generator = Generator(seed)

    def reset(self) -> None:
        self._generator.reset()

    def clone(self) -> Random:
        twin = copy.copy(self)
        twin._generator = self._generator.clone()
        return twin


class Dist(Random):
    """Draw one token with the probabilities of the softmax."""

    name = "dist"

    def __call__(self, c: Candidates) -> Candidates:
        weights = exp(c.logits - c.peak())
        sums = np.cumsum(weights, dtype=np.float64)
        # never zero: a target of exactly zero would select an impossible first token
        target = max(sums[-1] * self._generator.float64(), math.ulp(0.0))
        selected = int(np.searchsorted(sums, target))
        probs = (weights / sums[-1]).astype(np.float32)
        return Candidates(c.ids, c.logits, probs, c.sorted, selected)


class Xtc(Random):
    """Exclude top choices: now and then drop all but the least of the probable tokens."""

    name = "xtc"

    def __init__(self, probability: float, threshold: float, min_keep: int, seed: int) -> None:
        super().__init__(seed)
        self._probability = np.float32(probability)
        self._threshold = np.float32(threshold)
        self._min_keep = min_keep

    def __call__(self, c: Candidates) -> Candidates:
        if len(c) < 2 or self._generator.float32() > self._probability:
            return c
        c = c.in_order().softmax()
        assert c.probs is not None
        last = int(np.count_nonzero(c.probs >= self._threshold)) - 1
        if last <= 0 or len(c) - last < self._min_keep:
            return c
        return c.keep(slice(last, None))


class Mirostat(Random):
    """Steer the surprise of the text to tau bits (version 1: by estimating a top-k)."""

    name = "mirostat"

    def __init__(self, tau: float, eta: float, seed: int, n_vocab: int) -> None:
        super().__init__(seed)
        self._n_vocab = n_vocab
        self._tau = np.float32(tau)
        self._eta = np.float32(eta)
        self._mu = 2 * self._tau  # the most surprise allowed at present

    def __call__(self, c: Candidates) -> Candidates:
        c = self.cut(c.in_order().softmax()).softmax()
        assert c.probs is not None
        selected = draw(c.probs, self._generator)
        surprise = -np.log2(c.probs[selected])
        self._mu = self._mu - self._eta * (surprise - self._tau)
        return Candidates(c.ids, c.logits, c.probs, c.sorted, selected)

    def cut(self, c: Candidates) -> Candidates:
        """The candidates that may be drawn."""
        assert c.probs is not None
        return c.keep(slice(mirostat_k(c.probs, float(self._mu), self._n_vocab)))

    def reset(self) -> None:
        super().reset()
        self._mu = 2 * self._tau


class MirostatV2(Mirostat):
    """Steer the surprise of the text to tau bits by cutting off what is above mu."""

    name = "mirostat-v2"

    def cut(self, c: Candidates) -> Candidates:
        assert c.probs is not None
        with np.errstate(divide="ignore"):
            over = np.flatnonzero(-np.log2(c.probs) > self._mu)
        return c.keep(slice(max(int(over[0]), 1))) if len(over) else c


def mirostat_k(probs: F32, mu: float, n_vocab: int) -> int:
    """How many of the sorted tokens keep the expected surprise at mu bits (at least one).

    The Zipf exponent s of the first hundred probabilities gives
    k = ((s - 1) 2^mu / (1 - n_vocab^(1 - s)))^(1 / s).
    """
    possible = probs[probs > 0][:MIROSTAT_M]
    if len(possible) < 2:
        return 1
    ranks = np.arange(1, len(possible) + 1, dtype=np.float32)
    steps = log(ranks[1:] / ranks[:-1])
    drops = log(possible[:-1] / possible[1:])
    s = float(running_sum(steps * drops)[-1] / running_sum(steps * steps)[-1])
    with np.errstate(all="ignore"):
        excess = np.float64(s - 1)
        base = excess * 2.0**mu / (1 - np.float64(n_vocab) ** -excess)
        k = base ** (1 / np.float64(s))
    if math.isnan(k):
        return 1
    return max(int(min(k, len(probs))), 1)


class AdaptiveP(Random):
    """Draw near a target probability that adapts to the probabilities drawn before."""

    name = "adaptive-p"

    def __init__(self, target: float, decay: float, seed: int) -> None:
        super().__init__(seed)
        self._target = np.float32(target)
        self._decay = np.float32(min(max(decay, 0.0), ADAPTIVE_DECAY_MAX))
        self._start()

    def _start(self) -> None:
        history = np.float32(1) - self._decay
        self._weighted_sum = self._target / history
        self._total_weight = np.float32(1) / history
        self._pending: tuple[int, np.float32] | None = None  # drawn token, its probability

    def __call__(self, c: Candidates) -> Candidates:
        c = c.softmax()
        assert c.probs is not None
        wanted = self.wanted()
        distance = np.abs((c.probs - wanted) * ADAPTIVE_WIDTH)
        shaped = ADAPTIVE_PEAK - ADAPTIVE_SHARPNESS * distance * distance / (1 + distance)
        logits = np.where(c.logits == -np.inf, c.logits, shaped)
        drawn = c.with_logits(logits, sorted=False).softmax()
        assert drawn.probs is not None
        selected = draw(drawn.probs, self._generator)
        self._pending = int(c.ids[selected]), c.probs[selected]
        return Candidates(drawn.ids, drawn.logits, drawn.probs, False, selected)

    def wanted(self) -> np.float32:
        """The probability to aim at now: the target corrected by what was drawn so far."""
        average = self._weighted_sum / self._total_weight
        target = min(self._target, np.float32(1))
        return min(max(2 * target - average, np.float32(0)), np.float32(1))

    def accept(self, token: int) -> None:
        if self._pending and self._pending[0] == token:
            self._weighted_sum = self._pending[1] + self._decay * self._weighted_sum
            self._total_weight = np.float32(1) + self._decay * self._total_weight
        self._pending = None

    def reset(self) -> None:
        super().reset()
        self._start()


def fresh_seed(seed: int) -> int:
    """The seed to use: the given one, or a random one for -1."""
    if seed not in (-1, RANDOM_SEED):
        return seed
    return int(np.random.SeedSequence().generate_state(1)[0]) % RANDOM_SEED
