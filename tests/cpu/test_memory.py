"""Host memory: zeroed, aligned, and given back to the system when it is zeroed again."""

import resource
import sys

import numpy as np
import pytest

from pyggml.backends.cpu.memory import ALIGNMENT, aligned_words, reserve, zero


def test_reserved_memory_is_zero_before_and_after() -> None:
    memory = reserve(1 << 20)
    assert not memory.any() and memory.ctypes.data % ALIGNMENT == 0
    memory[:] = 7
    zero(memory)
    assert not memory.any()
    memory[5] = 1
    assert memory.sum() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")
def test_zeroing_gives_pages_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    memory = reserve(64 << 20)
    memory[:] = 1
    full = resident()
    zero(memory)
    assert full - resident() > 60 << 20


def test_foreign_memory_can_be_zeroed() -> None:
    memory = np.ones(100, np.uint8)
    zero(memory)
    assert not memory.any()


def test_words_start_on_a_cache_line() -> None:
    for n in (1, 7, 8, 100):
        words = aligned_words(n)
        assert words.ctypes.data % ALIGNMENT == 0 and len(words) == n and not words.any()
