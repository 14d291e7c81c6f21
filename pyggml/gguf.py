"""GGUF models: one file or several parts, opened lazily and safely.

with open_gguf("model.gguf") as gguf:
    gguf.metadata.get_str("general.architecture")
    gguf.tensors["token_embd.weight"].ne
    gguf.data("token_embd.weight")
"""

import logging
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pyggml.errors import GgufError
from pyggml.gguf_file import GgufPart
from pyggml.gguf_header import GgufTensor, Header, read_header
from pyggml.gguf_metadata import Metadata, Override, ValueType, parse_override, parse_overrides

__all__ = [
    "Gguf",
    "GgufPart",
    "GgufTensor",
    "Metadata",
    "Override",
    "ValueType",
    "open_gguf",
    "parse_override",
    "parse_overrides",
]

log = logging.getLogger("pyggml.gguf")


class Gguf:
    """An open model: its metadata, and where each tensor's bytes are."""

    def __init__(self, loaded: Sequence["_Loaded"]) -> None:
        first = loaded[0].header
        self.path = loaded[0].part.path
        self.version = first.version
        self.alignment = first.alignment
        self.metadata = first.metadata
        self.has_data = all(file.header.has_data for file in loaded)
        self.parts = tuple(file.part for file in loaded)
        self.tensors = _join_tensors(loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def n_params(self) -> int:
        """Number of weights; tied ones count once."""
        return sum(math.prod(tensor.ne) for tensor in self.tensors.values())

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, in the mapping of its file."""
        tensor = self.tensors[name]
        view = memoryview(self.parts[tensor.part].map)
        return view[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """Close the files; metadata stays readable."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Loaded:
    part: GgufPart
    header: Header

    @property
    def split_no(self) -> int:
        return self.header.metadata.get_int("split.no", 0, value_type=ValueType.UINT16)

    @property
    def split_count(self) -> int:
        return self.header.metadata.get_int("split.count", 0, value_type=ValueType.UINT16)

    def is_followed_by_gguf(self) -> bool:
        """Whether another GGUF file was appended to this one."""
        end = self.header.data_end
        return end + 4 <= self.part.size and self.part.read(end, 4) == b"GGUF"


def open_gguf(
    path: str | Path,
    *,
    splits: Sequence[str | Path] = (),
    alone: bool = False,
    allow_no_data: bool = False,
) -> Gguf:
    """Open a model by its file, or by the first of its parts.

    The other parts are found by name, unless `splits` lists all of them, in any order; `path` may
    then be any one. `alone`: only this file, whatever part of a model it is. `allow_no_data`: it
    may end before its tensors (`has_data` tells), for those who do not ask for their bytes.
    """
    with ExitStack() as stack:
        if splits:
            paths = dict.fromkeys([Path(path), *map(Path, splits)])
            loaded = _sort_parts([_load(part, stack) for part in paths])
        else:
            first = _load(Path(path), stack, allow_no_data=allow_no_data)
            loaded = [first] if alone else _find_parts(first, stack, allow_no_data)
        if len(loaded) > 1:
            _check_total(loaded)
            log.info("additional %d GGUFs metadata loaded", len(loaded) - 1)
        gguf = Gguf(loaded)
        stack.pop_all()
        return gguf


def _load(path: Path, stack: ExitStack, *, allow_no_data: bool = False) -> _Loaded:
    part = GgufPart(path)
    stack.callback(part.close)
    loaded = _Loaded(part, read_header(part, allow_no_data=allow_no_data))
    if loaded.split_count > 1 and loaded.is_followed_by_gguf():
        raise GgufError(
            f"{path}: another GGUF file follows at byte {loaded.header.data_end:,}: parts of a "
            "split model were joined byte by byte; merge them with `pyllama-gguf merge`"
        )
    return loaded


def _find_parts(first: _Loaded, stack: ExitStack, allow_no_data: bool) -> list[_Loaded]:
    """The first part and those whose names follow from its name."""
    path, count = first.part.path, first.split_count
    if count <= 1:
        return [first]
    if first.split_no != 0:
        raise GgufError(
            f"{path}: is part {first.split_no + 1} of {count} of a split model: "
            f"open its first part, {_first_name(path, count)}"
        )
    suffix = part_suffix(0, count)
    if not path.name.endswith(suffix):
        raise GgufError(
            f"{path}: invalid split file name: it is part 1 of {count}, so its name must end in "
            f"{suffix} for the others to be found; rename it, or merge the parts"
        )
    prefix = path.name.removesuffix(suffix)
    loaded = [first]
    for i in range(1, count):
        other = path.with_name(prefix + part_suffix(i, count))
        if not other.exists():
            raise GgufError(f"{other}: part {i + 1} of {count} is missing: put it beside {path}")
        loaded.append(_load(other, stack, allow_no_data=allow_no_data))
        _check_index(loaded[i], i)
    return loaded


def part_suffix(index: int, count: int) -> str:
    """What the name of a part ends in; the first has index 0."""
    return f"-{index + 1:05d}-of-{count:05d}.gguf"


def _first_name(path: Path, count: int) -> str:
    prefix, found = re.subn(r"-\d{5}-of-\d{5}\.gguf$", "", path.name)
    if found:
        return str(path.with_name(prefix + part_suffix(0, count)))
    return f"whose name usually ends in {part_suffix(0, count)}"


def _sort_parts(loaded: list[_Loaded]) -> list[_Loaded]:
    """Listed parts in the order their metadata gives."""
    loaded = sorted(loaded, key=lambda file: file.split_no)
    expected = max(loaded[0].split_count, 1)
    if len(loaded) != expected:
        raise GgufError(
            f"{loaded[0].part.path}: invalid split count, given: {len(loaded)} files, "
            f"but expected {expected}; list every part once"
        )
    for i, file in enumerate(loaded):
        _check_index(file, i)
    return loaded


def _check_index(file: _Loaded, index: int) -> None:
    found = file.split_no if "split.no" in file.header.metadata or index == 0 else "none"
    if found != index:
        raise GgufError(
            f"{file.part.path}: invalid split file index: {found}, expected {index}; "
            "the file is not that part of this model"
        )


def _check_total(loaded: Sequence[_Loaded]) -> None:
    first = loaded[0]
    expected = first.header.metadata.get_int("split.tensors.count", value_type=ValueType.INT32)
    found = sum(len(file.header.tensors) for file in loaded)
    if found != expected:
        raise GgufError(
            f"{first.part.path}: corrupted model: {expected:,} tensors expected "
            f"but {found:,} found in {len(loaded)} parts; download all parts of one release"
        )


def _join_tensors(loaded: Sequence[_Loaded]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for i, file in enumerate(loaded):
        for name, tensor in file.header.tensors.items():
            if name in tensors:
                raise GgufError(
                    f"{file.part.path}: invalid model: tensor {name!r} is duplicated, it is in "
                    f"{loaded[tensors[name].part].part.path} as well"
                )
            tensors[name] = replace(tensor, part=i) if i else tensor
    return tensors
