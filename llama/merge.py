"""What byte-pair and SentencePiece tokenizers share: the merge loop and a memory for words."""

import functools
import heapq
from collections.abc import Callable
from typing import TypeAlias, TypeVar

Word = TypeVar("Word", str, bytes)
Priority: TypeAlias = Callable[[bytes, bytes], float | None]


def merge(symbols: list[bytes], priority: Priority) -> list[bytes]:
    """Join neighbours, lowest priority value first and leftmost among equals, until none joins.

    `priority(left, right)` is None where two symbols do not join. Takes n log n steps.
    """
    symbols = [*symbols, b""]  # the end, which joins with nothing
    following = list(range(1, len(symbols) + 1))
    preceding = list(range(-1, len(symbols) - 1))
    heap: list[tuple[float, int]] = []

    def offer(left: int) -> None:
        right = symbols[following[left]]
        value = priority(symbols[left], right) if right else None
        if value is not None:
            heapq.heappush(heap, (value, left))

    for left in range(len(symbols) - 1):
        offer(left)
    while heap:
        value, left = heapq.heappop(heap)
        right = following[left]
        # stale: one side has been joined away or has grown, and the pair here is another one now
        gone = not symbols[left] or not symbols[right]
        if gone or priority(symbols[left], symbols[right]) != value:
            continue
        symbols[left] += symbols[right]
        symbols[right] = b""
        following[left] = following[right]
        preceding[following[left]] = left
        offer(left)
        if preceding[left] >= 0:
            offer(preceding[left])
    return [symbol for symbol in symbols if symbol]


def remember_words(
    encode: Callable[[Word], tuple[int, ...]],
) -> Callable[[Word], tuple[int, ...]]:
    """`encode` with a memory: words repeat; huge ones are not kept, so it stays small."""
    remembered = functools.lru_cache(1 << 16)(encode)
    return lambda word: remembered(word) if len(word) <= 64 else encode(word)
