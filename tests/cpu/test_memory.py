"""Host memory: zeroed, aligned, and given back to the system when it is zeroed again."""

import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from pyggml.backends.cpu.memory import ALIGNMENT, aligned_words, release_code, reserve, zero


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


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
    memory = reserve(64 << 20)
    memory[:] = 1
    full = resident()
    zero(memory)
    assert full - resident() > 60 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("huge", [False, True])
def test_large_pages_are_asked_for(huge: bool) -> None:
    memory = reserve(8 << 20, huge=huge)
    assert not memory.any()
    assert ("hg" in flags_of(memory.ctypes.data)) == huge


def flags_of(address: int) -> list[str]:
    """The system's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_foreign_memory_can_be_zeroed() -> None:
    memory = np.ones(100, np.uint8)
    zero(memory)
    assert not memory.any()


def test_words_start_on_a_cache_line() -> None:
    for n in (1, 7, 8, 100):
        words = aligned_words(n)
        assert words.ctypes.data % ALIGNMENT == 0 and len(words) == n and not words.any()


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")
def test_released_code_still_runs() -> None:
    import llvmlite.binding as llvm

    def compile_something() -> int:
        module = llvm.parse_assembly("define i32 @f() {\nret i32 7\n}")
        machine = llvm.Target.from_default_triple().create_target_machine()
        return len(machine.emit_object(module))

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    size = compile_something()
    full = resident()
    release_code("libllvmlite")
    assert full - resident() > 1 << 20
    assert compile_something() == size
