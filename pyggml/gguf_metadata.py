"""Metadata of a GGUF file: typed values, decoded on access, and overrides from the command line."""

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pyggml.errors import ConfigError, ModelError

log = logging.getLogger("pyggml.gguf")

D = TypeVar("D")
Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = "int | float | bool | str | list[Value] | Array"


class ValueType(IntEnum):
    """Value type ids as GGUF files store them."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def label(self) -> str:
        """The name gguf prints."""
        return _LABELS[self]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Element dtype as stored; None for strings and arrays, one byte for bool."""
        return _DTYPES.get(self)


_T = ValueType
_LABELS: dict[ValueType, str] = {
    _T.UINT8: "u8",
    _T.INT8: "i8",
    _T.UINT16: "u16",
    _T.INT16: "i16",
    _T.UINT32: "u32",
    _T.INT32: "i32",
    _T.FLOAT32: "f32",
    _T.BOOL: "bool",
    _T.STRING: "str",
    _T.ARRAY: "arr",
    _T.UINT64: "u64",
    _T.INT64: "i64",
    _T.FLOAT64: "f64",
}
_DTYPES: dict[ValueType, np.dtype[Any]] = {
    _T.UINT8: np.dtype("u1"),
    _T.INT8: np.dtype("i1"),
    _T.UINT16: np.dtype("<u2"),
    _T.INT16: np.dtype("<i2"),
    _T.UINT32: np.dtype("<u4"),
    _T.INT32: np.dtype("<i4"),
    _T.FLOAT32: np.dtype("<f4"),
    _T.BOOL: np.dtype("u1"),
    _T.UINT64: np.dtype("<u8"),
    _T.INT64: np.dtype("<i8"),
    _T.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """Where a value lies in the header; everything in it has been checked against the file size."""

    type: ValueType
    offset: int  # first byte of the value; of the first element for arrays
    length: int = 1  # bytes of a string, elements of an array
    item: ValueType | None = None  # element type of an array
    starts: npt.NDArray[np.int64] | None = None  # [length + 1] string arrays: length prefixes, end
    items: tuple["Field", ...] = ()  # arrays of arrays


def _numbers(data: bytes, type: ValueType, offset: int, count: int) -> Array:
    dtype = type.dtype
    assert dtype is not None
    numbers = np.frombuffer(data, dtype, count, offset)
    return numbers != 0 if type is ValueType.BOOL else numbers


def _byte_strings(data: bytes, field: Field) -> list[bytes]:
    assert field.starts is not None
    strings: list[bytes] = []
    step = 1 << 14  # Python integers take far more memory than the array they come from
    for i in range(0, field.length, step):
        begins = (field.starts[i : min(i + step, field.length)] + 8).tolist()
        ends = field.starts[i + 1 : i + 1 + step].tolist()
        strings += [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return strings


def _text(raw: bytes) -> str:
    """Text that can always be printed; `get_string_bytes` gives the bytes themselves."""
    return raw.decode("utf-8", "replace")


def decode(data: bytes, field: Field) -> Value:
    """The Python value of a field: a scalar, a list of strings or lists, or a NumPy array."""
    if field.type is ValueType.STRING:
        return _text(data[field.offset : field.offset + field.length])
    if field.type is not ValueType.ARRAY:
        return cast(Value, _numbers(data, field.type, field.offset, 1)[0].item())
    if field.item is ValueType.STRING:
        return [_text(raw) for raw in _byte_strings(data, field)]
    if field.item is ValueType.ARRAY:
        return [decode(data, item) for item in field.items]
    assert field.item is not None
    return _numbers(data, field.item, field.offset, field.length)


def stored_end(field: Field) -> int:
    """The byte after a value."""
    if field.type is ValueType.STRING:
        return field.offset + field.length
    kind = field.type if field.item is None else field.item
    if field.starts is not None:
        return int(field.starts[-1])
    if kind is ValueType.ARRAY:
        return stored_end(field.items[-1]) if field.items else field.offset
    assert kind.dtype is not None
    return field.offset + field.length * kind.dtype.itemsize


def stored_start(field: Field) -> int:
    """The first byte of a value: that of its length or of its element type, if it has one."""
    return field.offset - _PREFIXES.get(field.type, 0)


# a string follows its length, an array the type and the number of its elements
_PREFIXES = {ValueType.STRING: 8, ValueType.ARRAY: 4 + 8}


@dataclass(frozen=True, slots=True)
class Override:
    """One `--override-kv`: a key, the class of its value (int, float, bool, str) and the value."""

    key: str
    kind: str
    value: int | float | bool | str


_BOOLS = {"true": True, "false": False}
_PARSERS: dict[str, Callable[[str], int | float | bool | str]] = {
    "int": int,
    "float": float,
    "bool": lambda text: _BOOLS[text],
    "str": str,
}
_WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_MAX_OVERRIDE_TEXT = 127  # llama.cpp keeps keys and strings of overrides in char[128]


def parse_override(text: str) -> Override:
    """Read KEY=TYPE:VALUE, TYPE being int, float, bool (true or false) or str."""
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    try:
        if not (key and equals and colon):
            raise ValueError("it must be KEY=TYPE:VALUE")
        if len(key.encode()) > _MAX_OVERRIDE_TEXT:
            raise ValueError(f"the key is longer than {_MAX_OVERRIDE_TEXT} bytes")
        if kind not in _PARSERS:
            raise ValueError(f"type {kind!r} is none of {', '.join(_PARSERS)}")
        if kind == "str" and len(value.encode()) > _MAX_OVERRIDE_TEXT:
            raise ValueError(f"the string is longer than {_MAX_OVERRIDE_TEXT} bytes")
    except ValueError as e:
        raise ConfigError(f"--override-kv {text}: {e}") from None
    try:
        return Override(key, kind, _PARSERS[kind](value))
    except (KeyError, ValueError):
        raise ConfigError(f"--override-kv {text}: {value!r} is not {_WANTED[kind]}") from None


def parse_overrides(text: str) -> list[Override]:
    """Read a comma-separated list of overrides; one that holds a comma goes in double quotes."""
    return [parse_override(cell) for row in csv.reader([text]) for cell in row]


# the default of a getter whose key must be there; Any, so that such a call returns no D
_REQUIRED: Any = object()


class Metadata(Mapping[str, Value]):
    """The key-value pairs of a file, in file order.

    As a mapping it shows the file and decodes on every access. The `get_*` methods are what model
    code reads with: they apply overrides and insist on the exact stored type, as llama.cpp does.
    Without a default a missing key is a ModelError.
    """

    def __init__(
        self,
        path: Path,
        data: bytes,
        fields: Mapping[str, Field],
        overrides: Iterable[Override] = (),
    ) -> None:
        self._path = path
        self._data = data
        self._fields = fields
        self._overrides: dict[str, Override] = {}
        for override in overrides:
            self._overrides.setdefault(override.key, override)

    def with_overrides(self, overrides: Iterable[Override]) -> "Metadata":
        """The same metadata read through overrides; the first one of a key wins."""
        return Metadata(self._path, self._data, self._fields, overrides)

    def __getitem__(self, key: str) -> Value:
        return decode(self._data, self._fields[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def type_of(self, key: str) -> ValueType:
        return self._fields[key].type

    def place(self, key: str) -> tuple[int, int]:
        """Where a value is stored: the first byte and the one after the last, in its file."""
        field = self._fields[key]
        return stored_start(field), stored_end(field)

    def stored(self, key: str) -> bytes:
        """A value as the file holds it, without its type."""
        start, end = self.place(key)
        return self._data[start:end]

    def array_type(self, key: str) -> ValueType:
        """Element type of an array."""
        item = self._fields[key].item
        if item is None:
            raise self._wrong_type(key, "arr")
        return item

    def array_len(self, key: str) -> int:
        """Elements of an array, without decoding it."""
        if self._fields[key].type is not ValueType.ARRAY:
            raise self._wrong_type(key, "arr")
        return self._fields[key].length

    def get_int(
        self, key: str, default: D = _REQUIRED, *, value_type: ValueType = ValueType.UINT32
    ) -> int | D:
        """An integer stored as `value_type`; an override must fit that type."""
        dtype = value_type.dtype
        assert dtype is not None and dtype.kind in "iu"
        value = self._scalar(key, default, value_type, "int")
        limits = np.iinfo(dtype)
        if isinstance(value, int) and not limits.min <= value <= limits.max:
            raise ConfigError(
                f"--override-kv {key}=int:{value}: the key is {value_type.label}, "
                f"so its value must lie in {limits.min}..{limits.max}"
            )
        return cast("int | D", value)

    def get_float(
        self, key: str, default: D = _REQUIRED, *, value_type: ValueType = ValueType.FLOAT32
    ) -> float | D:
        """A number stored as f32 (or `value_type`)."""
        return cast("float | D", self._scalar(key, default, value_type, "float"))

    def get_bool(self, key: str, default: D = _REQUIRED) -> bool | D:
        """A truth value stored as bool."""
        return cast("bool | D", self._scalar(key, default, ValueType.BOOL, "bool"))

    def get_str(self, key: str, default: D = _REQUIRED) -> str | D:
        """Text; bytes that are not UTF-8 become U+FFFD."""
        return cast("str | D", self._scalar(key, default, ValueType.STRING, "str"))

    def get_array(self, key: str, default: D = _REQUIRED) -> Array | D:
        """An array of numbers or bools of any type, read-only."""
        field = self._array_field(key, default, tuple(_DTYPES), "arr of numbers")
        return cast(Array, decode(self._data, field)) if field else default

    def get_ints(self, key: str, default: D = _REQUIRED) -> npt.NDArray[np.int64] | D:
        """An array of u32, i32 or bool (llama.cpp's integer arrays), widened."""
        allowed = (ValueType.UINT32, ValueType.INT32, ValueType.BOOL)
        field = self._array_field(key, default, allowed, "arr[u32], arr[i32] or arr[bool]")
        return cast(Array, decode(self._data, field)).astype(np.int64) if field else default

    def get_floats(self, key: str, default: D = _REQUIRED) -> npt.NDArray[np.float32] | D:
        """An array of f32, read-only."""
        field = self._array_field(key, default, (ValueType.FLOAT32,), "arr[f32]")
        return cast(Array, decode(self._data, field)) if field else default

    def get_strings(self, key: str, default: D = _REQUIRED) -> list[str] | D:
        """An array of texts; bytes that are not UTF-8 become U+FFFD."""
        field = self._array_field(key, default, (ValueType.STRING,), "arr[str]")
        return cast("list[str]", decode(self._data, field)) if field else default

    def get_string_bytes(self, key: str, default: D = _REQUIRED) -> list[bytes] | D:
        """An array of strings as the bytes the file holds."""
        field = self._array_field(key, default, (ValueType.STRING,), "arr[str]")
        return _byte_strings(self._data, field) if field else default

    def get_per_layer(self, key: str, n_layer: int, default: D = _REQUIRED) -> list[int] | D:
        """One integer per layer: an array of exactly `n_layer`, or one u32 for all of them."""
        field = self._fields.get(key)
        if field is None or field.type is not ValueType.ARRAY:
            value = self.get_int(key, default)
            return [value] * n_layer if isinstance(value, int) else value
        if field.length != n_layer:
            raise ModelError(
                f"{self._path}: key {key} has wrong array length: "
                f"expected {n_layer} (one per layer), got {field.length}"
            )
        return cast("list[int]", self.get_ints(key).tolist())

    def _scalar(self, key: str, default: object, want: ValueType, kind: str) -> object:
        override = self._overrides.get(key)
        if override and override.kind == kind:
            log.info("using metadata override (%5s) '%s' = %s", kind, key, override.value)
            return override.value
        if override:
            log.warning(
                "bad metadata override type for key '%s', expected %s but got %s: not used",
                key,
                kind,
                override.kind,
            )
        field = self._fields.get(key)
        if field is None:
            return self._missing(key, default, want.label)
        if field.type is not want:
            raise self._wrong_type(key, want.label)
        return decode(self._data, field)

    def _array_field(
        self, key: str, default: object, allowed: tuple[ValueType, ...], expected: str
    ) -> Field | None:
        field = self._fields.get(key)
        if key in self._overrides:
            log.warning("metadata override of '%s' is not used: arrays cannot be overridden", key)
        if field is None:
            self._missing(key, default, expected)
        elif field.item not in allowed:
            raise self._wrong_type(key, expected)
        return field

    def _missing(self, key: str, default: object, expected: str) -> object:
        if default is _REQUIRED:
            raise ModelError(f"{self._path}: key not found in model: {key} (expected {expected})")
        return default

    def _wrong_type(self, key: str, expected: str) -> ModelError:
        return ModelError(
            f"{self._path}: key {key} has wrong type {self.type_label(key)} "
            f"but expected type {expected}"
        )

    def type_label(self, key: str) -> str:
        """The type as gguf prints it: `u32`, `arr[str,300]`."""
        field = self._fields[key]
        if field.item is None:
            return field.type.label
        return f"arr[{field.item.label},{field.length}]"
