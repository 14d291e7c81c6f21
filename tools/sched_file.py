"""--sched-graph FILE: what runs where, as a page, a picture, for Graphviz or as data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml.errors import UserError
from pyggml.llama.context import Context
from pyggml.tools import whole_file

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
    whole_file.check(FLAG, path)


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
    whole_file.write(FLAG, path, content)
