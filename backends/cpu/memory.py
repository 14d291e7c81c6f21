"""Host memory as NumPy arrays: aligned, lazily touched, or at a given address."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64


def aligned_words(n: int) -> npt.NDArray[np.int64]:
    """n zeroed int64 words that start on a cache line."""
    raw = np.zeros(n + ALIGNMENT // 8, np.int64)
    start = -raw.ctypes.data % ALIGNMENT // 8
    return raw[start : start + n]


def reserve(nbytes: int, *, huge: bool = False) -> Bytes:
    """Zeroed memory on page boundaries; the system provides a page when it is first touched.

    `huge`: in large pages where the system has them, for memory that will be filled whole.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(nbytes, 1), flags=private)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def zero(memory: Bytes) -> None:
    """Zero memory that `reserve` gave; where possible by handing its pages back."""
    view: object = memory.base
    pages = view.obj if isinstance(view, memoryview) else None
    if isinstance(pages, mmap.mmap) and sys.platform == "linux":
        # Linux gives private pages that are touched again as zeros: an unused cache stays free
        pages.madvise(mmap.MADV_DONTNEED)
    else:
        memory.fill(0)


def at_address(address: int, nbytes: int) -> Bytes:
    """Memory that belongs to somebody else."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def as_bytes(data: memoryview) -> Bytes:
    """The bytes of a contiguous buffer, writable if it is."""
    return np.frombuffer(data, np.uint8)


def release_code(library: str) -> None:
    """Give back the pages of a shared library's code; they are read again when they are used.

    Only pages that nothing can have changed: a compiler that has done its work is 30 MiB of them.
    """
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.exists():
        return
    libc = ctypes.CDLL(None)
    for line in maps.read_text().splitlines():
        span, permissions, *_, path = line.split(maxsplit=5)
        if permissions == "r-xp" and library in path:
            start, end = (int(part, 16) for part in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
