"""Files that flags ask for: refused before work begins, written as a whole or not at all."""

import os
from pathlib import Path

from pyggml.errors import UserError


def check(flag: str, path: Path) -> None:
    """Raise UserError if the file cannot be written; leaves nothing behind."""
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {path}: permission denied")
    _open_part(flag, path)[1].unlink()


def write(flag: str, path: Path, content: str) -> None:
    """Write the file as a whole, or leave what was there."""
    descriptor, part = _open_part(flag, path)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _open_part(flag: str, path: Path) -> tuple[int, Path]:
    """A new file beside the wanted one, with the rights of any new file."""
    import tempfile

    try:
        descriptor, name = tempfile.mkstemp(".part", f".{path.name[:200]}.", path.parent)
    except OSError as error:
        raise UserError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None
    mask = os.umask(0)
    os.umask(mask)
    os.fchmod(descriptor, 0o666 & ~mask)
    return descriptor, Path(name)
