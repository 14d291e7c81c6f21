"""A split graph as a page: one file with everything in it, to look at in a browser."""

import json
from dataclasses import asdict
from html import escape
from importlib.resources import files

from pyggml.sched_graph import SplitGraphs
from pyggml.tools.sched_text import colours

SCRIPTS = ("words.js", "model.js", "layout.js", "draw.js", "view.js", "panels.js", "main.js")


def text(graphs: SplitGraphs) -> str:
    """The page; it needs no network."""
    page = files("pyggml.tools.sched_page")
    # every other `<` of the data could end the script it stands in
    data = json.dumps(_with_colours(graphs), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(f"What runs where: {graphs.model}"),
        "MODEL": escape(graphs.model),
        "DESCRIPTION": escape(graphs.description),
        "STYLE": page.joinpath("style.css").read_text("utf-8").strip(),
        "SCRIPT": "".join(page.joinpath(name).read_text("utf-8") for name in SCRIPTS).strip(),
        "DATA": data,
    }
    # in pieces: names of tensors may look like places to fill
    pieces = page.joinpath("page.html").read_text("utf-8").split("@")
    return "".join(parts[p] if i % 2 else p for i, p in enumerate(pieces))


def _with_colours(graphs: SplitGraphs) -> dict[str, object]:
    found = asdict(graphs)
    for graph, shown in zip(graphs.graphs, found["graphs"], strict=True):
        shown["colours"] = dict(colours(graph))
    return found
