"""Cells of a KV cache: the rules one by one, and random operations beside a naive model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.llama.kv_cells import Cells

ALL = 1 << 30


def put(cells: Cells, pos: Sequence[int], *seqs: int, n_swa: int = 0) -> list[int]:
    """Write tokens of one set of sequences where find_slot says; the cells."""
    slot = cells.find_slot(len(pos), n_swa)
    assert slot is not None
    cells.occupy(slot, np.array(pos, np.int32), [seqs] * len(pos))
    return [int(i) for i in slot]


def positions(cells: Cells, seq: int) -> list[int]:
    return sorted(int(p) for p in cells.pos[cells.seq[seq]])


# ---------------------------------------------------------------- slots
def test_cells_are_taken_in_order_and_found_again_after_a_hole() -> None:
    cells = Cells(8, 1)
    assert put(cells, range(6), 0) == [0, 1, 2, 3, 4, 5]
    cells.remove(0, 4, ALL)
    assert cells.head == 4
    assert put(cells, [4], 0) == [4]


def test_a_slot_may_have_gaps_and_wrap() -> None:
    cells = Cells(8, 2)
    put(cells, range(8), 0)
    cells.seq[1, [1, 3, 6]] = True  # shared cells survive
    cells.remove(0, 0, ALL)
    cells.head = 5
    assert put(cells, range(5), 0) == [5, 7, 0, 2, 4]


def test_the_search_starts_over_when_much_is_free_before_the_head() -> None:
    cells = Cells(16, 1)
    put(cells, range(8), 0)
    cells.remove(0, 1, ALL)
    cells.head = 4  # > 1 used + 2 * 1
    assert put(cells, [1], 0) == [1]
    cells.head = 4  # == 2 used + 2 * 1
    assert put(cells, [2], 0) == [4]


def test_no_slot_when_too_few_cells_are_free() -> None:
    cells = Cells(4, 1)
    put(cells, range(3), 0)
    assert cells.find_slot(2) is None
    assert cells.find_slot(5) is None
    assert cells.find_slot(1) is not None


def test_a_window_frees_what_it_has_left_behind() -> None:
    cells = Cells(4, 1)
    put(cells, range(4), 0, n_swa=3)
    # the next position is 4: it sees 2, 3 and itself
    assert put(cells, [4, 5], 0, n_swa=3) == [0, 1]
    assert positions(cells, 0) == [2, 3, 4, 5]
    assert cells.find_slot(3, 3) is None


def test_losing_a_position_loses_those_before_it() -> None:
    cells = Cells(8, 1)
    put(cells, range(8), 0)
    cells.head = 3
    assert put(cells, [8], 0, n_swa=2) == [3]  # held position 3
    assert positions(cells, 0) == [4, 5, 6, 7, 8]


def test_shared_cells_are_not_reused_by_a_window() -> None:
    cells = Cells(4, 2)
    put(cells, range(4), 0, 1, n_swa=2)
    assert cells.find_slot(1, 2) is None


# ---------------------------------------------------------------- sequence operations
def test_a_copy_shares_cells_until_both_let_go() -> None:
    cells = Cells(8, 2)
    put(cells, range(4), 0)
    cells.copy(0, 1, 1, 3)
    assert positions(cells, 1) == [1, 2]
    cells.remove(0, 0, ALL)
    assert cells.n_used == 2 and positions(cells, 1) == [1, 2]
    cells.remove(1, 0, ALL)
    assert cells.n_used == 0


def test_remove_of_all_sequences_and_keep() -> None:
    cells = Cells(8, 3)
    put(cells, range(2), 0)
    put(cells, range(3), 1)
    put(cells, range(2), 2)
    cells.remove(-1, 1, 2)
    assert [positions(cells, s) for s in range(3)] == [[0], [0, 2], [0]]
    cells.keep(1)
    assert [positions(cells, s) for s in range(3)] == [[], [0, 2], []]


def test_moved_positions_are_remembered_until_the_keys_follow() -> None:
    cells = Cells(8, 1)
    put(cells, range(6), 0)
    cells.remove(0, 1, 3)
    cells.add(0, 3, ALL, -2)
    assert positions(cells, 0) == [0, 1, 2, 3]
    assert cells.shift.tolist() == [0, 0, 0, -2, -2, -2, 0, 0]
    assert cells.has_shift


def test_positions_below_zero_are_freed() -> None:
    cells = Cells(8, 1)
    put(cells, range(4), 0)
    cells.add(0, 0, ALL, -2)
    assert positions(cells, 0) == [0, 1]
    assert cells.head == 0 and cells.shift.tolist() == [0, 0, -2, -2, 0, 0, 0, 0]


def test_positions_can_be_divided() -> None:
    cells = Cells(8, 1)
    put(cells, range(6), 0)
    cells.divide(0, 2, ALL, 2)
    assert positions(cells, 0) == [0, 1, 1, 1, 2, 2]
    assert cells.shift.tolist() == [0, 0, -1, -2, -2, -3, 0, 0]


def test_a_clone_is_independent() -> None:
    cells = Cells(4, 1)
    put(cells, range(2), 0)
    twin = cells.clone()
    put(twin, [2, 3], 0)
    assert positions(cells, 0) == [0, 1] and cells.head == 2
    assert positions(twin, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("held", "n", "n_swa", "can"),
    [
        (range(5), 5, 0, True),
        (range(5), 4, 0, False),  # something lies beyond
        (range(5), 6, 0, False),
        (range(1, 5), 5, 0, False),
        ([0, 1, 3, 4], 5, 0, False),
        ([0, 1, 3, 4], 5, 3, True),  # position 5 sees 3, 4 and itself
        (range(3, 5), 5, 3, True),
        (range(4, 5), 5, 3, False),
        ([], 0, 3, True),
        ([], 1, 0, False),
        ([], 3, 1, True),
        ([0], 0, 3, False),
    ],
)
def test_whether_a_sequence_can_go_on(held: Sequence[int], n: int, n_swa: int, can: bool) -> None:
    cells = Cells(8, 2)
    put(cells, list(held), 0)
    put(cells, [9], 1)
    assert cells.can_continue(0, n, n_swa) is can


# ---------------------------------------------------------------- beside a naive model
@dataclass
class Cell:
    pos: int
    shift: int
    seqs: set[int]


@dataclass
class Naive:
    """The rules of llama.cpp's unified cache, cell by cell."""

    size: int
    cells: dict[int, Cell] = field(default_factory=dict)
    head: int = 0

    def find_slot(self, n: int, n_swa: int) -> list[int] | None:
        start = 0 if self.head > len(self.cells) + 2 * n or self.head >= self.size else self.head
        found: list[int] = []
        for step in range(self.size):
            i = (start + step) % self.size
            if self.is_free(i, n_swa) and len(found) < n:
                found.append(i)
        return found if len(found) == n else None

    def is_free(self, i: int, n_swa: int) -> bool:
        if i not in self.cells:
            return True
        if not n_swa or len(self.cells[i].seqs) != 1:
            return False
        (seq,) = self.cells[i].seqs
        last = max(c.pos for c in self.cells.values() if seq in c.seqs)
        return last + 1 - self.cells[i].pos >= n_swa

    def occupy(self, slot: list[int], pos: list[int], seqs: list[tuple[int, ...]]) -> None:
        lost: dict[int, int] = {}
        for i in slot:
            for seq in self.cells[i].seqs if i in self.cells else ():
                lost[seq] = max(lost.get(seq, -1), self.cells[i].pos)
        for seq, p in lost.items():
            self.remove(seq, 0, p + 1)
        for i, p, ids in zip(slot, pos, seqs, strict=True):
            self.cells[i] = Cell(p, 0, set(ids))
        self.head = slot[-1] + 1

    def drop(self, gone: list[int]) -> None:
        for i in gone:
            del self.cells[i]

    def remove(self, seq: int, p0: int, p1: int) -> None:
        for cell in self.cells.values():
            if p0 <= cell.pos < p1:
                cell.seqs -= cell.seqs if seq < 0 else {seq}
        gone = [i for i, c in self.cells.items() if not c.seqs]
        self.drop(gone)
        self.head = min([self.head, *gone])

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        for cell in self.cells.values():
            if src in cell.seqs and p0 <= cell.pos < p1:
                cell.seqs.add(dst)

    def keep(self, seq: int) -> None:
        for cell in self.cells.values():
            cell.seqs &= {seq}
        self.remove(seq, 0, 0)

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if delta == 0:
            return
        for cell in self.cells.values():
            if seq in cell.seqs and p0 <= cell.pos < p1:
                cell.pos += delta
                cell.shift += delta
        gone = [i for i, c in self.cells.items() if c.pos < 0]
        self.drop(gone)
        self.head = min(gone, default=0)

    def divide(self, seq: int, p0: int, p1: int, d: int) -> None:
        for cell in self.cells.values():
            if seq in cell.seqs and p0 <= cell.pos < p1:
                cell.shift += cell.pos // d - cell.pos
                cell.pos //= d


def check_equal(cells: Cells, naive: Naive) -> None:
    found = {
        int(i): Cell(int(cells.pos[i]), int(cells.shift[i]), set(np.flatnonzero(cells.seq[:, i])))
        for i in np.flatnonzero(cells.pos >= 0)
    }
    assert found == naive.cells
    empty = cells.pos < 0
    assert not cells.seq[:, empty].any() and not cells.shift[empty].any()
    assert cells.head == naive.head
    assert cells.n_used == len(naive.cells)
    assert cells.last_used() == max(naive.cells, default=-1)
    for seq in range(cells.n_seq_max):
        held = [c.pos for c in naive.cells.values() if seq in c.seqs]
        assert cells.pos_min(seq) == min(held, default=-1)
        assert cells.pos_max(seq) == max(held, default=-1)


N_SEQ = 3
seq = st.integers(0, N_SEQ - 1)
place = st.integers(0, 12)
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.sets(seq, min_size=1), min_size=1, max_size=6)),
    st.tuples(st.just("remove"), st.integers(-1, N_SEQ - 1), place, place),
    st.tuples(st.just("copy"), seq, seq, place, place),
    st.tuples(st.just("keep"), seq),
    st.tuples(st.just("add"), seq, place, place, st.integers(-4, 4)),
    st.tuples(st.just("divide"), seq, place, place, st.integers(1, 3)),
)


@settings(deadline=None, max_examples=300)
@given(
    size=st.integers(1, 12),
    n_swa=st.sampled_from([0, 1, 3]),
    operations=st.lists(OPERATIONS, max_size=25),
)
def test_any_sequence_of_operations(
    size: int, n_swa: int, operations: list[tuple[object, ...]]
) -> None:
    cells, naive = Cells(size, N_SEQ), Naive(size)
    for name, *arguments in operations:
        if name == "put":
            (sets,) = arguments
            ids = [tuple(sorted(s)) for s in sets]  # type: ignore[attr-defined]  # list of sets
            pos = [1 + max(cells.pos_max(s) for s in each) + i for i, each in enumerate(ids)]
            slot = cells.find_slot(len(ids), n_swa)
            expected = naive.find_slot(len(ids), n_swa)
            assert (None if slot is None else slot.tolist()) == expected
            if slot is not None and expected is not None:
                cells.occupy(slot, np.array(pos, np.int32), ids)
                naive.occupy(expected, pos, ids)
        else:
            getattr(cells, str(name))(*arguments)
            getattr(naive, str(name))(*arguments)
        check_equal(cells, naive)
