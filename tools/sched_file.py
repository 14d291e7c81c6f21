"""--sched-graph FILE: what runs where, as a page, a picture, for Graphviz or as data."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml.errors import UserError
from pyggml.llama.context import Context

if TYPE_CHECKING:  # it is rarely wanted, and every start would pay
    from pyggml.sched_graph import SplitGraphs

# each module offers `text(graphs)`
WRITERS: Mapping[str, str] = {
    ".html": "pyggml.tools.sched_html",
    ".svg": "pyggml.tools.sched_svg",
    ".dot": "pyggml.tools.sched_dot",
    ".json": "pyggml.tools.sched_json",
}
FLAG = "--sched-graph"


def check(values: Mapping[str, Any]) -> None:
    """Refuse what cannot be written, before anything is loaded."""
    if "sched_graph" not in values:
        return
    path = Path(values["sched_graph"])
    if path.suffix.lower() not in WRITERS:
        known = ", ".join(WRITERS)
        raise UserError(f"{FLAG} {path}: the name has to end in one of {known}")
    if path.is_dir():
        raise UserError(f"{FLAG} {path}: is a directory")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{FLAG} {path}: permission denied")
    _open_part(path)[1].unlink()


def write_wanted(values: Mapping[str, Any], context: Context) -> None:
    """Write the file if one is wanted."""
    if "sched_graph" in values:
        write(values["sched_graph"], graphs_of(context))


def graphs_of(context: Context) -> SplitGraphs:
    """The graphs of a full ubatch of a prompt and of one token, when the memory is full."""
    from pyggml.sched_graph import SplitGraphs, describe

    model, p = context.model, context.params
    found = []
    for name, n_tokens in (("prompt", min(p.n_ctx, p.n_ubatch)), ("token", 1)):
        sched, sizes = context.plan_graph(n_tokens)
        found.append(describe(sched, name, n_tokens, sizes))
    name = model.hparams.name or model.gguf.path.name
    return SplitGraphs(name, f"{model.description}, context of {p.n_ctx:,}", tuple(found))


def write(text: str, graphs: SplitGraphs) -> None:
    """Write the file as a whole, or leave what was there."""
    path = Path(text)
    content: str = importlib.import_module(WRITERS[path.suffix.lower()]).text(graphs)
    descriptor, part = _open_part(path)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _open_part(path: Path) -> tuple[int, Path]:
    """A new file beside the wanted one, with the rights of any new file."""
    import tempfile

    try:
        descriptor, name = tempfile.mkstemp(".part", f".{path.name[:200]}.", path.parent)
    except OSError as error:
        raise UserError(f"{FLAG} {path}: {(error.strerror or str(error)).lower()}") from None
    mask = os.umask(0)
    os.umask(mask)
    os.fchmod(descriptor, 0o666 & ~mask)
    return descriptor, Path(name)
