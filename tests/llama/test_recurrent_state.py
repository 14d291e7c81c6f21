"""Recurrent states: which cell is whose, what cannot be removed, and batches of many sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import LlamaCpp
from tiny import write_tiny
from tiny_llama import Breaking, context_of, keys, metadata, run, tiny_model

from pyggml.backends.reference.device import RefDevice
from pyggml.errors import ModelError, UserError
from pyggml.llama.architectures import find
from pyggml.llama.batch import Batch, BatchError
from pyggml.llama.kv_cache import ALL_POSITIONS
from pyggml.llama.loader import Model, load_model
from pyggml.llama.recurrent_state import StateCells
from pyggml.llama.sampling import SamplingParams, VocabInfo, make_chain
from pyggml.llama.session import GenerateParams, Session

N_SEQ = 4


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([seed, n]).integers(256, size=n)]


def batch(*tokens: tuple[int, int, tuple[int, ...]]) -> Batch:
    """Tokens with position and sequences, all marked."""
    ids, pos = (np.array([t[i] for t in tokens], np.int32) for i in (0, 1))
    return Batch(ids, pos, tuple(t[2] for t in tokens), np.ones(len(tokens), np.bool_))


# ---------------------------------------------------------------- cells
ACTIONS = st.one_of(
    st.tuples(st.just("decode"), st.lists(st.integers(0, N_SEQ - 1), min_size=1, unique=True)),
    st.tuples(st.just("share"), st.lists(st.integers(0, N_SEQ - 1), min_size=2, unique=True)),
    st.tuples(st.just("copy"), st.permutations(range(N_SEQ))),
    st.tuples(st.just("remove"), st.permutations(range(N_SEQ))),
    st.tuples(st.just("keep"), st.permutations(range(N_SEQ))),
)


@given(st.lists(ACTIONS, max_size=30))
def test_each_sequence_finds_its_own_past(actions: list[tuple[str, list[int]]]) -> None:
    """Cells hold texts instead of states; a dictionary says what each must be."""
    cells, memory, texts = StateCells(N_SEQ), ["?"] * N_SEQ, dict.fromkeys(range(N_SEQ), "")
    for step, (action, seqs) in enumerate(actions):
        if action == "copy":
            cells.copy(*seqs[:2])
            texts[seqs[1]] = texts[seqs[0]]
        elif action == "remove":
            cells.remove(seqs[0], 0, ALL_POSITIONS)
            texts[seqs[0]] = ""
        elif action == "keep":
            cells.keep(seqs[0])
            texts = {seq: text if seq == seqs[0] else "" for seq, text in texts.items()}
        else:
            if action == "share":  # one token for several sequences of the same past
                for seq in seqs[1:]:
                    cells.copy(seqs[0], seq)
                    texts[seq] = texts[seqs[0]]
                sets = [tuple(seqs)]
            else:
                sets = [(seq,) for seq in seqs]
            places = cells.occupy(sets, [len(texts[ids[0]]) for ids in sets])
            old = zip(places.source, places.is_new, strict=True)
            read = ["" if is_new else memory[i] for i, is_new in old]
            for ids, text, target in zip(sets, read, places.target, strict=True):
                memory[target] = text + chr(65 + step)
                texts |= dict.fromkeys(ids, texts[ids[0]] + chr(65 + step))
            assert len(set(places.target)) == len(sets)
        for seq, text in texts.items():
            assert cells.pos[seq] == len(text) - 1
            assert (memory[cells.cell[seq]] if text else "") == text


@pytest.mark.parametrize(
    ("p0", "p1", "can"),
    [
        (0, ALL_POSITIONS, True),
        (10, ALL_POSITIONS, True),  # beyond the end
        (9, ALL_POSITIONS, False),
        (3, 10, False),
        (3, 9, True),  # in the middle: the state is what these made of it
        (0, 5, True),
        (0, 10, True),
    ],
)
def test_what_can_be_removed_is_as_in_llama_cpp(
    p0: int, p1: int, can: bool, hybrid: Model, path: Path
) -> None:
    context = context_of(hybrid)
    context.decode(Batch.of(prompt(10), 0))
    assert context.memory.can_remove(0, p0, p1) is can
    assert context.memory.can_remove(-1, p0, p1) is can
    with LlamaCpp(path) as theirs:
        theirs.logits(prompt(10))
        assert theirs.remove(0, p0, min(p1, 1 << 30)) is can


def test_a_refused_removal_changes_nothing(hybrid: Model) -> None:
    context = context_of(hybrid)
    context.decode(Batch.of(prompt(10), 0))
    with pytest.raises(UserError, match="last positions of sequence 0, from 5 on, cannot be"):
        context.memory.remove(0, 5)
    assert context.memory.can_continue(0, 10)
    context.memory.remove(0)
    assert context.memory.pos_max(0) == -1 and context.memory.can_continue(0, 0)


# ---------------------------------------------------------------- models
@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("state") / "m.gguf", "qwen35")


@pytest.fixture(scope="module")
def hybrid(path: Path) -> Model:
    return load_model(path, devices=[RefDevice()])


def alone(model: Model, ids: list[int]) -> NDArray[np.float32]:
    """What a fresh context gives."""
    return run(context_of(model), ids)


def test_the_state_is_part_of_the_memory(hybrid: Model) -> None:
    memory = context_of(hybrid, n_seq_max=3).memory
    assert memory.state is not None and memory.state.layers == (0, 1, 3)
    assert memory.caches[0].layers == (2,)
    shape = memory.state.shape
    size = 4 * 3 * 3 * (3 * shape.n_channels + shape.n**2 * shape.n_head)
    assert memory.state.nbytes == size == memory.nbytes - memory.caches[0].nbytes
    assert [t.name for t in memory.state.tensors][::3] == ["cache_r_l0", "cache_s_l0"]


def test_sequences_of_a_batch_do_not_see_each_other(hybrid: Model) -> None:
    """Of different lengths, mixed, one of them begun before, and more than fit one ubatch."""
    context = context_of(hybrid, n_seq_max=N_SEQ, n_ubatch=8)
    texts = {seq: prompt(n, seq) for seq, n in ((0, 12), (1, 5), (3, 9))}
    run(context, texts[0][:4], seq=0)
    left = [(texts[0][i], i, (0,)) for i in range(4, 12)]
    left += [(token, i, (seq,)) for seq in (1, 3) for i, token in enumerate(texts[seq])]
    order = sorted(left, key=lambda item: (item[1], -item[2][0]))
    context.decode(batch(*order))
    logits = context.all_logits()
    for seq, text in texts.items():
        rows = [i for i, item in enumerate(order) if item[2] == (seq,)]
        np.testing.assert_allclose(logits[rows], alone(hybrid, text)[-len(rows) :], atol=1e-4)
    last = max(i for i, item in enumerate(order) if item[2] == (1,))
    np.testing.assert_array_equal(context.logits(last), logits[last])


def test_copies_share_a_state_until_they_part(hybrid: Model) -> None:
    context = context_of(hybrid, n_seq_max=3)
    run(context, prompt(7))
    context.memory.copy(0, 2)
    run(context, [9], 7, seq=2)  # has its own state from here on
    both = batch((1, 7, (0,)), (2, 8, (2,)))
    context.decode(both)
    rows = context.all_logits()
    np.testing.assert_allclose(rows[0], alone(hybrid, [*prompt(7), 1])[-1], atol=1e-4)
    np.testing.assert_allclose(rows[1], alone(hybrid, [*prompt(7), 9, 2])[-1], atol=1e-4)
    with pytest.raises(UserError, match="only the whole of sequence 0 can be copied"):
        context.memory.copy(0, 1, 0, 3)


def test_sequences_may_share_tokens_and_part_in_one_batch(hybrid: Model) -> None:
    context = context_of(hybrid, n_seq_max=2)
    context.decode(batch((5, 0, (0, 1)), (6, 1, (0, 1)), (7, 2, (1,)), (8, 2, (0,))))
    rows = context.all_logits()
    np.testing.assert_allclose(rows[:3], alone(hybrid, [5, 6, 7]), atol=1e-4)
    np.testing.assert_allclose(rows[3], alone(hybrid, [5, 6, 8])[-1], atol=1e-4)
    with pytest.raises(BatchError, match="whose earlier tokens differ"):
        context.decode(batch((1, 3, (0, 1))))


def test_a_new_sequence_begins_with_nothing(hybrid: Model) -> None:
    context = context_of(hybrid, n_seq_max=2)
    expected = alone(hybrid, prompt(6))
    for seq in (0, 1, 0):
        run(context, prompt(20, 1), seq=seq)
        context.memory.remove(seq)
        np.testing.assert_allclose(run(context, prompt(6), seq=seq), expected, atol=1e-4)
        context.memory.clear()


def test_an_interrupted_sequence_is_gone_and_others_are_not(path: Path, hybrid: Model) -> None:
    device = Breaking()
    context = context_of(load_model(path, devices=[device]), n_seq_max=2, n_ubatch=4)
    run(context, prompt(6), seq=1)
    device.fuse = 2
    with pytest.raises(KeyboardInterrupt):
        run(context, prompt(12, 1), seq=0)
    assert context.memory.pos_max(0) == -1 and context.memory.can_continue(0, 0)
    expected = alone(hybrid, [*prompt(6), 3])[-1]
    np.testing.assert_allclose(run(context, [3], 6, seq=1)[0], expected, atol=1e-4)


# ---------------------------------------------------------------- sessions
def test_a_prompt_that_does_not_go_on_is_computed_anew(hybrid: Model) -> None:
    session, ids = Session(context_of(hybrid)), prompt(20)
    for text, n_cached in (
        (ids, 0),
        ([*ids, 1, 2], 20),
        ([*ids, 1, 3], 0),  # another last token
        ([*ids, 1, 3], 0),  # its last token must be computed again
        ([*ids, 1, 3, 4], 22),
        (ids[:5], 0),
    ):
        session.evaluate(text)
        assert session.timings.n_cached == n_cached and session.tokens == text
        np.testing.assert_allclose(session.context.logits(-1), alone(hybrid, text)[-1], atol=1e-4)


def test_contexts_shift_where_each_token_has_one_position(tmp_path: Path, hybrid: Model) -> None:
    params = GenerateParams(n_predict=12, context_shift=True)

    def generate(session: Session) -> list[int]:
        info = VocabInfo(n_vocab=session.vocab.n_tokens, eog_ids=session.vocab.eog)
        sampler = make_chain(SamplingParams(temp=0, ignore_eos=True), info)
        return [step.token for step in session.generate(prompt(250), sampler, params)]

    session = Session(context_of(tiny_model(tmp_path / "next.gguf", "qwen3next", n_layer=3)))
    assert len(generate(session)) == 12
    assert session.context.memory.pos_max(0) == len(session.tokens) - 1 < 200
    with pytest.raises(UserError, match="--context-shift: the positions of this model cannot"):
        generate(Session(context_of(hybrid)))
    with pytest.raises(UserError, match="cannot be moved: a token has several"):
        context_of(hybrid).memory.shift(0, 1, 2, -1)


# ---------------------------------------------------------------- ubatches
TOKENS = st.lists(st.frozensets(st.integers(0, 3), min_size=1, max_size=2), min_size=1)


@settings(max_examples=200)
@given(sets=TOKENS, n_ubatch=st.integers(1, 9))
def test_equal_ubatches(sets: list[frozenset[int]], n_ubatch: int) -> None:
    n = len(sets)
    ids = np.arange(n, dtype=np.int32)
    whole = Batch(ids, ids, tuple(tuple(s) for s in sets), ids % 3 == 0)
    seen: list[int] = []
    for part in whole.split_equal(n_ubatch):
        assert 1 <= part.n_tokens <= n_ubatch and part.n_tokens % part.n_seqs == 0
        per_seq = part.n_tokens // part.n_seqs
        runs = [part.seq_ids[i : i + per_seq] for i in range(0, part.n_tokens, per_seq)]
        assert all(len(set(map(frozenset, run))) == 1 for run in runs)
        members = [seq for run in runs for seq in set(run[0])]
        assert len(members) == len(set(members))
        assert part.tokens.tolist() == part.places.tolist()
        assert [i % 3 for i in part.places[part.outputs]] == [0] * len(part.outputs)
        seen += part.places.tolist()
    assert sorted(seen) == list(range(n))
    for seq in range(4):  # each sequence in order
        mine = [i for i in seen if seq in sets[i]]
        assert mine == sorted(mine)


# ---------------------------------------------------------------- hyper-parameters
@pytest.fixture
def read(tmp_path: Path) -> Callable[..., object]:
    own = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 48,
        "rope.dimension_sections": [1, 1, 0, 0],
    }

    def hparams(**changes: object) -> object:
        items = keys("qwen35", 4, **{**own, **changes})
        return find("qwen35").hparams(metadata(tmp_path / "m.gguf", items))

    return hparams


def test_which_layers_are_recurrent(read: Callable[..., object]) -> None:
    assert read().is_recurrent == (True, True, True, False)
    assert read(full_attention_interval=2).is_recurrent == (True, False, True, False)
    listed = read(attention__recurrent_layers=[False, True, True, False])
    assert listed.is_recurrent == (False, True, True, False)
    # the list counts the layers that predict further tokens too
    listed = read(attention__recurrent_layers=[True, False, True, False], nextn_predict_layers=1)
    assert listed.is_recurrent == (True, False, True) and listed.n_layer == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm__inner_size": 40}, "inner_size 40 do not fit together"),
        ({"ssm__group_count": 4}, "group_count 4, time_step_rank 6"),
        ({"ssm__state_size": 0}, "state_size 0"),
        ({"ssm__conv_kernel": 1}, "conv_kernel 1"),
        ({"full_attention_interval": 9}, "none of the 4 layers attends fully"),
        ({"rope__dimension_sections": [0, 0, 0, 0]}, "the sections must have pairs"),
        ({"attention__value_length": 2}, "heads of keys are 4 wide, those of values 2"),
    ],
)
def test_numbers_that_do_not_fit(
    changes: dict[str, object], message: str, read: Callable[..., object]
) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)
