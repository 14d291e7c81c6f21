"""Operations that read indices: which of their sources holds them, and which indices there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml.errors import IdError
from pyggml.ops import Op
from pyggml.tensor import Tensor

ABSENT = -1  # "no expert": that row is left as it is


@dataclass(frozen=True, slots=True)
class _Use:
    """Places of the ids and of the table they look into among an operation's sources."""

    ids: int
    table: int
    dim: int = 1  # of the table
    noun: str = "row"
    absent: bool = False  # whether ABSENT is an answer


_EXPERTS = _Use(2, 0, dim=2, noun="expert", absent=True)
_USES: dict[Op, _Use] = {
    Op.GET_ROWS: _Use(ids=1, table=0),
    Op.SET_ROWS: _Use(ids=1, table=2),
    Op.ADD_ID: _Use(ids=2, table=1, absent=True),
    Op.MUL_MAT_ID: _EXPERTS,
    Op.MUL_MAT_ID_COLD: _EXPERTS,
}


@dataclass(frozen=True, slots=True)
class IdsUse:
    """What a node's ids may be, in words that outlive its tensors."""

    node: str
    ids: str
    table: str
    noun: str
    count: int
    absent: bool

    def error(self, id: int) -> IdError:
        """What to raise for an id that names nothing."""
        there = f"0 to {self.count - 1}" if self.count else "none"
        return IdError(
            f"{self.node}: {self.ids} asks for {self.noun} {id}, which {self.table} does not have\n"
            f"there are {there}{', and -1 means no ' + self.noun if self.absent else ''}"
        )


def ids_use(node: Tensor) -> IdsUse | None:
    """How a node uses ids; None: not at all."""
    use = _USES.get(node.op)
    if use is None:
        return None
    ids, table = ids_of(node), node.src[use.table]
    assert table is not None
    name, count = f"{node.op.name} {node.name}", table.ne[use.dim]
    return IdsUse(name, ids.name, table.name, use.noun, count, use.absent)


def ids_of(node: Tensor) -> Tensor:
    """The source that holds a node's ids."""
    ids = node.src[_USES[node.op].ids]
    assert ids is not None
    return ids


def check_ids(node: Tensor, ids: NDArray[np.integer[Any]]) -> None:
    """Raises IdError if one of a node's ids names nothing."""
    use = ids_use(node)
    assert use is not None, f"{node!r} has no ids"
    lowest = ABSENT if use.absent else 0
    wrong = ids[(ids < lowest) | (ids >= use.count)]
    if wrong.size:
        raise use.error(int(wrong.flat[0]))
