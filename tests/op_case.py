"""One operation case: how its leafs are made, how it is computed and compared.

The cases themselves are in cases.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyggml.backend import Buffer, BufferType, alloc_tensors, tensor_get, tensor_set
from pyggml.backends.reference.memory import bytes_at, decode, encode
from pyggml.dtypes import GGMLType
from pyggml.graph import Graph, build_graph
from pyggml.ops import Op
from pyggml.params import OpParams
from pyggml.quants import CODECS, QUANTIZABLE
from pyggml.tensor import Tensor, new_tensor

Array = NDArray[Any]
F32, F16, BF16, I32, I64 = (
    *(GGMLType.F32, GGMLType.F16, GGMLType.BF16),
    *(GGMLType.I32, GGMLType.I64),
)


TABLED = 2e-7  # ggml looks GELU and GELU_QUICK up by F16 values
GARBAGE = 0xAA  # fills memory before a run
AGREES = 1e-12  # what real ggml keeps to elsewhere
ROUNDED = 1e-7  # ... with activations rounded to 8 bits: a tie may go the other way


def random_blocks(
    rng: np.random.Generator, type: GGMLType, n: int, low: float = 0.01, high: float = 0.1
) -> NDArray[np.uint8]:
    """Random bytes with scales in a range, for types without a quantizer."""
    layout = CODECS[type].layout
    blocks = np.frombuffer(rng.bytes(n * layout.itemsize), np.uint8).copy()
    records = blocks.view(layout)
    if type == GGMLType.IQ1_M:  # the scale's bits are the top nibbles of four words
        words = records["scales"].view("<u2").reshape(n, 4)
        d = (rng.uniform(low, high, n)).astype("<f2").view("<u2")
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | (d >> 4 * i & 15) << 12
    else:
        records["d"] = rng.uniform(low, high, n)
    return blocks


class Leafs:
    """Makes the leafs of a case and keeps what they are to hold."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.values: dict[Tensor, Array] = {}

    def given(self, values: Array, type: GGMLType = F32) -> Tensor:
        """A leaf of these values, [..., ne1, ne0]."""
        t = new_tensor(type, *values.shape[::-1], name=f"leaf{len(self.values)}")
        self.values[t] = encode(values, type)
        return t

    def __call__(self, *ne: int, type: GGMLType = F32, scale: float = 1.0) -> Tensor:
        """Uniform in [-scale, scale]."""
        shape = ne[::-1]
        if type in CODECS and type not in QUANTIZABLE:
            t = new_tensor(type, *ne)
            self.values[t] = random_blocks(self.rng, type, t.nbytes // type.type_size)
            return t
        return self.given((self.rng.uniform(-1, 1, shape) * scale).astype(np.float32), type)

    def ids(self, *ne: int, high: int, low: int = 0, type: GGMLType = I32) -> Tensor:
        """Integers of low...high-1."""
        return self.given(self.rng.integers(low, high, ne[::-1]), type)

    def distinct(self, *ne: int, high: int, type: GGMLType = I32) -> Tensor:
        """Integers below high, none twice in a row."""
        rows = [self.rng.permutation(high)[: ne[0]] for _ in range(int(np.prod(ne[1:])))]
        return self.given(np.array(rows).reshape(ne[::-1]), type)

    def shuffled(self, *ne: int) -> Tensor:
        """Rows without equal values."""
        rows = [self.rng.permutation(ne[0]) for _ in range(int(np.prod(ne[1:])))]
        return self.given(np.array(rows, np.float32).reshape(ne[::-1]) / ne[0])

    def mask(self, *ne: int, type: GGMLType = F16, window: int = 0) -> Tensor:
        """Causal: the last row sees all columns; `window`: only so many of them."""
        columns, rows = np.arange(ne[0]), np.arange(ne[1])[:, None] + ne[0] - ne[1]
        visible = (columns <= rows) & ((columns > rows - window) if window else True)
        values = np.where(visible, 0, -np.inf)
        distance = np.minimum(columns - rows, 0) * 0.01  # ALiBi's slopes multiply this
        return self.given(np.broadcast_to(values + distance, ne[::-1]).astype(np.float32), type)


Make = Callable[[Leafs], Tensor]


def node(op: Op, *src: Tensor, params: OpParams | None = None) -> Tensor:
    """A node like its first source, for operations without a builder."""
    return Tensor(src[0].type, src[0].ne, op=op, src=src, params=params)


@dataclass(frozen=True, slots=True)
class Case:
    """One node to compute, and how far backends may be from the reference (NMSE; 0: same bits)."""

    name: str
    build: Make = field(repr=False)
    tolerance: float = 1e-13  # the CPU backend: a few roundings of float32
    ggml: float = AGREES  # real ggml
    cpu: bool = True  # whether the CPU backend must have it
    missing: str = ""  # why real ggml is not asked
    since: str = ""  # the first version of ggml that has it
    unordered: bool = False  # rows are sets of indices

    def __str__(self) -> str:
        return self.name


class Computes(Protocol):
    """What a backend needs to run a case."""

    def graph_compute(self, graph: Graph) -> Any: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A case whose tensors lie in memory."""

    case: Case
    graph: Graph
    result: Tensor
    leafs: dict[Tensor, Array]
    buffer: Buffer | None  # None: all tensors are empty

    def reset(self) -> None:
        """Garbage everywhere, then the leafs' values."""
        if self.buffer is not None:
            self.buffer.clear(GARBAGE)
        for t, values in self.leafs.items():
            if t in self.graph.use_counts and t.nbytes:
                tensor_set(t, memoryview(values.tobytes()))

    def run(self, backend: Computes) -> Array:
        """Compute and give the values of the result: [ne3, ne2, ne1, ne0]."""
        self.reset()
        backend.graph_compute(self.graph)
        return read(self.result)

    def untouched(self) -> bool:
        """Whether the leafs (but one that the result views) and all gaps are as before."""
        if self.buffer is None:
            return True
        memory = bytes_at(self.buffer.base, self.buffer.size).copy()
        target = self.result.view_src
        for t in (*self.graph.leafs, *self.graph.nodes):
            if t.view_src is not None or not t.nbytes:
                continue
            assert t.data is not None
            place = memory[t.data - self.buffer.base :][: t.nbytes]
            if t in self.leafs and t is not target and place.tobytes() != self.leafs[t].tobytes():
                return False
            place[:] = GARBAGE
        return bool((memory == GARBAGE).all())


def place(case: Case, buft: BufferType) -> Placed:
    """Build a case and allocate it."""
    leafs = Leafs(zlib.crc32(case.name.encode()))
    result = case.build(leafs)
    graph = build_graph([result])
    buffer = alloc_tensors([*graph.leafs, *graph.nodes], buft)
    return Placed(case, graph, result, leafs.values, buffer)


def read(t: Tensor) -> Array:
    """The stored values of a tensor, gaps left out: [ne3, ne2, ne1, ne0] or rows of bytes."""
    raw = np.zeros(t.nbytes, np.uint8)
    tensor_get(t, memoryview(raw))
    if t.is_empty:
        return np.zeros(t.ne[::-1], np.float32)
    if t.type.info.numpy is None:
        shape, strides = (*t.ne[:0:-1], t.type.row_size(t.ne[0])), (*t.nb[:0:-1], 1)
        return np.lib.stride_tricks.as_strided(raw, shape, strides).copy()
    first = raw[: t.type.type_size].view(t.type.info.numpy)
    return np.lib.stride_tricks.as_strided(first, t.ne[::-1], t.nb[::-1]).copy()


def nmse(case: Case, got: Array, expected: Array, type: GGMLType) -> float:
    """Squared error over squared size; infinity if NaN or infinite values are elsewhere."""
    if case.unordered:
        got, expected = np.sort(got, axis=-1), np.sort(expected, axis=-1)
    if type not in (I32, I64):
        got, expected = decode(got, type), decode(expected, type)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    if a.shape != b.shape or not np.array_equal(
        np.where(np.isfinite(a), 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True
    ):
        return np.inf
    a, b = a[np.isfinite(a)], b[np.isfinite(a)]
    error, size = np.square(a - b).sum(), np.square(b).sum()
    return float(error / size) if size else float(error)
