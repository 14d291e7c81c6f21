"""Colours and words that the pictures of a split graph share."""

from collections.abc import Mapping, Sequence

from pyggml.sched_graph import SplitGraph

CPU_COLOUR = "#e69f00"
# by Okabe and Ito: told apart with any kind of colour vision
DEVICE_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def colours(graph: SplitGraph) -> Mapping[str, str]:
    """The colour of each device: the CPU's is always the same, the others take turns."""
    others = [d.name for d in graph.devices if d.type != "CPU"]
    found = {name: DEVICE_COLOURS[i % len(DEVICE_COLOURS)] for i, name in enumerate(others)}
    return found | {d.name: CPU_COLOUR for d in graph.devices if d.type == "CPU"}


def shown_bytes(n: float) -> str:
    """A size in the unit that suits it."""
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"


def shown_time(seconds: float | None) -> str:
    """A modelled time; empty if it is unknown."""
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def shown_shape(ne: Sequence[int]) -> str:
    """ne in ggml's order."""
    return "[" + ", ".join(map(str, ne)) + "]"


def counted(n: int, what: str) -> str:
    """1 node, 2 nodes; 1 copy, 2 copies."""
    if n == 1:
        return f"1 {what}"
    return f"{n:,} {what[:-1]}ies" if what.endswith("y") else f"{n:,} {what}s"
