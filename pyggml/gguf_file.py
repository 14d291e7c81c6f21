"""One GGUF file on disk: positioned reads, and a read-only mapping made on first use."""

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from pyggml.errors import GgufError


class GgufPart:
    """An open file; `size` is its length in bytes when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self.size = _open(path)
        self._map: mmap.mmap | None = None
        self._address = 0

    @property
    def map(self) -> mmap.mmap:
        """The whole file, mapped read-only; touching no page yet."""
        if self._map is None:
            fd = self._descriptor()
            try:
                self._map = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as e:
                raise GgufError(f"{self.path}: cannot be mapped into memory: {e}") from e
        return self._map

    def address(self, offset: int = 0) -> int:
        """Memory address of a byte of the mapping; valid until `close`."""
        if self._map is None or self._address == 0:
            # only the number is kept: a live array would keep the mapping from closing
            view = np.frombuffer(self.map, np.uint8, 1)
            self._address = int(view.__array_interface__["data"][0])
        return self._address + offset

    def advise_dont_need(self, offset: int, nbytes: int) -> None:
        """Give the mapped pages that lie wholly inside the range back to the system."""
        page = mmap.PAGESIZE
        first = (offset + page - 1) // page * page
        last = (offset + nbytes) // page * page
        if last > first:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer from the file without mapping it."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            done = 0
            while done < len(view):
                try:
                    n = os.preadv(self._descriptor(), [view[done:]], offset + done)
                except OSError as e:
                    raise GgufError(f"{self.path}: cannot be read: {e.strerror}") from e
                if n == 0:
                    raise GgufError(
                        f"{self.path}: ends at byte {offset + done:,} but had {self.size:,} bytes "
                        "when it was opened; something truncated it: download it again"
                    )
                done += n

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out of the file."""
        buffer = bytearray(nbytes)
        self.read_into(offset, buffer)
        return bytes(buffer)

    def close(self) -> None:
        """Unmap and close; memory that a view still shows is unmapped when the view goes."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _descriptor(self) -> int:
        if self._fd < 0:  # mapping descriptor -1 would succeed, with memory of no file
            raise ValueError(f"{self.path} is closed")
        return self._fd


def _open(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular, non-empty file."""
    try:
        # a pipe would block without O_NONBLOCK; it changes nothing for regular files
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as e:
        raise GgufError(f"{path}: no such file: check the path") from e
    except (OSError, ValueError) as e:
        raise GgufError(f"{path}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    status = os.fstat(fd)
    problem = _unreadable(status)
    if problem:
        os.close(fd)
        raise GgufError(f"{path}: {problem}")
    return fd, status.st_size


def _unreadable(status: os.stat_result) -> str | None:
    if stat.S_ISDIR(status.st_mode):
        return "is a directory: name the .gguf file inside it"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file: a model must be a file on disk"
    if status.st_size == 0:
        return "is empty (0 bytes): download it again"
    return None
