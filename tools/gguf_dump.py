"""pyllama-gguf dump: what a header says, as text or JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pyggml.gguf import Gguf, GgufTensor, ValueType
from pyggml.gguf_metadata import Value

FEW = 6  # elements of an array that are shown
WIDTH = 60  # characters of a text that are shown


def lines(gguf: Gguf, *, whole: bool = False) -> Iterator[str]:
    """The header for people; `whole`: arrays and texts are not shortened."""
    yield f"{gguf.path}: GGUF version {gguf.version}, {gguf.parts[0].size:,} bytes{_notes(gguf)}"
    yield ""
    yield f"{len(gguf.metadata):,} keys"
    kv = gguf.metadata
    rows = [(key, kv.type_label(key), _shown(kv[key], whole=whole)) for key in kv]
    yield from _table(rows, "<<<")
    yield ""
    yield f"{len(gguf.tensors):,} tensors, {gguf.nbytes:,} bytes, aligned to {gguf.alignment}"
    yield from _table([_tensor_row(t) for t in gguf.tensors.values()], "<<<>>")
    if gguf.tensors:
        yield ""
        yield f"in all: {_by_type(gguf)}"


def _notes(gguf: Gguf) -> str:
    count = gguf.metadata.get("split.count", 0)
    part = gguf.metadata.get("split.no", 0)
    notes = f", part {part + 1} of {count}" if isinstance(part, int) and count else ""
    return notes if gguf.has_data else f"{notes}, header only"


def _tensor_row(t: GgufTensor) -> Sequence[str]:
    return (t.name, t.type.label, _shape(t), f"{t.nbytes:,}", f"at {t.offset:,}")


def _shape(tensor: GgufTensor) -> str:
    return " x ".join(map(str, tensor.ne[: tensor.n_dims]))


def _by_type(gguf: Gguf) -> str:
    tensors, nbytes = Counter[str](), Counter[str]()
    for t in gguf.tensors.values():
        tensors[t.type.label] += 1
        nbytes[t.type.label] += t.nbytes
    return ", ".join(f"{n} {label} ({nbytes[label]:,} bytes)" for label, n in tensors.most_common())


def _table(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Aligned columns; `sides` has < or > for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


# ---------------------------------------------------------------- values
def _shown(value: Value, *, whole: bool) -> str:
    if isinstance(value, str):
        return _quoted(value, whole=whole)
    if isinstance(value, list | np.ndarray):
        return _listed(value, whole=whole)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Any, *, whole: bool) -> str:
    n = len(values)
    few = values if whole or n <= FEW else values[:FEW]
    items = [_shown(v.item() if isinstance(v, np.generic) else v, whole=whole) for v in few]
    more = [] if len(items) == n else [f"... {n - len(items):,} more"]
    return f"[{', '.join(items + more)}]"


def _quoted(text: str, *, whole: bool) -> str:
    """In quotes and on one line, with nothing in it that a terminal would obey."""
    cut = text if whole or len(text) <= WIDTH else text[:WIDTH]
    safe = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in _escaped(cut))
    more = "" if cut is text else f"... {len(text) - len(cut):,} more characters"
    return f'"{safe}"{more}'


def _escaped(text: str) -> Iterable[str]:
    return text.replace("\\", "\\\\").replace('"', '\\"')


# ---------------------------------------------------------------- JSON
def as_json(gguf: Gguf) -> dict[str, Any]:
    """The whole header; numbers that JSON lacks (inf, nan) are strings."""
    kv = gguf.metadata
    return {
        "path": str(gguf.path),
        "version": gguf.version,
        "size": gguf.parts[0].size,
        "alignment": gguf.alignment,
        "has_data": gguf.has_data,
        "metadata": {key: {**_types(gguf, key), "value": _plain(kv[key])} for key in kv},
        "tensors": [_tensor_record(t) for t in gguf.tensors.values()],
    }


def _types(gguf: Gguf, key: str) -> dict[str, str]:
    kind = gguf.metadata.type_of(key)
    if kind is not ValueType.ARRAY:
        return {"type": kind.label}
    return {"type": kind.label, "of": gguf.metadata.array_type(key).label}


def _tensor_record(t: GgufTensor) -> dict[str, Any]:
    ne = t.ne[: t.n_dims]
    return {"name": t.name, "type": t.type.label, "ne": ne, "offset": t.offset, "nbytes": t.nbytes}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
