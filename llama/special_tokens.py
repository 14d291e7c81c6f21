"""Tokens with a meaning of their own: which they are, which end a generation, where they occur."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from pyggml.gguf_metadata import Metadata

log = logging.getLogger("pyggml.vocab")


class Attribute(IntFlag):
    """What kind of token it is; the bits are llama.cpp's."""

    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 128
    RSTRIP = 256


A = Attribute
Attributes = npt.NDArray[np.int32]
SPECIAL = A.CONTROL | A.USER_DEFINED | A.UNKNOWN  # found in text before any tokenizing
HIDDEN = A.CONTROL | A.UNKNOWN  # neither parsed nor printed unless asked for
BY_TYPE = (0, A.NORMAL, A.UNKNOWN, A.CONTROL, A.USER_DEFINED, A.UNUSED, A.BYTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids by role; None where a vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None


ROLES = tuple(field.name for field in fields(SpecialIds))

# Keys under tokenizer.ggml. in the order they are read: a later one wins.
KEYS = (
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("eot", "eot_token_id"),
    ("eom", "eom_token_id"),
    ("unk", "unknown_token_id"),
    ("sep", "seperator_token_id"),
    ("pad", "padding_token_id"),
    ("mask", "mask_token_id"),
    ("fim_pre", "fim_pre_token_id"),
    ("fim_suf", "fim_suf_token_id"),
    ("fim_mid", "fim_mid_token_id"),
    ("fim_pad", "fim_pad_token_id"),
    ("fim_rep", "fim_rep_token_id"),
    ("fim_sep", "fim_sep_token_id"),
    ("fim_pre", "prefix_token_id"),
    ("fim_suf", "suffix_token_id"),
    ("fim_mid", "middle_token_id"),
)

# Texts that fill a role the file leaves open, the first that exists.
BY_TEXT = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> "
    "[EOT] <｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> "
    "<|code_prefix|> <|prefix|> <|plamo:fim_prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|> <|plamo:fim_suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> "
    "<|code_middle|> <|middle|> <|plamo:fim_middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|> <|plamo:file_separator|>",
}
ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ <|ifm|im_end|>"
)
SHOWN = "<|channel|> <|message|> <|start|> <|constrain|>"  # gpt-oss prints its channel marks
_OTHERS = "<|plamo:eos|> <mask> [MASK] <unk> <s>"
NAMED = frozenset(
    text.encode() for texts in (*BY_TEXT.values(), ENDS, SHOWN, _OTHERS) for text in texts.split()
)


def find_named(tokens: Sequence[bytes]) -> dict[str, int]:
    """Ids of the texts that the rules of this file ask for."""
    return {text.decode(): token for token, text in enumerate(tokens) if text in NAMED}


def read_ids(metadata: Metadata, defaults: Mapping[str, int], n_tokens: int) -> dict[str, int]:
    """Role -> id from the keys of a file, with the defaults of its tokenizer family."""
    ids = {role: token for role, token in defaults.items() if token < n_tokens}
    for role, key in KEYS:
        token = metadata.get_int(f"tokenizer.ggml.{key}", None)
        if token is None:
            continue
        if token < n_tokens:
            ids[role] = token
        else:
            log.warning("bad special token: '%s' = %d, using %s", key, token, ids.get(role))
    return ids


def discover(ids: dict[str, int], named: Mapping[str, int], attributes: Attributes) -> None:
    """Fill open roles by text; a token found so is a control token whatever its type says."""
    for role, texts in BY_TEXT.items():
        found = [named[text] for text in texts.split() if text in named]
        if role not in ids and found:
            ids[role] = found[0]
            attributes[found[0]] |= A.CONTROL


def end_tokens(
    ids: Mapping[str, int], named: Mapping[str, int], attributes: Attributes
) -> frozenset[int]:
    """The tokens that end a generation (EOG), by role and by text."""
    ends = {ids[role] for role in ("fim_pad", "fim_rep", "fim_sep") if role in ids}
    for text in ENDS.split():
        if text in named:
            ends.add(named[text])
            attributes[named[text]] |= A.CONTROL
    for text in SHOWN.split():
        if text in named:
            attributes[named[text]] = A.USER_DEFINED
    ends |= {ids[role] for role in ("eos", "eot", "eom") if role in ids}
    return frozenset(ends - set(_not_ends(ends, named, attributes)))


def _not_ends(ends: set[int], named: Mapping[str, int], attributes: Attributes) -> Iterator[int]:
    """Tokens that look like an end but separate messages, or are plain text, in some models."""

    def both(*texts: str) -> bool:
        return all(named.get(text) in ends for text in texts)

    calls = both("<|call|>") or both("<|calls|>")
    if calls and both("<|end|>") and (both("<|return|>") or both("<|flush|>")):
        attributes[named["<|end|>"]] = A.USER_DEFINED
        yield named["<|end|>"]
    if both("</s>") and (both("<|tool_response>") or both("<|plamo:eos|>")):
        attributes[named["</s>"]] = A.NORMAL
        yield named["</s>"]


def mark_unused(tokens: Sequence[bytes], attributes: Attributes) -> None:
    """Control tokens that call themselves unused."""
    control = np.flatnonzero(attributes & A.CONTROL).tolist()
    attributes[[token for token in control if b"unused" in tokens[token]]] |= A.UNUSED


def mark_stripping(
    metadata: Metadata, pre: str, named: Mapping[str, int], attributes: Attributes
) -> None:
    """Set which special tokens swallow the white space next to them; files do not say it."""
    arch = metadata.get_str("general.architecture", "")
    name = metadata.get_str("general.name", "").lower()

    def among(text: str, parts: str) -> bool:
        return any(part in text for part in parts.split())

    def mark(attribute: Attribute, on: Iterable[int | None]) -> None:
        attributes[[token for token in on if token is not None]] |= attribute

    if among(pre, "jina-v2-de jina-v2-es jina-v2-code mmbert") or among(
        arch, "nomic-bert-moe jina-bert-v3"
    ):
        mark(A.LSTRIP, [named.get("<mask>")])
    elif among(name, "phi-3 phi3"):
        mark(A.RSTRIP, [*np.flatnonzero(attributes & SPECIAL).tolist(), named.get("</s>")])
        for text in ("<unk>", "<s>", "<|endoftext|>"):
            if text in named:
                attributes[named[text]] &= ~A.RSTRIP
    elif among(name, "modern-bert"):
        mark(A.LSTRIP, [named.get("[MASK]")])


_SPACE = re.compile(rb"[ \t\n\v\f\r]+")


@dataclass(frozen=True, slots=True, order=True)
class _Mark:
    """A special token as it is looked for; sorts in the order of search."""

    order: int
    id: int
    text: bytes
    attribute: Attribute

    def split(self, fragment: bytes) -> Iterator[bytes | int]:
        """The text around every occurrence, and the token's id between."""
        start = 0
        while (found := fragment.find(self.text, start)) >= 0:
            left = fragment[start:found]
            if self.attribute & A.LSTRIP:
                left = left.rstrip()
            if left:
                yield left
            yield self.id
            start = found + len(self.text)
            if self.attribute & A.RSTRIP and (space := _SPACE.match(fragment, start)):
                start = space.end()
        if start < len(fragment):
            yield fragment[start:]


class SpecialFinder:
    """Cuts text at special tokens, the longest of them first wherever it stands."""

    _PREFIX = 4  # bytes; vocabularies hold thousands of <unusedN>: most are ruled out together

    def __init__(self, tokens: Sequence[bytes], attributes: Attributes) -> None:
        special = np.flatnonzero(attributes & SPECIAL).tolist()
        special.sort(key=lambda token: len(tokens[token]), reverse=True)
        self._groups: dict[bytes, list[_Mark]] = defaultdict(list)
        for order, token in enumerate(special):
            mark = _Mark(order, token, tokens[token], Attribute(int(attributes[token])))
            self._groups[mark.text[: self._PREFIX]].append(mark)

    def partition(self, data: bytes, parse_special: bool) -> list[bytes | int]:
        """Raw text and token ids in order; user-defined tokens are always found."""
        present = [
            mark
            for prefix, group in self._groups.items()
            if prefix in data
            for mark in group
            if mark.text in data and (parse_special or not mark.attribute & HIDDEN)
        ]
        fragments: list[bytes | int] = [data] if data else []
        for mark in sorted(present):
            fragments = [
                part
                for fragment in fragments
                for part in (mark.split(fragment) if isinstance(fragment, bytes) else (fragment,))
            ]
        return fragments
