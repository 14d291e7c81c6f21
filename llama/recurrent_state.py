"""Recurrent state: what a layer without keys and values keeps of a sequence, however long it is.

A cell holds the state of one sequence, or of several that have had the same tokens so far. Unlike
a KV cache it cannot forget the last tokens, since it does not hold those before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml import build
from pyggml.backend import tensor_set
from pyggml.dtypes import GGMLType
from pyggml.llama.batch import Ubatch
from pyggml.llama.hparams import DeltaNet
from pyggml.llama.kv_cells import EMPTY, IntArray
from pyggml.llama.memory_part import MemoryPart
from pyggml.tensor import Tensor, new_tensor


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """For each sequence of a ubatch the cells to read and to write."""

    source: IntArray
    target: IntArray
    is_new: npt.NDArray[np.bool_]  # nothing is known yet: the state to read must be zero


class StateCells:
    """Which cell holds the state of each sequence, and after which position. No tensors."""

    def __init__(self, n_seq_max: int) -> None:
        self.cell: IntArray = np.full(n_seq_max, EMPTY, np.int32)
        self.pos: IntArray = np.full(n_seq_max, EMPTY, np.int32)

    def clone(self) -> StateCells:
        """An independent copy."""
        twin = copy.copy(self)
        twin.cell, twin.pos = self.cell.copy(), self.pos.copy()
        return twin

    def occupy(self, seq_ids: Sequence[tuple[int, ...]], last: Sequence[int]) -> StatePlaces:
        """Go on with sets of sequences up to the positions `last`.

        A state that others share stays as it is: the new one gets a cell of its own. There is
        always one, since there are as many cells as sequences.
        """
        source, target, is_new = [], [], []
        for ids, pos in zip(seq_ids, last, strict=True):
            mine = list(set(ids))
            old = int(self.cell[mine[0]])
            self.cell[mine] = EMPTY
            new = old
            if old == EMPTY or (self.cell == old).any():
                new = int(np.setdiff1d(np.arange(len(self.cell)), self.cell)[0])
            self.cell[mine], self.pos[mine] = new, pos
            source.append(new if old == EMPTY else old)
            target.append(new)
            is_new.append(old == EMPTY)
        return StatePlaces(
            np.array(source, np.int32), np.array(target, np.int32), np.array(is_new, np.bool_)
        )

    # ------------------------------------------------------------ sequence operations
    def can_remove(self, seq: int, p0: int, p1: int) -> bool:
        """Whether the states of a sequence (-1: of all) stay or go as a whole.

        Positions that the state has left behind may go: it stays what they made of it.
        """
        pos = self.pos if seq < 0 else self.pos[[seq]]
        return not ((p0 > 0) & (pos >= p0) & (pos < p1)).any()

    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Forget the sequences (-1: all) whose last position lies in p0..p1-1."""
        gone = (self.pos >= p0) & (self.pos < p1)
        if seq >= 0:
            gone &= np.arange(len(self.pos)) == seq
        self._forget(gone)

    def copy(self, src: int, dst: int) -> None:
        """Let `dst` share the state of `src`; what it had is gone."""
        self.cell[dst], self.pos[dst] = self.cell[src], self.pos[src]

    def keep(self, seq: int) -> None:
        """Forget every other sequence."""
        self._forget(np.arange(len(self.pos)) != seq)

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move the last position."""
        if p0 <= self.pos[seq] < p1:
            self.pos[seq] += delta

    def divide(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide the last position."""
        if p0 <= self.pos[seq] < p1:
            self.pos[seq] //= d

    def clear(self) -> None:
        """Forget everything."""
        self._forget(np.ones(len(self.pos), np.bool_))

    def _forget(self, seqs: npt.NDArray[np.bool_]) -> None:
        self.cell[seqs] = self.pos[seqs] = EMPTY


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Leafs that say which cells a graph reads and writes, I32."""

    r_source: Tensor  # [n_seqs]: rows of the convolution's past
    r_target: Tensor
    s_source: Tensor  # [n_head * n_seqs]: rows of the states, one per head
    s_target: Tensor


class RecurrentState(MemoryPart):
    """States of some layers, F32. It has no memory until `allocate`.

    `r` [(n_kernel - 1) * n_channels, n_cells] holds the latest inputs of the convolution, `s`
    [n * n * n_head, n_cells] what the delta rule has learned.
    """

    def __init__(self, shape: DeltaNet, layers: Sequence[int], n_seq_max: int) -> None:
        self.shape = shape
        self.layers = tuple(layers)
        self.cells = StateCells(n_seq_max)
        n_r = (shape.n_kernel - 1) * shape.n_channels
        n_s = shape.n * shape.n * shape.n_head
        f32 = GGMLType.F32
        self.r = {il: new_tensor(f32, n_r, n_seq_max, name=f"cache_r_l{il}") for il in layers}
        self.s = {il: new_tensor(f32, n_s, n_seq_max, name=f"cache_s_l{il}") for il in layers}

    @property
    def by_layer(self) -> Sequence[tuple[int, Tensor]]:
        return (*self.r.items(), *self.s.items())

    # ------------------------------------------------------------ graph parts
    def inputs(self, n_seqs: int) -> StateInputs:
        """New input leafs for a graph."""

        def leaf(name: str, n: int) -> Tensor:
            return new_tensor(GGMLType.I32, n, name=f"inp_rs_{name}").as_input()

        n = n_seqs * self.shape.n_head
        return StateInputs(
            *(leaf(f"r_{side}", n_seqs) for side in ("source", "target")),
            *(leaf(f"s_{side}", n) for side in ("source", "target")),
        )

    # The only cell of a memory for one sequence is read where it lies: a graph writes a cell after
    # everything that is made of it.

    def past_inputs(self, il: int, inputs: StateInputs) -> Tensor:
        """[n_kernel - 1, n_channels, n_seqs]"""
        r = self.r[il]
        rows = r if r.ne[1] == 1 else build.get_rows(r, inputs.r_source)
        return build.reshape(rows, self.shape.n_kernel - 1, self.shape.n_channels, rows.ne[1])

    def store_inputs(self, il: int, x: Tensor, inputs: StateInputs) -> Tensor:
        """Write [n_kernel - 1, n_channels, n_seqs], any strides."""
        rows = build.cont(x, x.ne[0] * x.ne[1], x.ne[2])
        return build.set_rows(self.r[il], rows, inputs.r_target)

    # A head is a row: with one sequence there is still work for all threads.

    def states(self, il: int, inputs: StateInputs) -> Tensor:
        """[n, n, n_head, n_seqs]"""
        n, n_head = self.shape.n, self.shape.n_head
        rows = self._heads(il)
        if rows.ne[1] > n_head:
            rows = build.get_rows(rows, inputs.s_source)
        return build.reshape(rows, n, n, n_head, rows.ne[1] // n_head)

    def store_states(self, il: int, states: Tensor, inputs: StateInputs) -> Tensor:
        """Write [n, n, n_head, n_seqs], packed."""
        n, _, n_head, n_seqs = states.ne
        rows = build.view(states, (n * n, n_head * n_seqs))
        return build.set_rows(self._heads(il), rows, inputs.s_target)

    def _heads(self, il: int) -> Tensor:
        s, n, n_head = self.s[il], self.shape.n, self.shape.n_head
        return build.reshape(s, n * n, n_head * s.ne[1])

    # ------------------------------------------------------------ one ubatch
    def begin(self, ubatch: Ubatch) -> StatePlaces:
        """Take cells for a ubatch of equally long sequences; new sequences begin with zeros."""
        n = ubatch.n_tokens // ubatch.n_seqs
        places = self.cells.occupy(ubatch.seq_ids[::n], ubatch.pos[n - 1 :: n].tolist())
        for cell in places.target[places.is_new].tolist():
            for t in self.tensors:
                tensor_set(t, memoryview(bytes(t.nb[1])), cell * t.nb[1])
        return places

    def rows(self, inputs: StateInputs, places: StatePlaces) -> tuple[tuple[Tensor, IntArray], ...]:
        """What to fill the leafs with."""
        return (
            (inputs.r_source, places.source),
            (inputs.r_target, places.target),
            (inputs.s_source, self._heads_of(places.source)),
            (inputs.s_target, self._heads_of(places.target)),
        )

    def _heads_of(self, cells: IntArray) -> IntArray:
        """Rows of the states: [n_head * n_seqs]."""
        n_head = self.shape.n_head
        rows = cells[:, None] * n_head + np.arange(n_head, dtype=np.int32)
        return rows.reshape(-1).astype(np.int32)
