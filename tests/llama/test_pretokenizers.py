"""Every pre-tokenizer cuts text as llama.cpp does, seen through small vocabularies."""

import random
from pathlib import Path

import pytest
import regex
from nasty_texts import TEXTS
from tiny_vocab import CONTROL, NORMAL, open_vocab, pair_vocab, write_vocab
from tokenizer_oracle import LlamaVocab

from pyggml.errors import ModelError
from pyggml.llama.pretokenizers import PRETOKENIZERS, ROWS
from pyggml.llama.tokenize_bpe import cut

ALPHABET = (
    "aAbsStTrReEvVmMlLdDzZ'129 \n\r\t.,!?/$^`~<>=|(_-éßжЖ中の가ㄱไကＡǅʰ½³ⅷ３٣€〇\uf900\u8c49꒐😀"
    "、，…“。।\u0301\u200c\u200d\u3000\u00a0\u0085\u2028\x0b\x0c\x1c"
)
SNIPPETS = (*ALPHABET, "1234567", "12", "  ", "    ", " hello", "'re", "I'LL", "can't", "Aa", "aA")
SNIPPETS += ("IMGIMGABZ", "<sentinel:12>", "\n\n", "中中", "٣٣", "((", "한국", "é\u0301")
WORDS = ("hello", " hello", "  hello", "1234567", "\n\n\n", "中中", "Aa", "can't", " a")

# The first name of every row of the table; the others share the row.
ONE_PER_ROW = [names.split()[0] for names in ROWS]
# llama.cpp takes milliseconds per text for these, which has no bearing on us.
SLOW_THERE = {"jais-2", "gpt-4o", "granite-embed-multi-97m", "youtu", "tiny_aya"}


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of few different snippets, so that runs and repeats come up."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        pool = chance.sample(SNIPPETS, chance.choice((2, 4, 8, len(SNIPPETS))))
        texts.append("".join(chance.choices(pool, k=chance.choice((1, 2, 3, 5, 8, 13, 30)))))
    return texts


def compare(path: Path, texts: list[str]) -> None:
    """Ids, cleaned-up text and whether BOS is added, ours against llama.cpp's."""
    ours, theirs = open_vocab(path), LlamaVocab(path)
    assert (ours.add_bos, ours.add_eos) == theirs.adds()
    for text in texts:
        ids = theirs.tokenize(text.encode(), False, False)
        assert ours.tokenize(text, add_special=False) == ids, f"{text!r}"
        expected = theirs.detokenize(ids).decode("utf-8", "replace")
        assert ours.detokenize(ids) == expected, f"{text!r}"
    theirs.close()


@pytest.mark.parametrize("pre", ONE_PER_ROW)
def test_cuts_equal_llama_cpp(pre: str, tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", **pair_vocab(pre, ALPHABET, WORDS))
    compare(path, random_texts(60 if pre in SLOW_THERE else 200, seed=5))


@pytest.mark.slow
@pytest.mark.parametrize("pre", ONE_PER_ROW)
def test_cuts_of_many_texts_equal_llama_cpp(pre: str, tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", **pair_vocab(pre, ALPHABET, WORDS))
    short = [text for text in TEXTS if len(text) < 500]
    compare(path, short + random_texts(1500, seed=6))


@pytest.mark.parametrize("pre", sorted(set(PRETOKENIZERS) - set(ONE_PER_ROW)))
def test_names_of_a_row_are_alike_in_llama_cpp(pre: str, tmp_path: Path) -> None:
    alphabet = "aAb's1 \n.é中½"
    path = write_vocab(tmp_path / "vocab.gguf", **pair_vocab(pre, alphabet, WORDS))
    snippets = (*alphabet, "123", "  ", " hello", "\n\n", "'S", "aA")
    chance = random.Random(7)
    compare(path, ["".join(chance.choices(snippets, k=20)) for _ in range(20)] + ["a . b 's c"])


def test_the_default_rules_hold_when_the_file_names_none(tmp_path: Path) -> None:
    vocab = pair_vocab("default", ALPHABET, WORDS)
    del vocab["pre"]
    compare(write_vocab(tmp_path / "vocab.gguf", **vocab), random_texts(50, seed=8))


def test_default_special_ids_equal_llama_cpp(tmp_path: Path) -> None:
    for pre in ("gpt-2", "chatglm-bpe", "glm4"):
        path = write_vocab(tmp_path / "vocab.gguf", **pair_vocab(pre, "ab", ()))
        ours, theirs = open_vocab(path).special, LlamaVocab(path)
        for role in ("bos", "eos"):
            found = getattr(ours, role)
            assert (-1 if found is None else found) == theirs.special_ids()[role], (pre, role)
        theirs.close()


def test_gemma_4_adds_bos_against_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocab = pair_vocab("gemma4", "ab", ())
    vocab["tokens"][5] = "<bos>"
    types = [CONTROL if token == "<bos>" else NORMAL for token in vocab["tokens"]]
    keys = {"bos_token_id": 5, "add_bos_token": False}
    path = write_vocab(tmp_path / "vocab.gguf", **vocab, types=types, **keys)
    theirs = LlamaVocab(path)
    assert open_vocab(path).tokenize("ab") == theirs.tokenize(b"ab", True, False)
    assert "add_bos_token" in caplog.text
    theirs.close()


def test_of_equal_merges_the_first_counts(tmp_path: Path) -> None:
    vocab = pair_vocab("gpt-2", "", ())
    vocab["tokens"] += ["ab", "bc"]
    vocab["merges"] = ["a b", "b c", "a b"]
    path = write_vocab(tmp_path / "vocab.gguf", **vocab)
    theirs = LlamaVocab(path)
    assert open_vocab(path).tokenize("abc") == theirs.tokenize(b"abc", True, False)
    theirs.close()


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    vocab = pair_vocab("gpt-2", "ab", ()) | {"pre": "no-such-cut"}
    path = write_vocab(tmp_path / "vocab.gguf", **vocab)
    with pytest.raises(ModelError, match="(?s)'no-such-cut'.*llama-bpe, .*qwen2, "):
        open_vocab(path)


def test_missing_merges_are_an_error_except_for_kimi(tmp_path: Path) -> None:
    vocab = pair_vocab("gpt-2", "ab", ()) | {"merges": None}
    with pytest.raises(ModelError, match="tokenizer.ggml.merges"):
        open_vocab(write_vocab(tmp_path / "gpt2.gguf", **vocab))
    path = write_vocab(tmp_path / "kimi.gguf", **vocab | {"pre": "kimi-k2"})
    theirs = LlamaVocab(path)
    assert open_vocab(path).tokenize("abba") == theirs.tokenize(b"abba", True, False)
    theirs.close()


@pytest.mark.parametrize("pre", ONE_PER_ROW)
def test_nothing_is_lost_between_the_pieces(pre: str) -> None:
    row = PRETOKENIZERS[pre]
    for text in random_texts(50, seed=9):
        for pattern in row.patterns:
            assert "".join(cut(regex.compile(pattern, regex.V1), text)) == text
