"""Sessions: when generation ends, what is reused, how it shifts, what an interrupt leaves."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import write_tiny
from tiny_llama import context_of, tiny_model

from pyggml.errors import UserError
from pyggml.llama import context as context_module
from pyggml.llama import kv_cache, kv_cells, load
from pyggml.llama import session as session_module
from pyggml.llama.loader import Model
from pyggml.llama.sampling import Sampler, SamplingParams, VocabInfo, make_chain
from pyggml.llama.session import GenerateParams, Session, Step

END = 299  # the end token of the tiny vocabulary
HI = [72, 105]  # its first 256 tokens are bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("session") / "llama.gguf")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Sees 16 tokens in two of three layers."""
    return tiny_model(tmp_path_factory.mktemp("session") / "gemma3.gguf", "gemma3", n_layer=3)


class Script(Sampler):
    """Gives the tokens it was told to give, and notes what it is told."""

    def __init__(self, tokens: Iterable[int]) -> None:
        super().__init__([], 0, 0)
        self.tokens = list(tokens)
        self.text: list[int] = []

    def sample(self, logits: NDArray[np.float32]) -> int:
        assert np.isfinite(logits).all()
        return self.tokens.pop(0)

    def accept(self, token: int) -> None:
        self.text.append(token)

    def forget(self) -> None:
        self.text.clear()


def greedy(session: Session) -> Sampler:
    """The most probable token that does not end the text."""
    vocab = session.vocab
    info = VocabInfo(n_vocab=vocab.n_tokens, eog_ids=vocab.eog)
    return make_chain(SamplingParams(temp=0, ignore_eos=True), info)


def say(
    session: Session, prompt: Sequence[int], tokens: Iterable[int], **params: Any
) -> list[Step]:
    return list(session.generate(prompt, Script(tokens), GenerateParams(**params)))


def go_on(session: Session, prompt: Sequence[int], n: int = 4, **params: Any) -> list[int]:
    """Greedy tokens."""
    steps = session.generate(prompt, greedy(session), GenerateParams(n_predict=n, **params))
    return [step.token for step in steps]


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([seed, n]).integers(256, size=n)]


# ---------------------------------------------------------------- when it ends
def test_a_limit(model: Model) -> None:
    session = Session(context_of(model))
    steps = say(session, HI, b"abcdef", n_predict=3)
    assert [(s.token, s.text, s.finish) for s in steps] == [
        (97, "a", None),
        (98, "b", None),
        (99, "c", "limit"),
    ]
    assert session.tokens == [*HI, 97, 98]  # nobody needs the logits after the last one
    assert session.timings.n_generated == 3 and session.timings.n_prompt == 2


def test_nothing_to_generate_still_computes_the_prompt(model: Model) -> None:
    session = Session(context_of(model))
    assert say(session, HI, b"", n_predict=0) == []
    assert session.tokens == HI and session.context.logits(-1).shape == (300,)


def test_the_end_token_is_not_shown_unless_asked_for(model: Model) -> None:
    session = Session(context_of(model))
    assert say(session, HI, [97, END, 98]) == [Step(97, "a"), Step(END, "", "eog")]
    assert say(session, HI, [END], special=True) == [Step(END, "<|im_end|>", "eog")]
    assert session.tokens == HI


@pytest.mark.parametrize("n_predict", [-1, -2])
def test_a_full_context(model: Model, n_predict: int) -> None:
    session = Session(context_of(model))
    steps = say(session, ids(250), [97] * 100, n_predict=n_predict)
    # 250 + 6 tokens fit; one more is known but has no place
    assert len(steps) == 7 and steps[-1].finish == "full"
    assert len(session.tokens) == 256


def test_a_limit_that_is_reached_with_the_last_cell(model: Model) -> None:
    steps = say(Session(context_of(model)), ids(250), [97] * 7, n_predict=7)
    assert steps[-1].finish == "limit"


@pytest.mark.parametrize(("n", "fits"), [(251, True), (252, True), (253, False), (1000, False)])
def test_prompts_around_the_context_size(model: Model, n: int, fits: bool) -> None:
    session = Session(context_of(model))
    if fits:
        assert say(session, ids(n), [97], n_predict=1)[-1].finish == "limit"
        return
    with pytest.raises(UserError) as caught:
        say(session, ids(n), [97])
    assert str(caught.value) == (
        f"the prompt is too long: {n} tokens, but a context of 256 holds at most 252: "
        "use a larger --ctx-size"
    )
    assert session.tokens == []


def test_an_empty_prompt(model: Model) -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        say(Session(context_of(model)), [], [97])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_predict": -3}, "--predict -3"),
        ({"n_predict": -2, "context_shift": True}, "contradict each other"),
    ],
)
def test_impossible_wishes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerateParams(**given)


# ---------------------------------------------------------------- text
def test_stop_strings_end_the_text(model: Model) -> None:
    session = Session(context_of(model))
    steps = say(session, HI, b"go stop here", stop=("stop", "never"))
    assert "".join(s.text for s in steps) == "go "
    assert (steps[-1].finish, steps[-1].matched) == ("stop", "stop")
    assert [s.text for s in steps[-4:]] == ["", "", "", ""]


@pytest.mark.parametrize(("tail", "finish"), [([END], "eog"), (b"x", "limit")])
def test_what_was_held_back_comes_in_the_end(
    model: Model, tail: Sequence[int], finish: str
) -> None:
    n = 4 + (finish == "eog")
    steps = say(Session(context_of(model)), HI, [*b"sto", *tail], stop=("stop",), n_predict=n)
    assert "".join(s.text for s in steps) == "sto" + ("x" if finish == "limit" else "")
    assert steps[-1].finish == finish and steps[-1].matched == ""


def test_letters_of_several_tokens_come_whole(model: Model) -> None:
    flag = "🇩🇪".encode()
    tokens = list(flag)
    steps = say(Session(context_of(model)), HI, [*tokens, END])
    assert [s.text for s in steps] == ["", "", "", "🇩", "", "", "", "🇪", ""]
    for n in (1, 2, 3, 5):
        steps = say(Session(context_of(model)), HI, tokens, n_predict=n)
        text = "".join(s.text for s in steps)
        assert text == ("🇩" if n > 4 else "") + "\ufffd" and steps[-1].finish == "limit"


# ---------------------------------------------------------------- the sampler's text
def test_the_sampler_sees_each_token_once(model: Model) -> None:
    session, sampler = Session(context_of(model)), Script(b"abcdefgh")
    list(session.generate(HI, sampler, GenerateParams(n_predict=2)))
    assert sampler.text == [*HI, 97, 98]
    longer = [*session.tokens, 98, 1, 2]
    list(session.generate(longer, sampler, GenerateParams(n_predict=1)))
    assert sampler.text == [*longer, 99]
    list(session.generate(HI, sampler, GenerateParams(n_predict=1)))
    assert sampler.text == [*HI, 100]


def test_a_sampler_kept_over_turns_goes_on_with_its_random_numbers(model: Model) -> None:
    """The text is forgotten and told anew, and penalties count it once."""
    params = SamplingParams(seed=7, temp=3.0, repeat_penalty=1.5, top_p=1.0, min_p=0.0)
    info = VocabInfo(n_vocab=300)
    kept, session = make_chain(params, info), Session(context_of(model))
    turns = []
    for _ in range(2):
        steps = session.generate(ids(20), kept, GenerateParams(n_predict=4))
        turns.append([step.token for step in steps])
    assert turns[0] != turns[1]
    again = make_chain(params, info)
    logits = session.context.logits  # of the same prompt each time
    for turn in turns:
        again.forget()
        session.evaluate(ids(20))
        for token in ids(20):
            again.accept(token)
        for token in turn:
            assert again.sample(logits(-1)) == token
            again.accept(token)
            session._decode([token])


# ---------------------------------------------------------------- reuse
KNOWN: dict[Any, NDArray[np.float32]] = {}


def fresh(model: Model, prompt: Sequence[int], **params: Any) -> NDArray[np.float32]:
    """Logits after a prompt in a context that knows nothing."""
    key = model.gguf.path, tuple(prompt), tuple(params.items())
    if key not in KNOWN:
        session = Session(context_of(model, **params))
        session.evaluate(prompt)
        KNOWN[key] = session.context.logits(-1)
    return KNOWN[key]


def check_reuse(session: Session, prompt: Sequence[int], n_cached: int, **params: Any) -> None:
    session.evaluate(prompt)
    assert session.timings.n_cached == n_cached
    assert session.timings.n_prompt == len(prompt) - n_cached > 0
    assert session.tokens == list(prompt)
    expected = fresh(session.context.model, prompt, **params)
    np.testing.assert_allclose(session.context.logits(-1), expected, atol=2e-5)


def test_the_common_beginning_is_not_computed_again(model: Model) -> None:
    session, a = Session(context_of(model)), ids(40)
    check_reuse(session, a, 0)
    check_reuse(session, a, 39)  # at least one token is computed
    check_reuse(session, a[:20], 19)
    check_reuse(session, a, 20)
    check_reuse(session, [*a, 5, 6], 40)
    check_reuse(session, [*a[:30], 5, 6, 7], 30)
    check_reuse(session, ids(10, 1), 0)
    session.clear()
    check_reuse(session, ids(10, 1), 0)


def test_answers_are_reused_too(model: Model) -> None:
    session, prompt = Session(context_of(model)), ids(12)
    answer = go_on(session, prompt, 5)
    check_reuse(session, [*prompt, *answer, 3, 4], 12 + 4)
    assert go_on(session, prompt, 5) == answer


def test_two_sessions_of_one_context(model: Model) -> None:
    context = context_of(model, n_seq_max=2)
    one, two = Session(context), Session(context, seq=1)
    check_reuse(one, ids(20), 0)
    check_reuse(two, ids(30, 1), 0)
    check_reuse(one, [*ids(20), 5], 20)
    two.clear()
    check_reuse(one, [*ids(20), 5, 6], 21)


def test_a_window_is_reused_as_far_as_it_reaches(windowed: Model) -> None:
    size: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 64}
    session, a = Session(context_of(windowed, **size)), ids(500)
    check_reuse(session, a, 0, **size)
    window = session.context.memory.caches[1].cells
    assert window.pos_min(0) > 200  # what came before is gone
    check_reuse(session, [*a, 1, 2], 500, **size)
    # the window of position 480 begins at 465, which is still there
    assert window.pos_min(0) <= 465
    check_reuse(session, [*a[:480], 3], 480, **size)
    # that of position 100 is not
    check_reuse(session, [*a[:100], 3], 0, **size)
    check_reuse(session, [*a[:100], 3, 4], 101, **size)


def test_the_last_position_whose_window_is_left(windowed: Model) -> None:
    size: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 64}
    session, a = Session(context_of(windowed, **size)), ids(500)
    session.evaluate(a)
    first = session.context.memory.caches[1].cells.pos_min(0)
    # a token at n sees n - 15 and later ones
    n = first + 15
    twin = Session(context_of(windowed, **size))
    twin.evaluate(a)
    check_reuse(session, [*a[:n], 3], n, **size)
    check_reuse(twin, [*a[: n - 1], 3], 0, **size)


# ---------------------------------------------------------------- shifting
def test_a_shift_drops_half_of_what_follows_the_kept_tokens(model: Model) -> None:
    session, a = Session(context_of(model)), ids(250)
    steps = say(session, a, [97] * 12, n_predict=12, context_shift=True, keep=9)
    assert [s.finish for s in steps[-2:]] == [None, "limit"]
    # full at 256: BOS and 9 tokens stay, then 123 go
    text = [*a, *[97] * 11]
    assert session.tokens == text[:10] + text[133:]
    assert session.context.memory.pos_max(0) == len(session.tokens) - 1


@pytest.mark.parametrize(
    ("keep", "n_kept"), [(0, 1), (5, 6), (250, 250), (-1, 250), (-64, 250), (10**6, 250)]
)
def test_which_tokens_a_shift_keeps(model: Model, keep: int, n_kept: int) -> None:
    session, a = Session(context_of(model)), ids(250)
    say(session, a, [97] * 8, n_predict=8, context_shift=True, keep=keep)
    n_dropped = (256 - n_kept) // 2
    text = [*a, *[97] * 7]
    assert session.tokens == text[:n_kept] + text[n_kept + n_dropped :]
    assert session.context.memory.pos_max(0) == len(session.tokens) - 1


def test_a_model_without_bos_keeps_only_what_it_is_told(tmp_path: Path) -> None:
    session, a = Session(context_of(tiny_model(tmp_path / "m.gguf", "qwen3"))), ids(250)
    say(session, a, [97] * 8, n_predict=8, context_shift=True)
    assert session.tokens == [*a, *[97] * 7][128:]


def test_a_shifted_context_is_that_of_the_shorter_text(tmp_path: Path) -> None:
    """Exactly so in one layer, where keys and values depend on tokens and positions only."""
    session = Session(context_of(tiny_model(tmp_path / "m.gguf", n_layer=1)))
    params = GenerateParams(n_predict=300, context_shift=True)
    for step in session.generate(ids(250), greedy(session), params):
        assert np.isfinite(session.context.logits(-1)).all()
        if step.finish is None and len(session.tokens) < 256:
            continue
        expected = fresh(session.context.model, session.tokens)
        np.testing.assert_allclose(session.context.logits(-1), expected, atol=1e-4)
    assert len(session.tokens) < 256


def test_what_was_shifted_is_not_taken_for_a_fresh_text(model: Model) -> None:
    session, a = Session(context_of(model)), ids(250)
    say(session, a, [97] * 8, n_predict=8, context_shift=True, keep=9)
    # the same tokens, but computed when others came before them
    check_reuse(session, session.tokens[:100], 10)
    check_reuse(session, session.tokens[:90], 89)


def test_a_window_cannot_be_shifted_unless_it_is_held_whole(windowed: Model) -> None:
    params = GenerateParams(n_predict=200, context_shift=True)
    size: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 64}
    with pytest.raises(UserError, match="--context-shift: .* add --swa-full"):
        session = Session(context_of(windowed, **size))
        session.generate(HI, greedy(session), params)
    # 256 cells are enough for both caches
    for session in (
        Session(context_of(windowed, swa_full=True, **size)),
        Session(context_of(windowed)),
    ):
        n = session.context.n_ctx - 100
        assert len(list(session.generate(ids(n), greedy(session), params))) == 200
        held = [cache.cells.pos_max(0) + 1 for cache in session.context.memory.caches]
        assert held == [len(session.tokens)] * 2 and held[0] < n + 199


# ---------------------------------------------------------------- interrupts
def test_progress_and_an_interrupt_between_two_parts(model: Model) -> None:
    session, a, seen = Session(context_of(model, n_ubatch=8)), ids(30), list[tuple[int, int]]()

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate(a, greedy(session), on_prompt=stop)
    assert seen == [(0, 30), (8, 30), (16, 30)] and session.tokens == a[:16]
    check_reuse(session, a, 16)


def test_closing_the_steps_leaves_a_usable_session(model: Model) -> None:
    session, a = Session(context_of(model)), ids(10)
    steps = session.generate(a, greedy(session))
    answer = [next(steps).token, next(steps).token]
    steps.close()  # type: ignore[attr-defined]  # a generator
    check_reuse(session, [*a, *answer, 1], 11)


WATCHED = {str(module.__file__) for module in (context_module, kv_cache, kv_cells, session_module)}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the watched modules run; counts if n is 0."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.count = 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self.line if frame.f_code.co_filename in WATCHED else None

    def line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            self.count += 1
            if self.count == self.n:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


@pytest.mark.parametrize("kind", ["prompt", "shift", "window"])
@pytest.mark.parametrize("n_places", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_an_interrupt_anywhere_leaves_a_usable_session(
    model: Model, windowed: Model, kind: str, n_places: int
) -> None:
    tiny = windowed if kind == "window" else model
    size: dict[str, Any] = {"n_ctx": 512 if kind == "window" else 256, "n_ubatch": 64}
    before, prompt = {
        "prompt": (ids(20), [*ids(20)[:10], *ids(90, 1)]),
        "shift": (ids(246), [*ids(246), 1, 2, 3, 4]),
        "window": (ids(300), [*ids(300), 1, 2]),
    }[kind]
    params = GenerateParams(n_predict=9, context_shift=kind == "shift")
    shared = context_of(tiny, **size)

    def attempt(n: int) -> tuple[Session, int]:
        shared.memory.clear()
        session = Session(shared)
        session.evaluate(before)
        with Interrupt(n) as trace, contextlib.suppress(KeyboardInterrupt):
            for _ in session.generate(prompt, greedy(session), params):
                pass
        return session, trace.count

    _, n_lines = attempt(0)
    assert n_lines > 1000
    after = [*prompt[:15], 7]
    for n in np.linspace(1, n_lines, n_places, dtype=int).tolist():
        session, count = attempt(n)
        assert count == n
        for wanted in (prompt, after):
            session.evaluate(wanted)
            np.testing.assert_allclose(
                session.context.logits(-1), fresh(tiny, wanted, **size), atol=5e-5, err_msg=str(n)
            )


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_signal_at_any_moment_leaves_a_usable_session(tmp_path: Path, arch: str) -> None:
    """On the CPU engine, whose threads are at work when it comes."""
    path = write_tiny(tmp_path / "m.gguf", arch, n_layer=3)
    a = ids(200)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # in a garbage collection it would be raised inside a callback of the test tools, and lost
    gc.disable()
    try:
        with load(path, n_ctx=512, n_ubatch=32, type_k="f32", type_v="f32") as llama:
            session = llama.session().session
            session.evaluate(a)
            expected = session.context.logits(-1)
            for milliseconds in (0.1, 0.3, 1, 2, 3, 5, 7, 10, 15, 20):
                session.evaluate(ids(5, 1))
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, milliseconds / 1e3)
                    for _ in session.generate(a, greedy(session), GenerateParams(n_predict=20)):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                session.evaluate(a)
                np.testing.assert_allclose(session.context.logits(-1), expected, atol=1e-5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
