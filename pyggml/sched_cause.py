"""The scheduler's short words for why a tensor is where it is, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyggml.backend import buffer_of, is_weight
from pyggml.ops import Op
from pyggml.tensor import Tensor

_WEIGHT = "1.wgt"


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, its sources before copies took their place, and the name of its backend."""

    tensor: Tensor
    sources: Sequence[Tensor | None]
    backend: str

    @property
    def where(self) -> str:
        """The kind of memory that it lies in."""
        return _where(self.tensor)


def reason_of(placed: Placed, cause: str) -> str:
    """Why a tensor is on its backend; an unknown word stands for itself."""
    if cause.startswith(_WEIGHT):
        return _by_weight(placed, int(cause.removeprefix(_WEIGHT)))
    sentence = _SENTENCES.get(cause)
    return sentence(placed) if sentence else cause


def _where(tensor: Tensor) -> str:
    buffer = buffer_of(tensor)
    return buffer.name if buffer is not None else "memory to be allocated"


def _used_by(p: Placed, tensor: Tensor) -> str:
    """What its memory's name does not tell."""
    return "" if _where(tensor) == p.backend else f", memory that {p.backend} uses"


def _by_weight(p: Placed, slot: int) -> str:
    weight = p.sources[slot]
    assert weight is not None, f"{p.tensor!r} has no source {slot}"
    return f"its weight {weight.name} lies in {_where(weight)}{_used_by(p, weight)}"


def _offloaded(p: Placed) -> str:
    weight = next(src for src in p.sources if src is not None and is_weight(src))
    return (
        f"its weight {weight.name} lies in {_where(weight)}, but there are enough tokens that "
        f"copying it to {p.backend} pays"
    )


def _by_memory(p: Placed) -> str:
    root = p.tensor.view_src
    if root is not None:
        return f"it is part of {root.name}, which lies in {p.where}{_used_by(p, root)}"
    return f"it lies in {p.where}{_used_by(p, p.tensor)}"


def _view(p: Placed) -> str:
    root = p.tensor.view_src
    return f"a view: it stays with {root.name if root is not None else 'its source'}"


def _undecided(p: Placed) -> str:
    if p.tensor.op == Op.NONE:
        return f"no node needs it: it counts as one of {p.backend}"
    return f"nothing else decided: {p.backend} is the first that can run it"


_SENTENCES: dict[str, Callable[[Placed], str]] = {
    "usr": lambda p: f"the program asked for {p.backend}",
    "1.dst": _by_memory,
    "1.vsrc": _by_memory,
    "1.inp": lambda p: f"a graph input: the program writes it in memory of {p.backend}",
    "1.off": _offloaded,
    "1.back": lambda p: (
        f"it writes to memory where no device can run it: {p.backend} does, on a copy that is "
        "copied back"
    ),
    "2.sup": lambda p: f"its neighbours in the graph run on {p.backend}, which can run it too",
    "3.best": lambda p: (
        f"no neighbour decided: {p.backend} reads most of its sources where they are"
    ),
    "3.upg": lambda p: (
        f"{p.backend} uses the same memory and comes before the backend chosen first"
    ),
    "4.vsrc": _view,
    "4.cur": lambda p: f"the first node that reads it runs on {p.backend}",
    "": _undecided,
}
