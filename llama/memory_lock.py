"""Keeps memory resident: mlock through the C library (llama.cpp: --load-mode mlock)."""

import ctypes
import logging

log = logging.getLogger("pyggml.loader")


class MemoryLock:
    """Locked ranges; a range that the system refuses is reported once and left unlocked."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._refused = False

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a range of this process's memory."""
        if self._refused or nbytes == 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
            self._ranges.append((address, nbytes))
            return
        self._refused = True
        log.warning(
            "cannot lock %.1f MiB of memory (errno %d): raise the limit with `ulimit -l`",
            nbytes / 1048576,
            ctypes.get_errno(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are locked."""
        return sum(n for _, n in self._ranges)

    def release(self) -> None:
        """Unlock everything."""
        libc = ctypes.CDLL(None)
        for address, nbytes in self._ranges:
            libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        self._ranges.clear()
