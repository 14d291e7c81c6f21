"""pyllama-gguf split and merge: llama-gguf-split's naming, limits and keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyggml.errors import ConfigError, GgufError
from pyggml.gguf import Gguf, GgufTensor, ValueType, part_suffix
from pyggml.gguf_header import DEFAULT_ALIGNMENT
from pyggml.gguf_writer import NewFile, Stored, copy_of, number, stored_pairs

MAX_TENSORS = 128  # per part, where nothing is said
MAX_PARTS = 65535
UNITS = {"M": 1000**2, "G": 1000**3}


@dataclass(frozen=True, slots=True)
class Limits:
    """When a new part begins: at a size, or at a number of tensors."""

    nbytes: int | None = None
    n_tensors: int = MAX_TENSORS
    empty_first: bool = False  # the first part has metadata only

    @classmethod
    def of(cls, size: str | None, n_tensors: int | None, *, empty_first: bool) -> Limits:
        """Limits from the command line."""
        if size is not None and n_tensors is not None:
            raise ConfigError("--split-max-size and --split-max-tensors: give one of them")
        if n_tensors is not None and n_tensors < 1:
            raise ConfigError(f"--split-max-tensors {n_tensors}: it must be 1 or greater")
        nbytes = None if size is None else _size(size)
        return cls(nbytes, n_tensors or MAX_TENSORS, empty_first)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})([MG])", text, re.ASCII)
    if not found or int(found[1]) == 0:
        raise ConfigError(f"--split-max-size {text}: it must be a number of M or G, as in 500M")
    return int(found[1]) * UNITS[found[2]]


def parts_of(tensors: Sequence[GgufTensor], limits: Limits) -> list[list[GgufTensor]]:
    """The tensors of each part; one that is larger than the limit has a part for itself.

    Sizes are those of tensors only, padded to 32 bytes: the parts are llama-gguf-split's.
    """
    parts: list[list[GgufTensor]] = [[], []] if limits.empty_first else [[]]
    used = 0
    for i, tensor in enumerate(tensors):
        nbytes = tensor.nbytes + -tensor.nbytes % DEFAULT_ALIGNMENT
        if limits.nbytes is None:
            is_full = i > 0 and i % limits.n_tensors == 0
        else:
            is_full = bool(parts[-1]) and used + nbytes > limits.nbytes
        if is_full:
            parts.append([])
            used = 0
        parts[-1].append(tensor)
        used += nbytes
    return parts


def split_files(gguf: Gguf, prefix: str, limits: Limits) -> list[NewFile]:
    """The parts of a model as files: PREFIX-00001-of-00003.gguf and so on."""
    parts = parts_of(list(gguf.tensors.values()), limits)
    if len(parts) > MAX_PARTS:
        raise ConfigError(
            f"{gguf.path}: {len(parts):,} parts are more than {MAX_PARTS:,}: "
            "raise --split-max-size or --split-max-tensors"
        )
    files = []
    for no, tensors in enumerate(parts):
        own = model_pairs(gguf) if no == 0 else {}
        pairs = {**own, **dict(_split_pairs(no, len(parts), len(gguf.tensors)))}
        path = Path(prefix + part_suffix(no, len(parts)))
        files.append(NewFile(path, pairs, [copy_of(gguf, t) for t in tensors], gguf.version))
    return files


def _split_pairs(no: int, count: int, n_tensors: int) -> Iterator[tuple[str, Stored]]:
    u16 = partial(number, ValueType.UINT16)
    yield "split.no", u16(no)
    yield "split.count", u16(count)
    yield "split.tensors.count", number(ValueType.INT32, n_tensors)


def model_pairs(gguf: Gguf) -> dict[str, Stored]:
    """The metadata of a model, without what says that it is split."""
    pairs = stored_pairs(gguf.metadata)
    return {key: pair for key, pair in pairs.items() if not key.startswith("split.")}


def merged_file(gguf: Gguf, path: Path) -> NewFile:
    """All parts of a model as one file."""
    if not gguf.metadata.get_int("split.count", 0, value_type=ValueType.UINT16):
        raise GgufError(f"{gguf.path}: is not a part of a split model: nothing is to be merged")
    return whole_file(gguf, path)


def whole_file(gguf: Gguf, path: Path, *, has_data: bool = True) -> NewFile:
    """The model as one file, or its header only."""
    tensors = [copy_of(gguf, t) for t in gguf.tensors.values()]
    return NewFile(path, model_pairs(gguf), tensors, gguf.version, has_data)
