"""The sampling formulas in plain Python, on lists of (id, logit): slow, obvious, float64."""

import math
from collections.abc import Sequence

Pairs = list[tuple[int, float]]


def softmax(pairs: Pairs) -> list[float]:
    peak = max(logit for _, logit in pairs)
    weights = [math.exp(logit - peak) for _, logit in pairs]
    return [weight / sum(weights) for weight in weights]


def falling(pairs: Pairs) -> Pairs:
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def top_k(pairs: Pairs, k: int) -> Pairs:
    return falling(pairs)[:k]


def top_p(pairs: Pairs, p: float, min_keep: int) -> Pairs:
    ordered, total, kept = falling(pairs), 0.0, 0
    for share in softmax(ordered):
        total, kept = total + share, kept + 1
        if total >= p and kept >= min_keep:
            break
    return ordered[:kept]


def min_p(pairs: Pairs, p: float, min_keep: int) -> Pairs:
    shares = softmax(falling(pairs))
    kept = sum(share >= p * shares[0] for share in shares)
    return falling(pairs)[: max(kept, min_keep, 1)]


def typical(pairs: Pairs, p: float, min_keep: int) -> Pairs:
    ordered = falling(pairs)
    shares = softmax(ordered)
    entropy = -sum(share * math.log(share) for share in shares if share)
    surprise = [-math.log(share) if share else math.inf for share in shares]
    order = sorted(range(len(ordered)), key=lambda i: abs(surprise[i] - entropy))
    total, kept = 0.0, 0
    for i in order:
        total, kept = total + shares[i], kept + 1
        if total > p and kept >= min_keep:
            break
    return [ordered[i] for i in order[:kept]]


def top_n_sigma(pairs: Pairs, n: float) -> Pairs:
    finite = [logit for _, logit in pairs if logit > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
    lowest = max(finite) - n * sigma
    return [(token, logit if logit >= lowest else -math.inf) for token, logit in pairs]


def dynamic_temperature(pairs: Pairs, temp: float, spread: float, exponent: float) -> float:
    shares = softmax(pairs)
    entropy = -sum(share * math.log(share) for share in shares if share)
    low, high = max(0.0, temp - spread), temp + spread
    return low + (high - low) * (entropy / math.log(len(pairs))) ** exponent


def penalties(
    pairs: Pairs, recent: Sequence[int], repeat: float, frequency: float, presence: float
) -> Pairs:
    result = []
    for token, logit in pairs:
        count = list(recent).count(token)
        if count:
            logit = logit * repeat if logit <= 0 else logit / repeat
            logit -= count * frequency + presence
        result.append((token, logit))
    return result


def dry(
    text: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[Sequence[int]] = (),
) -> dict[int, float]:
    """Penalty per token: the longest earlier passage that ends like the text, by brute force."""
    text = list(text)
    last = len(text)  # tokens at the end that may take part: those after the last breaker
    for start in range(len(text) - 1, -1, -1):
        fits = [len(b) for b in breakers if text[start : start + len(b)] == list(b)]
        if fits:
            last = len(text) - start - max(fits)
            break
    longest: dict[int, int] = {}
    for end in range(1, len(text)):  # a passage text[end-length:end], followed by text[end]
        length = 0
        while length < end and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        length = min(length, last)
        if length >= allowed and [text[end]] not in [list(b) for b in breakers]:
            longest[text[end]] = max(longest.get(text[end], 0), length)
    if len(text) <= allowed or last < allowed:
        return {}
    return {token: multiplier * base ** (length - allowed) for token, length in longest.items()}


def mirostat_k(shares: Sequence[float], mu: float, n_vocab: int) -> float:
    top = shares[:100]
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
    drops = [math.log(top[i] / top[i + 1]) for i in range(len(top) - 1)]
    s = sum(a * b for a, b in zip(steps, drops, strict=True)) / sum(a * a for a in steps)
    return ((s - 1) * 2**mu / (1 - n_vocab ** (1 - s))) ** (1 / s)
