"""Batches: what they hold, what they refuse, how they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml.llama.batch import Batch, BatchError


def batch(pos: list[int], seq_ids: list[tuple[int, ...]], tokens: list[int] | None = None) -> Batch:
    n = len(pos)
    ids = np.array(tokens or [0] * n, np.int32)
    return Batch(ids, np.array(pos, np.int32), tuple(seq_ids), np.ones(n, np.bool_))


# ---------------------------------------------------------------- one sequence
@pytest.mark.parametrize(("logits", "wanted"), [("last", [2]), ("all", [0, 1, 2]), ("none", [])])
def test_one_sequence(logits: str, wanted: list[int]) -> None:
    b = Batch.of([5, 6, 7], 10, seq=2, logits=logits)  # type: ignore[arg-type]  # one of three
    assert b.tokens.tolist() == [5, 6, 7] and b.pos.tolist() == [10, 11, 12]
    assert b.seq_ids == ((2,),) * 3 and b.n_tokens == 3
    assert np.flatnonzero(b.wants_logits).tolist() == wanted


def test_an_empty_batch_can_be_made_but_not_decoded() -> None:
    b = Batch.of([], 0)
    assert b.n_tokens == 0
    with pytest.raises(BatchError, match="empty"):
        b.check(10, 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2**40], r"token 1 of the batch is 1099511627776"),
        ([-(2**33)], r"token 0 of the batch is -8589934592"),
        ([1.5], "integers, not float64"),
        ([True], "integers, not bool"),
        ([[1], [2]], "one row of integers"),
        ([10**30], "integers, not object"),
        (["1"], "integers"),
    ],
)
def test_tokens_that_are_no_ids(tokens: list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Batch.of(tokens, 0)


def test_parts_of_different_length_are_refused() -> None:
    with pytest.raises(BatchError, match=r"differ in length: \[1, 2\]"):
        Batch(np.zeros(2, np.int32), np.zeros(1, np.int32), ((0,),) * 2, np.ones(2, np.bool_))


# ---------------------------------------------------------------- checks
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch([0, 1], [(0,), (0,)], [3, 10]), "token 1 of the batch is 10: ids are 0..9"),
        (batch([0], [(0,)], [-1]), "token 0 of the batch is -1"),
        (batch([-1], [(0,)]), "token 0 of the batch has position -1"),
        (batch([2**31 - 1], [(0,)]), "token 0 of the batch has position 2147483647"),
        (batch([0, 0], [(0,), (2,)]), r"token 1 of the batch has sequences \(2,\): they are 0..1"),
        (batch([0], [(-1,)]), r"sequences \(-1,\)"),
        (batch([0], [()]), r"sequences \(\)"),
    ],
)
def test_what_cannot_be_is_named(bad: Batch, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        bad.check(n_vocab=10, n_seq_max=2)


@pytest.mark.parametrize(
    ("pos", "seq_ids"),
    [
        ([5, 6], [(0,), (0,)]),
        ([7, 8], [(1,), (1,)]),  # an empty sequence may start anywhere
        ([5, 0, 6, 1], [(0,), (1,), (0,), (1,)]),
        ([5], [(0, 1)]),
        ([5], [(0, 0)]),
    ],
)
def test_sequences_that_go_on(pos: list[int], seq_ids: list[tuple[int, ...]]) -> None:
    batch(pos, seq_ids).follows({0: 4, 1: -1}.__getitem__)


@pytest.mark.parametrize(
    ("pos", "seq_ids", "message"),
    [
        ([4], [(0,)], "sequence 0: position 4 follows 4"),
        ([6], [(0,)], "sequence 0: position 6 follows 4"),
        ([5, 7], [(0,), (0,)], "sequence 0: position 7 follows 5"),
        ([5, 5], [(0,), (0,)], "sequence 0: position 5 follows 5"),
        ([3, 5], [(1,), (1,)], "sequence 1: position 5 follows 3"),
        ([0], [(1, 0)], "sequence 0: position 0 follows 4"),
    ],
)
def test_gaps_and_repetitions(pos: list[int], seq_ids: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch(pos, seq_ids).follows({0: 4, 1: -1}.__getitem__)


@pytest.mark.parametrize(
    "seq_ids",
    [
        [(0,), (1,)],
        [(0, 1), (0, 1)],
        [(0, 1), (0,), (1,)],  # they part
        [(2,), (0, 1)],
    ],
)
def test_sequences_with_one_past_may_share_tokens(seq_ids: list[tuple[int, ...]]) -> None:
    batch(list(range(len(seq_ids))), seq_ids).check_shared({0: "a", 1: "a", 2: "b"}.__getitem__)


@pytest.mark.parametrize(
    "seq_ids",
    [
        [(0, 2)],  # they differ in memory
        [(0,), (0, 1)],  # they differ by a token of the batch
        [(0, 1), (0,), (1,), (0, 1)],
        [(0, 1), (0, 1, 2)],
    ],
)
def test_others_may_not(seq_ids: list[tuple[int, ...]]) -> None:
    with pytest.raises(BatchError, match="whose earlier tokens differ"):
        batch(list(range(len(seq_ids))), seq_ids).check_shared({0: "a", 1: "a", 2: "b"}.__getitem__)


def test_the_past_is_not_asked_for_without_need() -> None:
    nothing: dict[int, str] = {}
    batch([0, 0], [(0,), (1,)]).check_shared(nothing.__getitem__)


# ---------------------------------------------------------------- ubatches
@pytest.mark.parametrize(("n_ubatch", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_ubatches_are_runs_in_order(n_ubatch: int, sizes: list[int]) -> None:
    wants = np.array([True, False, False, True, True])
    whole = Batch(
        np.arange(5, dtype=np.int32),
        np.arange(5, 10, dtype=np.int32),
        ((0,), (1,), (0,), (1,), (0,)),
        wants,
    )
    parts = list(whole.split(n_ubatch))
    assert [p.n_tokens for p in parts] == sizes
    assert np.concatenate([p.tokens for p in parts]).tolist() == [0, 1, 2, 3, 4]
    assert np.concatenate([p.pos for p in parts]).tolist() == [5, 6, 7, 8, 9]
    assert sum((p.seq_ids for p in parts), ()) == whole.seq_ids
    starts = np.cumsum([0, *sizes])
    outputs = [int(i + start) for p, start in zip(parts, starts, strict=False) for i in p.outputs]
    assert outputs == [0, 3, 4]
