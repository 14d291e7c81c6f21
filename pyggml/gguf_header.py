"""The header of a GGUF file: parsed once, every number checked before it is used.

A file may be damaged or hostile: no count, length or offset in it is believed before it has been
compared with the bytes the file really has, so neither time nor memory exceed what its size allows.

Where readers differ: tensors with a zero dimension load as empty ones, but there is no tensor of
zero dimensions; alignment is any power of two; tensor data is consecutive, as ggml insists;
arrays of arrays are read, which ggml does not do; keys and tensor names must be printable text.
"""

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf_metadata import Field, Metadata, ValueType

# Python objects are far bigger than their entries in the file: counts are capped as well
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NESTED_ARRAYS = 1 << 16
MAX_NESTING = 4
MAX_KEY_LENGTH = (1 << 16) - 1
MAX_NAME_LENGTH = 63
MAX_DIMS = 4
MAX_INT64 = (1 << 63) - 1
DEFAULT_ALIGNMENT = 32

MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name length, name, type, value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, n_dims, one ne, type, offset
MIN_NESTED_BYTES = 4 + 8  # element type, count

DAMAGED = "the file is damaged or incomplete: download it again"
NO_DATA = (
    "holds only the header of a model: plan with it (--dry-run); "
    f"if the tensors should be in it, {DAMAGED}"
)
RETIRED_TYPES = {
    4: "q4_2",
    5: "q4_3",
    31: "q4_0_4_4",
    32: "q4_0_4_8",
    33: "q4_0_8_8",
    36: "iq4_nl_4_4",
    37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}
OTHER_FORMATS = {
    b"ggml": "a GGML file from before GGUF",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGMF file from before GGUF",
    b"tjgg": "a GGJT file from before GGUF",
    b"PK\x03\x04": "a zip archive or PyTorch checkpoint",
    b"vers": "a git-lfs pointer, not the model itself",
    b"<!DO": "a web page, not a model",
    b"<htm": "a web page, not a model",
}


class Source(Protocol):
    """Where a header is read from: a file, or its beginning on a server."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int:
        """Of the whole file."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that are there. Raises GgufError or OSError."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's name, shape and place; its bytes are not read."""

    name: str
    type: GGMLType
    ne: tuple[int, int, int, int]  # ggml order: ne[0] is the row length
    n_dims: int
    part: int  # index of the file that holds it
    offset: int  # from the start of that file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, GgufTensor]
    data_end: int  # where the last tensor and its padding end
    has_data: bool  # False: the file ends where its tensors would begin


class Cursor:
    """Walks the header forward, reading the file in growing pieces."""

    FIRST_READ = 1 << 20

    def __init__(self, part: Source) -> None:
        self.part = part
        self.data = b""
        self.pos = 0

    @property
    def left(self) -> int:
        return self.part.size - self.pos

    def error(self, problem: str, at: int | None = None) -> GgufError:
        at = self.pos if at is None else at
        return GgufError(f"{self.part.path}: {problem} (at byte {at:,})")

    def take(self, nbytes: int, what: str) -> int:
        """Step over bytes that must be there; returns the offset of the first."""
        if nbytes > self.left:
            raise self.error(f"{what} needs {nbytes:,} bytes, {self.left:,} are left; {DAMAGED}")
        start, self.pos = self.pos, self.pos + nbytes
        self.fill(self.pos)
        return start

    def fill(self, end: int) -> None:
        """Make `data` reach `end`, which lies within the file."""
        if end > len(self.data):
            wanted = max(end, 2 * len(self.data), self.FIRST_READ)
            self.data = self.part.read(0, min(wanted, self.part.size))

    def u32(self, what: str) -> int:
        start = self.take(4, what)  # before self.data is looked at: it may replace it
        return int(_U32.unpack_from(self.data, start)[0])

    def u64(self, what: str) -> int:
        start = self.take(8, what)
        return int(_U64.unpack_from(self.data, start)[0])

    def count(self, what: str, item_bytes: int, limit: int = MAX_INT64) -> int:
        """A number of items, each of which takes at least `item_bytes` of what is left."""
        at = self.pos
        n = self.u64(what)
        if n > self.left // item_bytes:
            raise self.error(f"{what} is {n:,}, more than the file can hold; {DAMAGED}", at)
        if n > limit:
            raise self.error(f"{what} is {n:,}, the limit is {limit:,}", at)
        return n

    def name(self, what: str, limit: int) -> str:
        """A key or tensor name: neither empty nor too long, and safe to print."""
        at = self.pos
        length = self.count(f"the length of {what}", 1)
        if not 0 < length <= limit:
            raise self.error(f"{what} has {length:,} bytes, must have 1 to {limit:,}", at)
        start = self.take(length, what)
        raw = self.data[start : self.pos]
        name = raw.decode("utf-8", "surrogateescape")
        if not name.isprintable():
            raise self.error(f"{what} is {raw!r}: not printable UTF-8 text", at)
        return name


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_header(part: Source, *, allow_no_data: bool = False) -> Header:
    """Parse everything before the tensor data; tensors get part index 0.

    A file that ends there is refused, unless only its header is of interest.
    """
    cursor = Cursor(part)
    version = _read_version(cursor)
    n_tensors = cursor.count("the number of tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
    n_keys = cursor.count("the number of keys", MIN_KEY_BYTES, MAX_KEYS)
    fields = _read_fields(cursor, n_keys)
    metadata = Metadata(part.path, cursor.data, fields)
    alignment = _alignment(cursor, metadata)
    tensors, data_size = _read_tensors(cursor, n_tensors, alignment)
    start = pad(cursor.pos, alignment)
    has_data = part.size != start or not 0 < data_size <= MAX_INT64
    if not (has_data or allow_no_data):
        raise cursor.error(NO_DATA, start)
    _place(cursor, tensors, start, check=has_data)
    return Header(version, alignment, metadata, tensors, start + data_size, has_data)


def _read_version(cursor: Cursor) -> int:
    start = cursor.take(4, "the magic number")
    magic = cursor.data[start : cursor.pos]
    if magic != b"GGUF":
        found = OTHER_FORMATS.get(magic, f"something else: it starts with {magic!r}")
        raise cursor.error(f"not a GGUF file but {found}; convert it or download a .gguf", start)
    version = cursor.u32("the version")
    if version == 1:
        raise cursor.error("GGUF version 1 is no longer supported; convert the model again", 4)
    if version != 0 and version & 0xFFFF == 0:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cursor.error(
            f"GGUF version {swapped} with big-endian byte order; only little-endian files are "
            "supported: convert the model again, or its byte order with gguf_convert_endian.py",
            4,
        )
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is unknown (supported: 2 and 3)", 4)
    return version


def _read_fields(cursor: Cursor, n_keys: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    budget = NestedBudget()
    for i in range(n_keys):
        at = cursor.pos
        key = cursor.name(f"the name of key {i}", MAX_KEY_LENGTH)
        if key in fields:
            raise cursor.error(f"key {key!r} is duplicated", at)
        value_type = _read_value_type(cursor, f"the type of key {key!r}")
        fields[key] = _read_value(cursor, value_type, f"key {key!r}", budget)
    return fields


class NestedBudget:
    """How many more arrays inside arrays a file may have."""

    def __init__(self) -> None:
        self.left = MAX_NESTED_ARRAYS

    def spend(self, n: int) -> bool:
        self.left -= n
        return self.left >= 0


def _read_value_type(cursor: Cursor, what: str) -> ValueType:
    at = cursor.pos
    id = cursor.u32(what)
    if id >= len(ValueType):
        raise cursor.error(f"{what} is {id}, which no GGUF value has; {DAMAGED}", at)
    return ValueType(id)


def _read_value(
    cursor: Cursor, value_type: ValueType, what: str, budget: NestedBudget, depth: int = 0
) -> Field:
    if value_type is ValueType.STRING:
        length = cursor.count(f"the length of {what}", 1)
        return Field(value_type, cursor.take(length, what), length)
    if value_type is ValueType.ARRAY:
        return _read_array(cursor, what, budget, depth + 1)
    assert value_type.dtype is not None
    return Field(value_type, cursor.take(value_type.dtype.itemsize, what))


def _read_array(cursor: Cursor, what: str, budget: NestedBudget, depth: int) -> Field:
    if depth > MAX_NESTING:
        raise cursor.error(f"{what} nests arrays more than {MAX_NESTING} deep")
    item = _read_value_type(cursor, f"the element type of {what}")
    if item is ValueType.STRING:
        n = cursor.count(f"the number of strings in {what}", 8)
        starts = _skip_strings(cursor, n, what)
        return Field(ValueType.ARRAY, int(starts[0]), n, item, starts)
    if item is ValueType.ARRAY:
        n = cursor.count(f"the number of arrays in {what}", MIN_NESTED_BYTES)
        if not budget.spend(n):
            raise cursor.error(f"{what} has more than {MAX_NESTED_ARRAYS:,} arrays inside arrays")
        start = cursor.pos
        items = tuple(_read_array(cursor, what, budget, depth + 1) for _ in range(n))
        return Field(ValueType.ARRAY, start, n, item, items=items)
    assert item.dtype is not None
    n = cursor.count(f"the number of elements in {what}", item.dtype.itemsize)
    return Field(ValueType.ARRAY, cursor.take(n * item.dtype.itemsize, what), n, item)


def _skip_strings(cursor: Cursor, n: int, what: str) -> npt.NDArray[np.int64]:
    """Offsets of the length prefixes of n strings, and of the byte after the last: [n + 1].

    Prefixes form a chain: each is found from the one before. Most are found at once by a guess
    that is then proved; where it fails, a few are walked one by one.
    """
    starts = np.empty(n + 1, np.int64)
    length_of, text_of = f"the length of a string in {what}", f"a string in {what}"
    done, window, walk = 0, _MIN_WINDOW, _MIN_WALK
    while done < n:
        links = _guess_links(cursor, n - done, window, text_of)
        starts[done : done + len(links)] = links
        done += len(links)
        # look further while guesses are right, and less often while they are wrong
        good = len(links) > window // 64
        window = min(4 * window, _MAX_WINDOW) if good else _MIN_WINDOW
        walk = _MIN_WALK if good else min(2 * walk, _MAX_WALK)
        stop = min(done + walk, n)
        while done < stop:
            starts[done] = cursor.pos
            cursor.take(cursor.count(length_of, 1), text_of)
            done += 1
    starts[n] = cursor.pos
    return starts


_MIN_WINDOW = 1 << 12
_MAX_WINDOW = 1 << 20
_MIN_WALK = 16
_MAX_WALK = 1 << 12


def _guess_links(cursor: Cursor, n: int, window: int, what: str) -> npt.NDArray[np.int64]:
    """Offsets of up to n consecutive length prefixes from the cursor on; steps over their strings.

    A prefix below 256 is a byte followed by seven zeros, a pattern text does not have. The places
    with that pattern are proved to be the chain by each one's length leading to the next.
    """
    window = min(window, cursor.left)
    if n < _MIN_WALK or window < 8:
        return np.empty(0, np.int64)
    cursor.fill(cursor.pos + window)
    data = np.frombuffer(cursor.data, np.uint8, window, cursor.pos)
    zero = data == 0
    pattern = zero[1 : window - 6].copy()
    for k in range(2, 8):
        pattern &= zero[k : window - 7 + k]
    places = np.flatnonzero(pattern)
    if places.size == 0 or places[0] != 0:
        return np.empty(0, np.int64)
    ends = places + 8 + data[places]
    broken = np.flatnonzero(places[1:] != ends[:-1])
    proved = min(int(broken[0]) + 1 if broken.size else len(places), n)
    return cursor.take(int(ends[proved - 1]), what) + places[:proved]


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    alignment = metadata.get_int("general.alignment", DEFAULT_ALIGNMENT)
    if alignment == 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment}, it must be a power of two")
    return alignment


def _read_tensors(
    cursor: Cursor, n_tensors: int, alignment: int
) -> tuple[dict[str, GgufTensor], int]:
    """The tensors with their offsets in the data section, and the size of that."""
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for i in range(n_tensors):
        at = cursor.pos
        tensor = _read_tensor(cursor, f"the name of tensor {i}")
        if tensor.name in tensors:
            raise cursor.error(f"tensor {tensor.name!r} is duplicated", at)
        if tensor.offset != expected:
            raise cursor.error(
                f"tensor {tensor.name!r} has data offset {tensor.offset:,}, "
                f"expected {expected:,}; {DAMAGED}",
                at,
            )
        expected += pad(tensor.nbytes, alignment)
        tensors[tensor.name] = tensor
    return tensors, expected


def _place(cursor: Cursor, tensors: dict[str, GgufTensor], start: int, *, check: bool) -> None:
    """Turn offsets within the data section into offsets within the file."""
    for name, tensor in tensors.items():
        offset = start + tensor.offset
        if check and offset + tensor.nbytes > cursor.part.size:
            raise cursor.error(
                f"tensor {name!r} data is not within the file bounds: it ends at byte "
                f"{offset + tensor.nbytes:,} of {cursor.part.size:,}; {DAMAGED}",
                offset,
            )
        tensors[name] = replace(tensor, offset=offset)


def pad(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment


def _read_tensor(cursor: Cursor, what: str) -> GgufTensor:
    name = cursor.name(what, MAX_NAME_LENGTH)
    at = cursor.pos
    n_dims = cursor.u32(f"n_dims of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dimensions, must have 1 to 4", at)
    at = cursor.pos
    ne = [cursor.u64(f"ne of tensor {name!r}") for _ in range(n_dims)] + [1] * (4 - n_dims)
    if max(ne) > MAX_INT64:
        raise cursor.error(f"tensor {name!r} has a negative dimension; {DAMAGED}", at)
    ggml_type = _read_type(cursor, name)
    offset = cursor.u64(f"the offset of tensor {name!r}")
    block_size, type_size = ggml_type.block_size, ggml_type.type_size
    if ne[0] % block_size:
        raise cursor.error(
            f"tensor {name!r} of type {ggml_type.label} has rows of {ne[0]:,} elements, "
            f"not a multiple of its block size {block_size}",
            at,
        )
    # empty tensors are allowed, but their strides must be as sane as those of the others
    if math.prod(max(n, 1) for n in ne) * type_size > MAX_INT64:
        raise cursor.error(f"tensor {name!r} is too large: ne = {ne}; {DAMAGED}", at)
    nbytes = math.prod(ne) // block_size * type_size
    return GgufTensor(name, ggml_type, (ne[0], ne[1], ne[2], ne[3]), n_dims, 0, offset, nbytes)


def _read_type(cursor: Cursor, name: str) -> GGMLType:
    at = cursor.pos
    id = cursor.u32(f"the type of tensor {name!r}")
    if id in TYPE_IDS:
        return GGMLType(id)
    if id in RETIRED_TYPES:
        hint = f"{RETIRED_TYPES[id]}, which ggml removed: convert or quantize the model again"
    else:
        hint = "unknown: the file is damaged, newer than this program, or made for a fork of ggml"
    raise cursor.error(f"tensor {name!r} has type {id}, {hint}", at)


TYPE_IDS = frozenset(GGMLType)
