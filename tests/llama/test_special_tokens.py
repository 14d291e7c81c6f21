"""Special tokens: where they are found in text, which end a generation, what they print as."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_vocab import (
    BYTE,
    BYTE_TOKENS,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    open_vocab,
    pair_vocab,
    write_vocab,
)
from tokenizer_oracle import LlamaVocab

from pyggml.errors import ModelError, UserError
from pyggml.llama.special_tokens import BY_TEXT, ENDS, SHOWN
from pyggml.llama.vocab import Vocab

# overlapping on purpose: the longest is found first, wherever it stands
MARKS = {
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<unk>": UNKNOWN,
    "<a": USER_DEFINED,
    "<ab>": CONTROL,
    "b><": USER_DEFINED,
    "  x": USER_DEFINED,
    "é<": USER_DEFINED,
    "\n\n": USER_DEFINED,
    "<mask>": CONTROL,
    "<|endoftext|>": CONTROL,
    "<unused3>": CONTROL,
    "<longest>": CONTROL,
    "on<x>": USER_DEFINED,
    "<lon": USER_DEFINED,
}
WORDS = "he ll hell hello ▁hello ▁h ab ba ▁a b▁ ▁▁ s> ▁<"
SNIPPETS = (*MARKS, *"<>ab| \n\té", "s>", "  ", "hello", "<un", "k>", "|>", "<lon<x>", "gest>")


def bpe_vocab(**keys: Any) -> dict[str, Any]:
    """Byte-level BPE with the marks."""
    vocab = pair_vocab("gpt-2", "abé> \n", ())
    types = [NORMAL] * len(vocab["tokens"]) + list(MARKS.values())
    vocab["tokens"] += MARKS
    return vocab | {"types": types} | keys


def spm_vocab(**keys: Any) -> dict[str, Any]:
    """SentencePiece with the marks, equal scores among its words and every kind of token."""
    words = [*"▁heloabsx<>é", *WORDS.split()]
    tokens = [*MARKS, *BYTE_TOKENS, *words, "lo", "oh", "<aba"]
    types = [*MARKS.values(), *[BYTE] * 256, *[NORMAL] * len(words), UNUSED, 0, UNUSED]
    scores = [-float(len(token) % 3) for token in tokens]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}
    return {"model": "llama", "tokens": tokens, "types": types, "scores": scores} | ids | keys


VOCABS: dict[str, dict[str, Any]] = {
    "bpe": bpe_vocab(),
    "bpe-bos-eos": bpe_vocab(add_bos_token=True, add_eos_token=True),
    "bpe-space-prefix": bpe_vocab(add_space_prefix=True),
    "spm": spm_vocab(),
    "spm-no-prefix": spm_vocab(add_space_prefix=False, add_eos_token=True),
    "spm-no-bos": spm_vocab(add_bos_token=False),
    "phi-3": spm_vocab(name="Phi-3 mini"),
    "modern-bert": bpe_vocab(name="Modern-BERT"),
    "jina": bpe_vocab(pre="jina-v2-de"),
}


@pytest.mark.parametrize("name", VOCABS)
def test_text_with_special_tokens_equals_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", **VOCABS[name])
    ours, theirs = open_vocab(path), LlamaVocab(path)
    assert ours.attributes.tolist() == theirs.attributes()
    chance = random.Random(3)
    for _ in range(300):
        text = "".join(chance.choices(SNIPPETS, k=chance.choice((1, 2, 3, 8, 20))))
        for add, parse in product((False, True), repeat=2):
            ids = ours.tokenize(text, add_special=add, parse_special=parse)
            assert ids == theirs.tokenize(text.encode(), add, parse), f"{text!r} {add} {parse}"
            back = ours.detokenize(ids, remove_special=add, unparse_special=parse)
            assert back == theirs.detokenize(ids, add, parse).decode("utf-8", "replace")
    theirs.close()


@pytest.mark.parametrize("name", ["bpe", "spm"])
def test_pieces_of_every_kind_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    odd = ["Ġa b", "\u0144", "\u2581x", "é\u2581", "中"]
    vocab = VOCABS[name] | {"tokens": VOCABS[name]["tokens"] + odd}
    vocab["types"] = vocab["types"] + [NORMAL] * len(odd)
    if "scores" in vocab:
        vocab["scores"] = vocab["scores"] + [0.0] * len(odd)
    path = write_vocab(tmp_path / "vocab.gguf", **vocab)
    ours, theirs = open_vocab(path), LlamaVocab(path)
    for token, special in product(range(ours.n_tokens), (False, True)):
        assert ours.token_to_piece(token, special=special) == theirs.piece(token, special)
    theirs.close()


GROUPS = [
    *[[text] for texts in (*BY_TEXT.values(), ENDS, SHOWN) for text in texts.split()],
    ["<|return|>", "<|call|>", "<|end|>"],
    ["<|return|>", "<|calls|>", "<|end|>"],
    ["<|call|>", "<|flush|>", "<|end|>"],
    ["<|calls|>", "<|flush|>", "<|end|>"],
    ["<|return|>", "<|end|>"],
    ["<|call|>", "<|end|>"],
    ["<|flush|>", "<|end|>"],
    ["<|tool_response>", "</s>"],
    ["<|plamo:eos|>", "</s>"],
    ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>", "<|call|>"],
]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_roles_and_ends_by_text_equal_llama_cpp(kind: int, tmp_path: Path) -> None:
    base = pair_vocab("gpt-2", "ab", ())
    for texts in GROUPS:
        tokens = base["tokens"] + texts
        types = [NORMAL] * len(base["tokens"]) + [kind] * len(texts)
        keys = {"bos_token_id": 3, "eos_token_id": len(tokens) - 1}
        for end in (4, len(tokens) - 1):
            keys["eos_token_id"] = end
            vocab = base | {"tokens": tokens, "types": types} | keys
            path = write_vocab(tmp_path / "vocab.gguf", **vocab)
            ours, theirs = open_vocab(path), LlamaVocab(path)
            assert ours.eog == theirs.eog(), texts
            assert ours.attributes.tolist() == theirs.attributes(), texts
            special = theirs.special_ids()
            # among several ends llama.cpp takes as EOT what its hash map meets first
            for role in special.keys() - ({"nl"} if len(texts) == 1 else {"nl", "eot"}):
                found = getattr(ours.special, role)
                assert (-1 if found is None else found) == special[role], (texts, role)
            theirs.close()


def test_ids_from_the_file_equal_llama_cpp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = pair_vocab("gpt-2", "ab", ())
    keys = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
    keys += tuple(f"fim_{part}" for part in ("pre", "suf", "mid", "pad", "rep", "sep"))
    named = {f"{key}_token_id": 20 + i for i, key in enumerate(keys)}
    old = {"prefix_token_id": 50, "suffix_token_id": 51, "middle_token_id": 52}
    for ids in (named, named | old, old, {"bos_token_id": 99999, "eos_token_id": 99999}):
        path = write_vocab(tmp_path / "vocab.gguf", **base, **ids)
        ours, theirs = open_vocab(path), LlamaVocab(path)
        special = theirs.special_ids()
        assert special.pop("nl") == ours.newline
        for role, expected in special.items():
            found = getattr(ours.special, role)
            assert (-1 if found is None else found) == expected, (ids, role)
        assert ours.eog == theirs.eog()
        theirs.close()
    assert "99999" in caplog.text


def test_two_bos_tokens_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocab = open_vocab(write_vocab(tmp_path / "vocab.gguf", **VOCABS["spm"]))
    assert vocab.tokenize("<s>a", parse_special=True)[:2] == [0, 0]
    assert "two" in caplog.text


@pytest.mark.parametrize("newline", ["<0x0A>", "\n", "a"])
def test_the_newline_token_equals_llama_cpp(newline: str, tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<unk>", newline]
    path = write_vocab(tmp_path / "vocab.gguf", model="llama", tokens=tokens, padding_token_id=2)
    ours, theirs = open_vocab(path).newline, LlamaVocab(path)
    assert (-1 if ours is None else ours) == theirs.special_ids()["nl"]
    theirs.close()


def test_suppressed_tokens_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<s>", "</s>", "<unk>"])
    writer.add_array("tokenizer.ggml.suppress_tokens", [2, -1, 7, 0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert open_vocab(path).suppressed == (2, 0)


def spm(tmp_path: Path, tokens: list[str | bytes], **keys: Any) -> Vocab:
    return open_vocab(write_vocab(tmp_path / "v.gguf", model="llama", tokens=tokens, **keys))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "none"])
def test_unsupported_families_are_named(model: str, tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", model=model, tokens=["a"])
    with pytest.raises(ModelError, match=f"'{model}' is .*not supported\nsupported: llama"):
        open_vocab(path)


def test_an_unknown_family_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", model="runes", tokens=["a"])
    with pytest.raises(ModelError, match=r"'runes'.*\nsupported: llama \(SPM\), gpt2 \(BPE\)"):
        open_vocab(path)


def test_damaged_vocabularies_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"scores has 1 entries but there are 2 tokens"):
        spm(tmp_path, ["a", "b"], scores=[0.0])
    with pytest.raises(ModelError, match=r"token_type has 1 entries but there are 2 tokens"):
        spm(tmp_path, ["a", "b"], types=[1])
    with pytest.raises(ModelError, match="'same' more than once"):
        spm(tmp_path, ["same", "b", "same"]).tokenize("same")


def test_a_byte_without_a_token_is_an_error(tmp_path: Path) -> None:
    vocab = spm(tmp_path, ["<s>", "</s>", "<unk>", "a", "<0xC3>", "\u2581"])
    assert vocab.tokenize("a", add_special=False) == [5, 3]
    with pytest.raises(ModelError, match="byte 0xA9"):
        vocab.tokenize("é")


def test_empty_tokens_get_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert spm(tmp_path, ["<s>", "", "a"]).text(1) == "[EMPTY_1]"
    assert "index 1" in caplog.text


@pytest.mark.parametrize("token", [-1, 3])
def test_ids_outside_the_vocabulary_are_errors(token: int, tmp_path: Path) -> None:
    vocab = spm(tmp_path, ["<s>", "</s>", "a"])
    for ask in (vocab.text, lambda token: vocab.detokenize([token])):
        with pytest.raises(UserError, match=rf"token {token} .* 0\.\.2"):
            ask(token)
