"""Write docs/models.md: how far each architecture is from llama.cpp.

python tests/models_table.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from divergence import LENGTHS, divergences, reference, strict
from oracle import LlamaCpp
from tiny import ARCHS, write_tiny

from pyggml.errors import UserError
from pyggml.llama.context_params import CACHE_TYPES

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
TEXT = """# Models and how far they are from llama.cpp

One row per architecture (`general.architecture` of a GGUF file). A cell is the mean KL divergence
of our next-token distributions from llama.cpp's, in nats, over the {n} positions of random
prompts of 1, 2, 33 and 100 tokens. Both compute the same file of random weights
(`tests/tiny.py`): small, but with no two dimensions alike, windows and contexts that the prompts
exceed, and logits as spread as in a trained model.

* `F32`, `Q8_0`, `Q4_K`: type of the weight matrices; F32 cache, no flash attention.
* `-fa`: F32 weights, flash attention and F16 cache on both sides.
* `-ctk q8_0`: as `-fa`, keys as Q8_0 on both sides (`-`: both refuse it).

Quantized weights are multiplied by activations of 8 bits, which both sides round in their own
way: each is about 1e-3 from exact arithmetic, and neither is nearer
(`tests/llama/test_exactness.py`). Now and then the rounding also decides which expert is chosen.
Experts of these files are near relatives, as in models that were made from a dense one: the other
expert answers nearly the same, and a few such positions do not make the mean. In F32 the wrong
expert is seen nevertheless, far above the limit (`tests/llama/test_wrong_experts.py`). In
architectures with a GELU the rest in F32 is llama.cpp's table of it, which has F16 entries.

Written by `python tests/models_table.py`. Every cell is below the limit of its column, which the
tests check for these models and more variants of them (`tests/llama/test_architectures.py`):
{limits}.

"""


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run a model, in both programs, and how far apart they may be."""

    title: str
    limit: float
    weight_type: str = "F32"
    ours: dict[str, str] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)


FLASH = {"flash_attn": "on", "type_k": "f16", "type_v": "f16"}
COLUMNS = [
    Column("F32", 1e-6),
    Column("Q8_0", 2e-3, "Q8_0"),
    Column("Q4_K", 2e-3, "Q4_K"),
    Column("`-fa`", 1e-5, ours=FLASH, theirs={"flash_attention": True, "kv_type": "F16"}),
    Column(
        "`-ctk q8_0`",
        2e-3,
        ours={**FLASH, "type_k": "q8_0"},
        theirs={"flash_attention": True, "kv_type": ("Q8_0", "F16")},
    ),
]


def main(archs: list[str]) -> None:
    columns = [c for c in COLUMNS if c.ours.get("type_k", "f32") in CACHE_TYPES]
    titles = ["architecture", *(column.title for column in columns)]
    rows = written()
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs or ARCHS:
            rows[arch] = [f"`{arch}`", *cells(arch, columns, Path(folder))]
            write(titles, rows)


def write(titles: list[str], rows: dict[str, list[str]]) -> None:
    """The document; rows that were measured in fewer ways are filled up."""
    known = [rows[arch] for arch in sorted(rows) if arch in ARCHS]
    filled = [row + [""] * (len(titles) - len(row)) for row in known]
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *filled)]
    limits = ", ".join(f"{column.limit:.0e} for {column.title}" for column in COLUMNS)
    DOCUMENT.write_text(TEXT.format(n=sum(LENGTHS), limits=limits) + "\n".join(lines) + "\n")


def cells(arch: str, columns: list[Column], folder: Path) -> Iterator[str]:
    """The row of an architecture."""
    for column in columns:
        path = folder / f"{arch}-{column.weight_type}.gguf"
        if not path.exists():
            write_tiny(path, arch, weight_type=column.weight_type)
        found = distance(path, column)
        yield "-" if found is None else f"{found:.0e}"


def distance(path: Path, column: Column) -> float | None:
    """The mean divergence of one model; None where both programs refuse to run it so."""
    try:
        with LlamaCpp(path, **column.theirs) as theirs:
            expected = reference(theirs)
    except ValueError:  # it makes no such context
        with pytest.raises(UserError), strict(path, **column.ours) as ours:
            ours.context()
        return None
    with strict(path, **column.ours) as ours:
        return float(divergences(ours, expected).mean())


def written() -> dict[str, list[str]]:
    """The cells of each architecture that the table has a row for."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0].strip("`"): row for row in rows if row[0] != "architecture"}


if __name__ == "__main__":
    main(sys.argv[1:])
