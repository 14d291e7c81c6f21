"""The Python face: keywords, logits, chats, what is closed, and the examples of the docstrings."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import Exact, kl
from tiny import write_tiny
from tiny_llama import DEVICE, Limited

from pyggml import registry
from pyggml.errors import ConfigError, ModelError, UserError
from pyggml.gguf import Override
from pyggml.llama import Llama, api, load
from pyggml.llama.sampling import SamplingParams
from pyggml.llama.session import GenerateParams

TEXT = "Hello and the world of you"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("api") / "model.gguf", "llama")


@pytest.fixture(scope="module")
def llama(path: Path) -> Iterator[Llama]:
    with load(path, n_ctx=256, type_k="f32", type_v="f32", devices=[DEVICE]) as llama:
        yield llama


# ---------------------------------------------------------------- load
def test_keywords_reach_their_parameters(path: Path) -> None:
    with load(
        path,
        devices=[DEVICE],
        load_mode="none",
        check_tensors=True,
        n_ctx=300,
        n_ubatch=32,
        flash_attn="off",
        freq_base=7e5,
        yarn_beta_slow=2.0,
        override_kv=["llama.context_length=int:99", Override("general.name", "str", "me")],
    ) as llama:
        assert llama.context_params.n_ctx == 300 and llama.context_params.flash_attn == "off"
        context = llama.context()
        assert (context.params.n_ctx, context.params.n_ubatch) == (512, 32)
        assert not context.flash_attn
        assert context.hparams.rope.freq_base == 7e5 and context.hparams.rope.beta_slow == 2.0
        assert (llama.model.hparams.n_ctx_train, llama.model.hparams.name) == (99, "me")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_ctxx": 1}, r"there is no parameter 'n_ctxx'; did you mean 'n_ctx'\?"),
        ({"frobnicate": 1}, "there is no parameter 'frobnicate'$"),
        ({"n_ctx": -1}, "--ctx-size -1"),
        ({"load_mode": "x"}, "--load-mode x"),
        ({"override_kv": ["a"]}, "--override-kv a"),
        ({"chat_template": "nonsense"}, "--chat-template 'nonsense'"),
    ],
)
def test_mistakes_are_told_in_words(path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, devices=[DEVICE], **given)


def test_a_mistake_leaves_nothing_allocated(path: Path) -> None:
    device = Limited()
    with pytest.raises(ConfigError):
        load(path, devices=[device], chat_template="nonsense")
    assert device.live == 0


# ---------------------------------------------------------------- tokens and logits
def test_text_and_tokens(llama: Llama) -> None:
    ids = llama.tokenize(TEXT)
    assert ids[0] == llama.model.vocab.special.bos
    assert llama.tokenize(TEXT, add_special=False) == ids[1:]
    assert llama.detokenize(ids[1:]) == TEXT
    assert llama.tokenize("<|im_end|>", add_special=False) == [299]
    assert len(llama.tokenize("<|im_end|>", add_special=False, parse_special=False)) > 1


def test_logits_of_one_and_of_all_tokens(llama: Llama, path: Path) -> None:
    ids = llama.tokenize(TEXT)
    everything, last = llama.logits(ids, all=True), llama.logits(ids)
    assert everything.shape == (len(ids), 300) and last.shape == (300,)
    assert kl(Exact(path).logits(ids), everything).max() < 1e-11
    np.testing.assert_array_equal(last, everything[-1])
    np.testing.assert_array_equal(llama.logits(list(np.array(ids))), last)


def test_logits_of_many_batches(path: Path) -> None:
    ids = [int(t) for t in np.random.default_rng(0).integers(300, size=25)]
    with load(path, n_ctx=256, n_batch=8, n_ubatch=4, devices=[DEVICE]) as llama:
        everything = llama.logits(ids, all=True)
        assert kl(Exact(path).logits(ids), everything).max() < 1e-6
        np.testing.assert_allclose(llama.logits(ids), everything[-1], atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "logits of no tokens"),
        ([1] * 257, "logits of 257 tokens: a context of 256 cannot hold them"),
        ([1, 300], "token 1 of the batch is 300"),
    ],
)
def test_impossible_logits(llama: Llama, ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama.logits(ids)


# ---------------------------------------------------------------- generate
def test_keywords_of_generate(llama: Llama) -> None:
    chat = llama.session()
    steps = list(chat.generate(TEXT, n_predict=5, temp=0, ignore_eos=True))
    assert len(steps) == 5 and steps[-1].finish == "limit"
    again = list(
        chat.generate(
            llama.tokenize(TEXT),
            params=GenerateParams(n_predict=9),
            n_predict=5,
            temp=0,
            ignore_eos=True,
        )
    )
    assert [s.token for s in again] == [s.token for s in steps]
    assert chat.timings.n_cached == len(llama.tokenize(TEXT)) - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tmep": 0}, "there is no parameter 'tmep'; did you mean 'temp'"),
        ({"n_predct": 0}, "there is no parameter 'n_predct'; did you mean 'n_predict'"),
        ({"n_predict": -5}, "--predict -5"),
        ({"top_p": -1.0}, "top_p"),
    ],
)
def test_mistakes_in_generate(llama: Llama, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama.session().generate(TEXT, **given)


def test_a_sampler_and_sampling_keywords_contradict_each_other(llama: Llama) -> None:
    with pytest.raises(ConfigError, match="temp: the given sampler decides"):
        llama.session().generate(TEXT, sampler=llama.sampler(temp=0), temp=1.0)


def test_the_window_of_penalties_is_the_context(llama: Llama) -> None:
    info = llama.vocab_info()
    assert (info.n_vocab, info.n_ctx, info.end_id) == (300, 256, 299)
    assert info.eog_ids == llama.model.vocab.eog
    assert llama.sampler_of(SamplingParams(temp=0)).description.startswith("logits -> ")


# ---------------------------------------------------------------- chat
def test_a_chat_keeps_its_messages(llama: Llama) -> None:
    chat = llama.session()
    first = list(chat.chat("Hi", system="Be brief", n_predict=4, temp=0))
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == "".join(s.text for s in first)
    list(chat.chat("More", system="another", n_predict=4, temp=0))
    assert [m["role"] for m in chat.messages][3:] == ["user", "assistant"]
    assert chat.messages[0]["content"] == "Be brief"
    assert chat.timings.n_cached > 10  # the conversation so far
    assert chat.take_back() == "More"
    assert len(chat.messages) == 3
    chat.clear()
    assert chat.messages == [] and chat.session.tokens == []
    assert chat.take_back() is None


def test_the_prompt_is_the_rendered_template(llama: Llama) -> None:
    chat = llama.session()
    chat.chat("Hi", n_predict=0)
    wanted = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.session.prompt == llama.tokenize(wanted)


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(llama: Llama) -> None:
    chat = llama.session()
    steps = chat.chat("Hi", temp=0, ignore_eos=True)
    text = next(steps).text + next(steps).text
    steps.close()  # type: ignore[attr-defined]  # a generator
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    chat.chat("and", n_predict=1)  # not even begun to be read
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_message_that_is_not_understood_is_not_kept(llama: Llama) -> None:
    chat = llama.session()
    with pytest.raises(UserError, match="the prompt is too long"):
        chat.chat("long " * 300, system="Be brief")
    assert chat.messages == []

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.chat("Hi", system="Be brief", on_prompt=stop)
    assert chat.messages == []


def test_where_the_template_comes_from(path: Path, llama: Llama) -> None:
    assert llama.has_template
    with load(path, devices=[DEVICE], chat_template="llama2") as other:
        assert other.has_template
        chat = other.session()
        chat.messages.append({"role": "user", "content": "Hi"})
        assert "[INST]" in other.detokenize(chat.render())


# ---------------------------------------------------------------- lifetime
def test_everything_is_given_back(path: Path) -> None:
    device = Limited()
    llama = load(path, n_ctx=256, devices=[device])
    weights = device.live
    chat, other = llama.session(), llama.session()
    list(chat.generate(TEXT, n_predict=2))
    llama.logits([1])
    held, cache = device.live, chat.session.context.memory.nbytes
    chat.close()
    chat.close()
    assert device.live == held - cache
    list(other.generate(TEXT, n_predict=2))
    llama.close()
    # work buffers go with their contexts
    assert device.live == held - 3 * cache - weights


def test_contexts_are_warmed_up_unless_told_otherwise(path: Path) -> None:
    with load(path, n_ctx=256, devices=[DEVICE]) as llama:
        assert llama.session().session.context._built is not None
    with load(path, n_ctx=256, devices=[DEVICE], warmup=False) as llama:
        assert llama.session().session.context._built is None


def test_a_damaged_file_shows_when_a_token_is_chosen(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    raw = bytearray(path.read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()  # the end of the last tensor
    path.write_bytes(raw)
    with (
        load(path, n_ctx=256, devices=[DEVICE], warmup=False) as llama,
        pytest.raises(ModelError, match="logits that are not numbers: .*--check-tensors"),
    ):
        list(llama.session().generate(TEXT, n_predict=1))


# ---------------------------------------------------------------- examples
@pytest.mark.parametrize("name", ["load", "Chat.generate"])
def test_examples_run(name: str, path: Path, monkeypatch: pytest.MonkeyPatch, llama: Llama) -> None:
    """As they stand in the docstrings, in a folder with a model.gguf."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(registry, "devices", lambda: [DEVICE])
    found = doctest.DocTestFinder(recurse=False).find(
        api.Chat.generate if "." in name else api.load
    )
    source = "".join(example.source for test in found for example in test.examples)
    scope: dict[str, Any] = {"load": load, "chat": llama.session()}
    exec(compile(source, name, "exec"), scope)
    assert scope.get("text") or scope["step"].text is not None
