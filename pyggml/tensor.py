"""Tensors: type, shape, strides and where they come from; no data and no arithmetic.

Shapes are in ggml's order: ne[0] is the fastest dimension, nb are byte strides, always four.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from pyggml.dtypes import GGMLType
from pyggml.ops import OPS, Op, TensorFlag
from pyggml.params import GluParams, OpParams, UnaryParams

if TYPE_CHECKING:
    from pyggml.backend import Buffer

Shape = tuple[int, int, int, int]
MAX_SRC = 10
_NO_FLAGS = TensorFlag(0)


def padded(ne: tuple[int, ...]) -> Shape:
    """The shape with missing dimensions set to 1."""
    return (*ne, 1, 1, 1, 1)[:4]  # type: ignore[return-value]  # the slice always has four items


def dense_strides(type: GGMLType, ne: Shape) -> Shape:
    """Byte strides of a packed tensor."""
    nb1 = type.row_size(ne[0])
    return type.type_size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2]


class Tensor:
    """One node or leaf of a graph; compared and hashed by identity."""

    __slots__ = (
        "buffer",
        "data",
        "extra",
        "flags",
        "name",
        "nb",
        "ne",
        "op",
        "params",
        "src",
        "type",
        "view_offs",
        "view_src",
    )

    def __init__(
        self,
        type: GGMLType,
        ne: Shape,
        nb: Shape | None = None,
        *,
        op: Op = Op.NONE,
        src: tuple[Tensor | None, ...] = (),
        params: OpParams | None = None,
        name: str = "",
    ) -> None:
        self.type = type
        self.ne = ne
        self.nb = nb if nb is not None else dense_strides(type, ne)
        self.op = op
        self.src: list[Tensor | None] = list(src)
        self.params = params
        self.flags = _NO_FLAGS
        self.name = name
        self.view_src: Tensor | None = None  # always the root: a view of a view is collapsed
        self.view_offs = 0
        self.buffer: Buffer | None = None
        self.data: int | None = None  # address, once allocated
        self.extra: object = None  # private to the backend that owns the buffer

    # ------------------------------------------------------------ derived quantities
    @property
    def nelements(self) -> int:
        return prod(self.ne)

    @property
    def nrows(self) -> int:
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps included; 0 for an empty tensor."""
        ne, nb = self.ne, self.nb
        if min(ne) <= 0:
            return 0
        block = self.type.block_size
        first = self.type.type_size + (ne[0] - 1) * nb[0] if block == 1 else ne[0] * nb[0] // block
        return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]

    @property
    def n_dims(self) -> int:
        return next((i + 1 for i in (3, 2, 1) if self.ne[i] > 1), 1)

    @property
    def is_empty(self) -> bool:
        return min(self.ne) == 0

    @property
    def is_view(self) -> bool:
        return self.view_src is not None

    @property
    def is_view_op(self) -> bool:
        return OPS[self.op].is_view

    @property
    def is_transposed(self) -> bool:
        return self.nb[0] > self.nb[1]

    @property
    def is_permuted(self) -> bool:
        nb = self.nb
        return nb[0] > nb[1] or nb[1] > nb[2] or nb[2] > nb[3]

    def is_contiguous_n(self, padded_dims: int, n: int = 4) -> bool:
        """Packed in its first n dimensions; dimensions 1..padded_dims may have gaps."""
        block = self.type.block_size
        expected = self.type.type_size
        if self.ne[0] != block and self.nb[0] != expected:
            return False
        expected *= self.ne[0] // block
        for i in range(1, n):
            if i > padded_dims:
                if self.ne[i] != 1 and self.nb[i] != expected:
                    return False
                expected *= self.ne[i]
            else:
                expected = self.ne[i] * self.nb[i]
        return True

    @property
    def is_contiguous(self) -> bool:
        return self.is_contiguous_n(0)

    @property
    def has_contiguous_rows(self) -> bool:
        return self.ne[0] == self.type.block_size or self.nb[0] == self.type.type_size

    @property
    def op_desc(self) -> str:
        """The operation's name, or the sub-operation's for UNARY and GLU."""
        if isinstance(self.params, UnaryParams | GluParams):
            return self.params.op.name
        return self.op.name

    def same_shape(self, other: Tensor) -> bool:
        return self.ne == other.ne

    def same_layout(self, other: Tensor) -> bool:
        return self.type == other.type and self.ne == other.ne and self.nb == other.nb

    def can_repeat_to(self, other: Tensor) -> bool:
        """Whether tiling this tensor gives the other's shape."""
        if self.is_empty:
            return other.is_empty
        return all(b % a == 0 for a, b in zip(self.ne, other.ne, strict=True))

    # ------------------------------------------------------------ marks
    def named(self, name: str) -> Tensor:
        """Set the name (63 bytes at most, as ggml) and return the tensor."""
        short = len(name) < 64 and name.isascii()
        self.name = name if short else name.encode()[:63].decode(errors="ignore")
        return self

    def as_input(self) -> Tensor:
        """Mark a leaf as a graph input: allocated first, lives on the last backend."""
        assert self.op == Op.NONE, f"{self!r} is computed: it cannot be an input"
        self.flags |= TensorFlag.INPUT
        return self

    def as_output(self) -> Tensor:
        """Mark as an output: its memory, and that of what it views, is never reused."""
        self.flags |= TensorFlag.OUTPUT
        if self.view_src is not None:
            self.view_src.flags |= TensorFlag.OUTPUT
        return self

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.ne[: self.n_dims]))
        return f"<{self.name or 'tensor'}: {self.op_desc} {self.type.label} [{shape}]>"


def new_tensor(type: GGMLType, *ne: int, name: str = "") -> Tensor:
    """A fresh packed leaf of one to four dimensions."""
    return Tensor(type, padded(ne)).named(name)
