"""pyllama-gguf set: one value of the metadata."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError, GgufError
from pyggml.gguf import Gguf, ValueType
from pyggml.gguf_header import MAX_KEY_LENGTH
from pyggml.gguf_writer import (
    NewFile,
    Stored,
    copy_of,
    number,
    overwrite,
    stored_pairs,
    string,
)

TYPES = {kind.label: kind for kind in ValueType if kind is not ValueType.ARRAY}
BOOLS = {"true": True, "false": False}
ALIGNMENT = "general.alignment"


def parsed(key: str, text: str, kind: ValueType) -> Stored:
    """A value of a type from the command line."""
    try:
        return _PARSERS.get(kind, _number)(text, kind)
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{key} is {kind.label}: {text!r} is not {_wanted(kind)}") from None


def _number(text: str, kind: ValueType) -> Stored:
    assert kind.dtype is not None
    if kind.dtype.kind != "f":
        return number(kind, int(text))
    value = float(text)
    if math.isfinite(value) and abs(value) > float(np.finfo(kind.dtype).max):
        raise ValueError(text)
    return number(kind, value)


_PARSERS: dict[ValueType, Callable[[str, ValueType], Stored]] = {
    ValueType.BOOL: lambda text, kind: number(kind, BOOLS[text]),
    ValueType.STRING: lambda text, _: string(text),
}


def _wanted(kind: ValueType) -> str:
    if kind is ValueType.STRING:
        return "text in UTF-8"
    if kind is ValueType.BOOL:
        return "true or false"
    assert kind.dtype is not None
    if kind.dtype.kind == "f":
        return f"a number up to {np.finfo(kind.dtype).max:.3g}"
    limits = np.iinfo(kind.dtype)
    return f"a whole number in {limits.min}..{limits.max}"


def type_to_store(gguf: Gguf, key: str, wanted: ValueType | None) -> ValueType:
    """The type that a key has, or is to get; `wanted` is what --type says."""
    metadata, path = gguf.metadata, gguf.path
    if key in metadata:
        kind = metadata.type_of(key)
        if kind is ValueType.ARRAY:
            raise GgufError(f"{path}: {key} is {metadata.type_label(key)}: arrays cannot be set")
        if wanted not in (None, kind):
            raise ConfigError(f"{path}: {key} is {kind.label}: leave --type away")
        return kind
    if wanted is None:
        near = difflib.get_close_matches(key, list(metadata), 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise GgufError(f"{path}: there is no key {key}{hint}; --type u32 (or another) adds it")
    if not key.isprintable() or not 0 < len(key.encode(errors="replace")) <= MAX_KEY_LENGTH:
        raise ConfigError(f"{key!r}: a key is printable text of 1 to {MAX_KEY_LENGTH:,} bytes")
    return wanted


def changed(gguf: Gguf, key: str, value: Stored) -> NewFile | None:
    """The file with a new value; None: there is nothing to rewrite, since it was done in place.

    In place means that only bytes of the value change, and as many as it had.
    """
    path = Path(os.path.realpath(gguf.path))
    if key == ALIGNMENT:
        alignment = int.from_bytes(value.raw, "little")
        if value.type is not ValueType.UINT32 or alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"{key} must be u32 and a power of two")
    elif key in gguf.metadata:
        start, end = gguf.metadata.place(key)
        if end - start == len(value.raw):
            overwrite(path, start, value.raw)
            return None
    pairs = {**stored_pairs(gguf.metadata), key: value}
    tensors = [copy_of(gguf, t) for t in gguf.tensors.values()]
    return NewFile(path, pairs, tensors, gguf.version, gguf.has_data)
