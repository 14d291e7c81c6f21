"""What GGUF metadata says about a vocabulary, checked and with llama.cpp's defaults."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.gguf_metadata import Metadata
from pyggml.llama.pretokenizers import PreTokenizer, find_pretokenizer
from pyggml.llama.special_tokens import BY_TYPE, Attribute

log = logging.getLogger("pyggml.vocab")
KEY = "tokenizer.ggml."


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one `tokenizer.ggml.model` stands for."""

    type: str
    ids: dict[str, int]
    add_bos: bool = False
    add_space_prefix: bool = False
    pre: str | None = None  # the only pre-tokenizer of the family


FAMILIES = {
    "llama": Family(
        type="spm", ids={"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_space_prefix=True
    ),
    "gpt2": Family(type="bpe", ids={"bos": 11, "eos": 11}),
    "whitespace": Family(type="bpe", ids={"bos": 11, "eos": 11}),
    "gemma4": Family(type="bpe", ids={}, pre="gemma4"),
}
UNSUPPORTED = {
    "bert": "WordPiece (WPM)",
    "t5": "Unigram (UGM)",
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "HybridDNA",
    "no_vocab": "no vocabulary at all",
    "none": "no vocabulary at all",
}


def find_family(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    known = ", ".join(f"{name} ({family.type.upper()})" for name, family in FAMILIES.items())
    problem = (
        f"tokenizer.ggml.model {name!r} is {UNSUPPORTED[name]}, which is not supported"
        if name in UNSUPPORTED
        else f"unknown tokenizer: {name!r} (key tokenizer.ggml.model)"
    )
    raise ModelError(f"{problem}\nsupported: {known}")


def find_pre(metadata: Metadata, family: Family) -> tuple[str, PreTokenizer]:
    """Name and row of the pre-tokenizer; it plays no part in SPM vocabularies."""
    name = family.pre or metadata.get_str(KEY + "pre", None)
    if family.type == "spm":
        return name or "default", find_pretokenizer("default")
    if name is None:
        log.warning(
            "%spre is missing, using 'default': the quality of text will suffer, "
            "consider converting the model anew",
            KEY,
        )
    pre = find_pretokenizer(name or "default")
    if pre.needs_merges and KEY + "merges" not in metadata:
        raise ModelError(f"cannot find tokenizer merges in model file (key {KEY}merges)")
    return name or "default", pre


def read_tokens(metadata: Metadata) -> list[bytes]:
    tokens = metadata.get_string_bytes(KEY + "tokens", None)
    if tokens is None:
        raise ModelError(f"cannot find tokenizer vocab in model file (key {KEY}tokens)")
    if b"" in tokens:
        for token in [token for token, text in enumerate(tokens) if not text]:
            log.warning("empty token at index %d", token)
            tokens[token] = b"[EMPTY_%d]" % token
    return tokens


def _read_numbers(metadata: Metadata, key: str, n_tokens: int) -> npt.NDArray[Any] | None:
    """One number per token, or None where the file has none."""
    numbers = metadata.get_array(KEY + key, None)
    if numbers is not None and len(numbers) < n_tokens:
        raise ModelError(
            f"{KEY}{key} has {len(numbers)} entries but there are {n_tokens} tokens: "
            "the file is damaged, convert the model anew"
        )
    return None if numbers is None else numbers[:n_tokens]


def read_scores(metadata: Metadata, n_tokens: int) -> npt.NDArray[np.float32]:
    scores = _read_numbers(metadata, "scores", n_tokens)
    return np.zeros(n_tokens, np.float32) if scores is None else scores.astype(np.float32)


def read_attributes(metadata: Metadata, n_tokens: int) -> npt.NDArray[np.int32]:
    types = _read_numbers(metadata, "token_type", n_tokens)
    if types is None:
        return np.full(n_tokens, Attribute.NORMAL, np.int32)
    known = (types >= 0) & (types < len(BY_TYPE))
    return np.array(BY_TYPE, np.int32)[np.where(known, types, 0)]


def read_add_bos(metadata: Metadata, family: Family, pre: PreTokenizer) -> bool:
    add_bos = metadata.get_bool(KEY + "add_bos_token", family.add_bos or pre.add_bos)
    if pre.always_bos and not add_bos:
        log.warning("%sadd_bos_token is taken as true: models of this tokenizer need BOS", KEY)
    return add_bos or pre.always_bos
