"""The memory of a simulated card: hard capacity, checked addresses, NaN where nobody has written.

It is host memory underneath, so that the CPU's kernels can compute there; with `dry` there is
none, only addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import cast

from pyggml.backend import Memory, pad
from pyggml.backends.cpu.device import host_memory
from pyggml.backends.cpu.memory import Bytes, reserve
from pyggml.backends.cuda.driver import LARGE, DeviceError, footprint
from pyggml.errors import OutOfMemory

MIB = 1 << 20
POISON = 0xFF  # NaN as F32, F16 and BF16
FILLED = 64 * MIB  # allocations up to this size are filled at once
STAMP = 16 * MIB  # larger ones see this much NaN again and again until they are written
ALIGNMENT = 256
FAKE_SPACE = 1 << 56  # addresses of dry memory: nothing is there


@dataclass(frozen=True, slots=True)
class _Allocation:
    base: int
    size: int
    taken: int  # of the capacity
    label: str
    owner: object  # of the memory


class CardMemory:
    """The allocations of one card."""

    def __init__(self, name: str, total: int, reserved: int, *, dry: bool) -> None:
        """`reserved`: what the driver needs for itself."""
        self.name = name
        self.total = total
        self.used = self.peak = min(reserved, total)
        self._dry = dry
        self._allocations: dict[int, _Allocation] = {}
        self._bases: list[int] = []  # sorted

    def state(self) -> Memory:
        """Free and total bytes."""
        return Memory(self.total - self.used, self.total)

    def alloc(self, nbytes: int, label: str) -> int:
        """An address. Raises OutOfMemory."""
        taken = footprint(nbytes)
        free = self.total - self.used
        if taken > free:
            what = label or "an allocation"
            raise OutOfMemory(
                f"{self.name}: {what} of {_mib(nbytes)} does not fit: {_mib(free)} of "
                f"{_mib(self.total)} are free, {_mib(taken - free)} are missing"
            )
        base, owner = (fake_address(taken), None) if self._dry else self._underneath(nbytes)
        self._allocations[base] = _Allocation(base, nbytes, taken, label, owner)
        self._bases.insert(bisect_right(self._bases, base), base)
        self.used += taken
        self.peak = max(self.peak, self.used)
        return base

    def _underneath(self, nbytes: int) -> tuple[int, object]:
        """Host memory for an allocation."""
        free = host_memory().free
        if nbytes <= free:
            with suppress(OSError):
                return poisoned(nbytes)
        raise OutOfMemory(
            f"{self.name}: {_mib(nbytes)} would fit the card, but this machine has only "
            f"{_mib(free)} left to simulate it with\n--dry-run plans without memory"
        )

    def free(self, base: int) -> None:
        """Give an allocation back."""
        if base not in self._allocations:
            raise DeviceError(f"{self.name}: nothing is allocated at {base:#x} (freed twice?)")
        self.used -= self._allocations.pop(base).taken
        self._bases.remove(base)

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Raises DeviceError unless the bytes lie inside one allocation."""
        i = bisect_right(self._bases, address) - 1
        if i >= 0:
            found = self._allocations[self._bases[i]]
            if address + nbytes <= found.base + found.size:
                return
        raise DeviceError(
            f"{self.name}: {what} of {nbytes} bytes at {address:#x} is not inside one allocation"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


class _FakeSpace:
    """Hands out ranges where nothing is, each only once."""

    def __init__(self) -> None:
        self._next = FAKE_SPACE

    def take(self, nbytes: int) -> int:
        start = self._next
        self._next += pad(nbytes + 1, LARGE)
        return start


fake_address = _FakeSpace().take


# ---------------------------------------------------------------- poisoned memory
def poisoned(nbytes: int) -> tuple[int, object]:
    """Address and owner of memory full of NaN; large memory takes pages as they are written."""
    if nbytes > FILLED and sys.platform == "linux":
        stamped = _Stamped(nbytes)
        return stamped.base, stamped
    memory: Bytes = reserve(nbytes + ALIGNMENT)
    if nbytes <= FILLED:
        memory.fill(POISON)
    return pad(memory.ctypes.data, ALIGNMENT), memory


class _Stamped:
    """Private pages of one file of NaN, mapped side by side."""

    def __init__(self, nbytes: int) -> None:
        size, private = pad(nbytes, STAMP), mmap.MAP_PRIVATE | MAP_NORESERVE
        # one mapping keeps the range together, and gives all of it back
        self._range = mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._range))
        file, protection = _stamp(), mmap.PROT_READ | mmap.PROT_WRITE
        for offset in range(0, size, STAMP):
            # where the system refuses, what nobody has written stays zero
            _mmap()(self.base + offset, STAMP, protection, private | MAP_FIXED, file, 0)


MAP_FIXED = 0x10  # in place of what is mapped there
MAP_NORESERVE = 0x4000  # more than there is may be mapped: pages count when they are written


@cache
def _mmap() -> Callable[..., int]:
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    call.argtypes = [address, size, number, number, number, ctypes.c_long]
    return cast(Callable[..., int], call)


@cache
def _stamp() -> int:
    """A file in memory with STAMP bytes of NaN; it is there as long as the process."""
    file = os.memfd_create("pyggml-poison")
    piece = bytes([POISON]) * MIB
    for _ in range(STAMP // MIB):
        os.write(file, piece)
    return file
