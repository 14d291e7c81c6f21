"""How fast files are read that are not in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

SAMPLE = 192 << 20  # bytes read, at most
PIECE = 4 << 20
LEAST = 16 << 20  # of a file, to measure with it


def disk_gbs(path: Path, folder: Path) -> float:
    """GB/s of reading a large file past the cache; one is written into `folder` if need be.

    0: it cannot be measured.
    """
    try:
        if path.is_file() and path.stat().st_blocks * 512 >= LEAST:
            return _read(path)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-") as file:
            piece = os.urandom(PIECE)
            for _ in range(SAMPLE // PIECE):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return _read(Path(file.name))
    except OSError:
        return 0.0


def _read(path: Path) -> float:
    """Pieces from all over the file, directly where the system allows that."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, flags)
    except OSError:  # not on this file system
        fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        n = min(SAMPLE, size) // PIECE
        step = size // n // PIECE * PIECE
        buffer = mmap.mmap(-1, PIECE)  # on a page boundary, as direct reads want it
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        total = sum(os.preadv(fd, [buffer], i * step) for i in range(n))
        return 1e-9 * total / (time.perf_counter() - start)
    finally:
        os.close(fd)
