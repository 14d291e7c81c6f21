"""Object files with a checksum: LLVM ends the process when it is given a damaged one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST_SIZE = 32


def write_object(path: Path, code: bytes) -> None:
    """Write atomically: other processes see the whole file or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_object(path: Path) -> bytes | None:
    """The object code; None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return code if hashlib.sha256(code).digest() == digest else None
