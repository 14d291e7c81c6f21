"""Tokenizing with real vocabularies equals llama.cpp id by id, and so does the way back."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from nasty_texts import DAMAGED, TEXTS
from tiny import write_tiny
from tokenizer_oracle import LlamaVocab

from pyggml.gguf import open_gguf
from pyggml.llama.detokenize import Detokenizer
from pyggml.llama.vocab import Vocab

FLAGS = list(product((False, True), repeat=2))


@dataclass(frozen=True)
class Pair:
    """One vocabulary read twice."""

    ours: Vocab
    theirs: LlamaVocab


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    path: Path = request.getfixturevalue(request.param)
    with open_gguf(path) as file:
        ours = Vocab.from_metadata(file.metadata)
    theirs = LlamaVocab(path)
    yield Pair(ours, theirs)
    theirs.close()


def shuffled_texts(count: int) -> list[str]:
    """Slices of the corpus glued together at random places."""
    chance = random.Random(11)
    corpus = "".join(TEXTS)
    lengths = (1, 2, 5, 17)
    texts = []
    for _ in range(count):
        starts = [chance.randrange(len(corpus)) for _ in range(chance.randrange(1, 12))]
        texts.append("".join(corpus[start : start + chance.choice(lengths)] for start in starts))
    return texts


@pytest.mark.parametrize(("add_special", "parse_special"), FLAGS)
def test_ids_equal_llama_cpp(pair: Pair, add_special: bool, parse_special: bool) -> None:
    for text in (*TEXTS, *shuffled_texts(400), "".join(TEXTS)):
        ids = pair.ours.tokenize(text, add_special=add_special, parse_special=parse_special)
        expected = pair.theirs.tokenize(text.encode(), add_special, parse_special)
        assert ids == expected, f"{text!r}"


@pytest.mark.parametrize(("remove_special", "unparse_special"), FLAGS)
def test_text_equals_llama_cpp(pair: Pair, remove_special: bool, unparse_special: bool) -> None:
    chance = random.Random(12)
    n_tokens = pair.ours.n_tokens
    noise = [[chance.randrange(n_tokens) for _ in range(20)] for _ in range(200)]
    for ids in [pair.ours.tokenize(text, parse_special=True) for text in TEXTS] + noise:
        text = pair.ours.detokenize(
            ids, remove_special=remove_special, unparse_special=unparse_special
        )
        expected = pair.theirs.detokenize(ids, remove_special, unparse_special)
        assert text == expected.decode("utf-8", "replace"), ids


def test_text_survives_the_round_trip(pair: Pair) -> None:
    for text in TEXTS:
        # U+2581 is how vocabularies write a space, so it comes back as one where that is so
        expected = text.replace("\u2581", " ") if pair.ours.escape_spaces else text
        assert pair.ours.detokenize(pair.ours.tokenize(text, add_special=False)) == expected


def test_damaged_utf8_equals_llama_cpp(pair: Pair) -> None:
    for data in DAMAGED:
        ids = pair.ours.tokenize(data.decode("utf-8", "surrogateescape"))
        assert ids == pair.theirs.tokenize(data, True, False), data


def test_a_lone_surrogate_is_tokenized_as_a_replacement_character(pair: Pair) -> None:
    assert pair.ours.tokenize("a\ud800b") == pair.ours.tokenize("a\ufffdb")


@pytest.mark.parametrize("special", [False, True])
def test_pieces_equal_llama_cpp(pair: Pair, special: bool) -> None:
    n_tokens = pair.ours.n_tokens
    for token in (*range(1000), *range(1000, n_tokens, 17), n_tokens - 1):
        piece = pair.ours.token_to_piece(token, special=special)
        assert piece == pair.theirs.piece(token, special), token


def test_attributes_and_special_tokens_equal_llama_cpp(pair: Pair) -> None:
    ours, theirs = pair.ours, pair.theirs
    assert ours.attributes.tolist() == theirs.attributes()
    assert ours.eog == theirs.eog()
    assert (ours.add_bos, ours.add_eos) == theirs.adds()
    special = theirs.special_ids()
    assert (ours.newline if ours.newline is not None else -1) == special.pop("nl")
    special.pop("eot")  # of several candidates llama.cpp takes the one its hash map meets first
    for role, expected in special.items():
        found = getattr(ours.special, role)
        assert (-1 if found is None else found) == expected, role


def test_streamed_tokens_make_the_whole_text(pair: Pair) -> None:
    for text in TEXTS:
        stream = Detokenizer(pair.ours)
        parts = [stream.push(token) for token in pair.ours.tokenize(text, add_special=False)]
        expected = text.replace("\u2581", " ") if pair.ours.escape_spaces else text
        assert "".join(parts) == expected
        assert stream.flush() == ""


def test_a_stream_hides_control_tokens_unless_asked(pair: Pair) -> None:
    end = pair.ours.special.eos
    assert end is not None
    assert Detokenizer(pair.ours).push(end) == ""
    assert Detokenizer(pair.ours, special=True).push(end) == pair.ours.text(end)
    assert pair.ours.is_eog(end)
    assert pair.ours.find(pair.ours.text(end)) == end


def test_threads_may_share_a_vocabulary(pair: Pair) -> None:
    fresh = Vocab.from_metadata(pair.ours.metadata)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fresh.tokenize, TEXTS * 2))
    assert found == [pair.ours.tokenize(text) for text in TEXTS * 2]


@pytest.mark.parametrize(
    "arch", ["phi3", "gemma2", "glm4", "mistral3", "smollm3", "olmo2", "granite"]
)
def test_vocabularies_of_dense_families_equal_llama_cpp(arch: str, tmp_path: Path) -> None:
    """Their pre-tokenizers, with control tokens written in the text, with and without BOS."""
    path = write_tiny(tmp_path / "m.gguf", arch, n_layer=1)
    with open_gguf(path) as gguf:
        ours = Vocab.from_metadata(gguf.metadata)
    theirs = LlamaVocab(path)
    control = ("<|begin_of_text|>", "<|im_end|>", "<bos>", "<end_of_turn>")
    texts = [*TEXTS[:60], *(f"a {token}b\n\n 12345 {token}" for token in control)]
    for text, special in product(texts, (False, True)):
        assert ours.tokenize(text, add_special=special, parse_special=special) == theirs.tokenize(
            text.encode(), special, special
        ), (arch, text)
    theirs.close()
