"""A split graph as JSON; docs/sched-graph.md describes it."""

import json
from dataclasses import asdict
from typing import Any

from pyggml.sched_graph import SplitGraphs
from pyggml.version import __version__

FORMAT = "pyggml-sched-graph"
VERSION = 1  # of the format: grows when something is removed or gets another meaning


def text(graphs: SplitGraphs) -> str:
    """One object in one line."""
    return json.dumps(as_object(graphs), separators=(",", ":")) + "\n"


def as_object(graphs: SplitGraphs) -> dict[str, Any]:
    """What is written, as dicts and lists."""
    head = {"format": FORMAT, "version": VERSION, "program": f"pyggml {__version__}"}
    return head | asdict(graphs)
