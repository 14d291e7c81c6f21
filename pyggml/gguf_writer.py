"""Writes GGUF files as a stream: never a whole model in memory, never half a file in place.

pairs = stored_pairs(gguf.metadata)
tensors = [copy_of(gguf, tensor) for tensor in gguf.tensors.values()]
write_files([NewFile(Path("copy.gguf"), pairs, tensors)])

A file is written under a temporary name beside its own and renamed when it is complete.
"""

import contextlib
import os
import shutil
import stat
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf import Gguf
from pyggml.gguf_header import DEFAULT_ALIGNMENT, GgufTensor, pad
from pyggml.gguf_metadata import Metadata, ValueType

PIECE = 4 << 20  # bytes that are read and written at once

Progress: TypeAlias = Callable[[int, int], None]  # bytes of tensors written, and to write
Chunks: TypeAlias = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Stored:
    """A metadata value as GGUF stores it."""

    type: ValueType
    raw: bytes


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: `chunks` yields its `nbytes` bytes, piece by piece."""

    name: str
    type: GGMLType
    ne: tuple[int, ...]  # as many as the file shall tell
    nbytes: int
    chunks: Callable[[], Chunks]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write; one that has no data ends where its tensors would begin."""

    path: Path
    pairs: Mapping[str, Stored]
    tensors: Sequence[NewTensor]
    version: int = 3
    has_data: bool = True

    @property
    def alignment(self) -> int:
        pair = self.pairs.get("general.alignment")
        return int.from_bytes(pair.raw, "little") if pair else DEFAULT_ALIGNMENT

    def header(self) -> bytes:
        """Everything before the data, without padding."""
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.pairs))
        pairs = (_text(k) + struct.pack("<I", p.type) + p.raw for k, p in self.pairs.items())
        return b"".join((b"GGUF", counts, *pairs, *self._infos()))

    def _infos(self) -> Iterator[bytes]:
        offset = 0
        for t in self.tensors:
            yield _text(t.name) + struct.pack(f"<I{len(t.ne)}Q", len(t.ne), *t.ne)
            yield struct.pack("<IQ", t.type, offset)
            offset += self.padded(t.nbytes)

    def padded(self, nbytes: int) -> int:
        return pad(nbytes, self.alignment)

    @property
    def data_size(self) -> int:
        """Bytes of all tensors with their padding, if they are written."""
        return sum(self.padded(t.nbytes) for t in self.tensors) if self.has_data else 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.padded(len(self.header())) + self.data_size


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


# ---------------------------------------------------------------- values
def string(text: str) -> Stored:
    return Stored(ValueType.STRING, _text(text))


def number(type: ValueType, value: int | float | bool) -> Stored:
    """A number or bool; it must fit its type."""
    assert type.dtype is not None
    return Stored(type, np.array(value, type.dtype).tobytes())


def stored_pairs(metadata: Metadata) -> dict[str, Stored]:
    """All values as their file has them, in its order."""
    return {key: Stored(metadata.type_of(key), metadata.stored(key)) for key in metadata}


# ---------------------------------------------------------------- tensors
def copy_of(gguf: Gguf, tensor: GgufTensor) -> NewTensor:
    """The same tensor in another file."""

    def chunks() -> Chunks:
        return pieces(gguf, tensor)

    return NewTensor(tensor.name, tensor.type, tensor.ne[: tensor.n_dims], tensor.nbytes, chunks)


def pieces(gguf: Gguf, tensor: GgufTensor, step: int = PIECE) -> Iterator[memoryview]:
    """The bytes of a tensor; each piece is valid until the next."""
    buffer = memoryview(bytearray(min(step, tensor.nbytes)))
    for start in range(0, tensor.nbytes, step):
        piece = buffer[: min(step, tensor.nbytes - start)]
        gguf.parts[tensor.part].read_into(tensor.offset + start, piece)
        yield piece


# ---------------------------------------------------------------- files
def write_files(
    files: Sequence[NewFile],
    *,
    sources: Iterable[Path] = (),
    replace: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write all files, or none of them.

    Existing ones are refused unless `replace`; the `sources` that tensors are read from always.
    """
    check_files(files, sources=sources, replace=replace)
    total = sum(tensor.nbytes for file in files if file.has_data for tensor in file.tensors)
    written = 0
    with ExitStack() as stack:
        names = [stack.enter_context(_temporary(file.path)) for file in files]
        for file, name in zip(files, names, strict=True):
            with _explained(file.path), open(name, "wb") as out:
                for nbytes in _write(file, out):
                    written += nbytes
                    if progress:
                        progress(written, total)
                out.flush()
                os.fsync(out.fileno())
        for file, name in zip(files, names, strict=True):
            with _explained(file.path):
                os.replace(name, file.path)


def overwrite(path: Path, offset: int, raw: bytes) -> None:
    """Replace bytes of a file that are there."""
    with _explained(path), open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), raw, offset)
        os.fsync(file.fileno())


def check_files(
    files: Sequence[NewFile], *, sources: Iterable[Path] = (), replace: bool = False
) -> None:
    """Refuse what cannot be written, or must not be, before anything is."""
    for file in files:
        _check_path(file.path, sources, replace)
    needed: Counter[Path] = Counter()
    for file in files:
        needed[file.path.parent] += file.size
    for folder, nbytes in needed.items():
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise GgufError(
                f"{folder}: {nbytes:,} bytes are to be written but {free:,} are free: "
                "make room, or write to another disk"
            )


def _check_path(path: Path, sources: Iterable[Path], replace: bool) -> None:
    if path.is_dir():
        raise GgufError(f"{path}: is a directory: name the file to write")
    if not path.parent.is_dir():
        raise GgufError(f"{path}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise GgufError(f"{path}: the folder {path.parent} cannot be written to")
    if not path.exists() and not path.is_symlink():
        return
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        raise GgufError(f"{path}: is not a regular file: choose another name")
    if any(path.samefile(source) for source in sources):
        raise GgufError(f"{path}: is the file that is read: choose another name")
    if not replace:
        raise GgufError(f"{path}: already exists: choose another name, or --force to replace it")


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, gone at the end unless it was renamed."""
    with _explained(path):
        descriptor, name = tempfile.mkstemp(".part", f".{path.name[:200]}.", path.parent)
    os.close(descriptor)
    try:
        os.chmod(name, _mode(path))
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those that a new one gets."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Failures of the system name the file that is wanted, not its temporary name."""
    try:
        yield
    except OSError as e:
        raise GgufError(f"{path}: cannot be written: {(e.strerror or str(e)).lower()}") from e


def _write(file: NewFile, out: BinaryIO) -> Iterator[int]:
    """Write a file; yields how many bytes of tensors were added, padding aside."""
    end = file.padded(out.write(file.header()))
    for tensor in file.tensors if file.has_data else ():
        out.seek(end)
        size = 0
        for chunk in tensor.chunks():
            size += out.write(chunk)
            yield len(chunk)
        assert size == tensor.nbytes, f"{tensor.name}: {size} bytes, not {tensor.nbytes}"
        end += file.padded(size)
    # padding was stepped over: it is zeros that take no time
    out.truncate(end)
