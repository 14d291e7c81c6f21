"""A graph's nodes by layer, and which layers are alike, so that one picture can stand for many.

Layers are known by names as models give them: `ffn_out-3`, `cache_k_l3 (view)`, and of weights
`blk.3.ffn_up.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pyggml.tensor import Tensor

_OF_NODE = re.compile(r"(?:-|_l)(\d+)(?= \(|$)")
_OF_WEIGHT = re.compile(r"(?:^|#)blk\.(\d+)\.")
MAX_PERIOD = 8  # layers of several kinds in turn: 5 with a window and 1 without, 3 linear and 1 not


@dataclass(frozen=True, slots=True)
class Section:
    """Nodes `start` to `stop` - 1."""

    name: str
    layer: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fold:
    """`repeats` times the `period` sections from `first` on; 1: they are not repeated."""

    first: int
    period: int
    repeats: int


def layer_of(node: Tensor) -> int | None:
    """The layer that the node's name or one of its weights speaks of."""
    found = _OF_NODE.search(node.name)
    if found:
        return int(found[1])
    for src in node.src:
        # a copied weight is named CUDA0#blk.3.ffn_up.weight#0
        of_weight = _OF_WEIGHT.search(src.name) if src is not None else None
        if of_weight:
            return int(of_weight[1])
    return None


def sections_of(nodes: Sequence[Tensor]) -> tuple[Section, ...]:
    """Runs of nodes of one layer; one without a layer belongs to those before it.

    What comes before the first and after the last layer are sections of their own.
    """
    layers = [layer_of(node) for node in nodes]
    known = [i for i, layer in enumerate(layers) if layer is not None]
    if not known:
        return (Section("graph", None, 0, len(nodes)),) if nodes else ()
    for i in range(known[0], known[-1]):
        if layers[i] is None:
            layers[i] = layers[i - 1]
    made: list[Section] = []
    for layer, run in groupby(range(len(nodes)), key=lambda i: layers[i]):
        indices = list(run)
        outside = "output" if made else "input"
        name = outside if layer is None else f"layer {layer}"
        made.append(Section(name, layer, indices[0], indices[-1] + 1))
    return tuple(made)


def fold(sections: Sequence[Section], looks: Sequence[Hashable]) -> tuple[Fold, ...]:
    """Group sections whose nodes look alike; `looks` has one entry per node."""
    keys = [(s.layer is None, *looks[s.start : s.stop]) for s in sections]
    made: list[Fold] = []
    i = 0
    while i < len(keys):
        period, repeats = _best_period(keys, i)
        made.append(Fold(i, period, repeats))
        i += period * repeats
    return tuple(made)


def without_numbers(name: str) -> str:
    """A name that is the same in all layers."""
    return re.sub(r"[0-9]+", "#", name)


def _best_period(keys: Sequence[Hashable], start: int) -> tuple[int, int]:
    """The period and number of repeats that cover most; of several the shortest period."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, (len(keys) - start) // 2) + 1):
        repeats, pattern = 1, keys[start : start + period]
        while keys[start + repeats * period : start + (repeats + 1) * period] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
