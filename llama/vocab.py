"""The vocabulary of a model: text to token ids and back, as llama.cpp does it."""

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, UserError
from pyggml.gguf_metadata import Metadata
from pyggml.llama.detokenize import byte_token_value, clean_up_spaces
from pyggml.llama.pretokenizers import find_pretokenizer
from pyggml.llama.special_tokens import (
    HIDDEN,
    SPECIAL,
    Attribute,
    SpecialFinder,
    SpecialIds,
    discover,
    end_tokens,
    find_named,
    mark_stripping,
    mark_unused,
    read_ids,
)
from pyggml.llama.tokenize_bpe import BpeTokenizer, spelled_bytes
from pyggml.llama.tokenize_spm import SpmTokenizer
from pyggml.llama.utf8 import SPACE, to_bytes
from pyggml.llama.vocab_metadata import (
    KEY,
    find_family,
    find_pre,
    read_add_bos,
    read_attributes,
    read_scores,
    read_tokens,
)

log = logging.getLogger("pyggml.vocab")


class _Tokenizer(Protocol):
    def tokenize(self, data: bytes) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Vocab:
    """Tokens of a model and the rules to split text into them.

    Lookup tables are built at the first `tokenize`; turning ids into text needs none.
    """

    type: str  # "spm" or "bpe"
    pre: str  # pre-tokenizer name; BPE only
    tokens: Sequence[bytes]  # id -> text as the file spells it
    scores: npt.NDArray[np.float32]  # [n_tokens]
    attributes: npt.NDArray[np.int32]  # [n_tokens] bits of Attribute
    special: SpecialIds
    eog: frozenset[int]  # ids that end a generation
    add_bos: bool
    add_eos: bool
    add_sep: bool
    add_space_prefix: bool
    escape_spaces: bool  # tokens spell a space as U+2581
    clean_spaces: bool  # detokenizing drops spaces before punctuation
    suppressed: tuple[int, ...]  # ids a sampler must never choose
    metadata: Metadata

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> "Vocab":
        """Read `tokenizer.ggml.*`; a vocabulary that cannot be used is a ModelError."""
        family = find_family(metadata.get_str(KEY + "model"))
        pre_name, pre = find_pre(metadata, family)
        tokens = read_tokens(metadata)
        attributes = read_attributes(metadata, len(tokens))
        defaults = dict(family.ids)
        if not pre.default_bos:
            defaults.pop("bos", None)
        ids = read_ids(metadata, defaults, len(tokens))
        named = find_named(tokens)
        discover(ids, named, attributes)
        eog = end_tokens(ids, named, attributes)
        mark_unused(tokens, attributes)
        mark_stripping(metadata, pre_name, named, attributes)
        attributes.flags.writeable = False
        suppressed = metadata.get_ints(KEY + "suppress_tokens", ())
        return cls(
            type=family.type,
            pre=pre_name,
            tokens=tokens,
            scores=read_scores(metadata, len(tokens)),
            attributes=attributes,
            special=SpecialIds(**ids),
            eog=eog,
            add_bos=read_add_bos(metadata, family, pre),
            add_eos=metadata.get_bool(KEY + "add_eos_token", False),
            add_sep=metadata.get_bool(KEY + "add_sep_token", False),
            add_space_prefix=metadata.get_bool(KEY + "add_space_prefix", family.add_space_prefix),
            escape_spaces=family.type == "spm" or pre.escape_spaces,
            clean_spaces=family.type == "bpe" and pre.clean_spaces,
            suppressed=tuple(int(i) for i in suppressed if 0 <= i < len(tokens)),
            metadata=metadata,
        )

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    def is_eog(self, token: int) -> bool:
        """Whether a generation ends with this token."""
        return token in self.eog

    def text(self, token: int) -> str:
        """A token as the file spells it, for people to read."""
        return self._check(token).decode("utf-8", "replace")

    def find(self, text: str) -> int | None:
        """The token with exactly this spelling."""
        return self.token_to_id.get(to_bytes(text))

    @functools.cached_property
    def newline(self) -> int | None:
        """The token of a line break, if there is one."""
        if self.type == "spm":
            return self.token_to_id.get(b"<0x0A>", self.token_to_id.get(b"\n"))
        return next(iter(self._tokenizer.tokenize(b"\n")), None)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of a text.

        `add_special` adds BOS and EOS as the model wants them. `parse_special` finds control
        tokens written out in the text; user-defined ones are always found.
        """
        bos = self.special.bos if add_special and self.add_bos else None
        eos = self.special.eos if add_special and self.add_eos else None
        ids = [] if bos is None else [bos]
        after_special = True
        for fragment in self._specials.partition(to_bytes(text), parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                prefix = b" " if after_special and self._prefixes_space else b""
                ids += self._tokenizer.tokenize(prefix + fragment)
            after_special = isinstance(fragment, int)
        if bos is not None and ids[1:2] == [bos]:
            log.warning("the prompt begins with a BOS token of its own, so it now begins with two")
        return ids if eos is None else [*ids, eos]

    def token_to_piece(self, token: int, *, special: bool) -> bytes:
        """The bytes a token stands for, which may be part of a character only.

        Without `special`, control tokens stand for nothing.
        """
        text, attribute = self._check(token), int(self.attributes[token])
        if attribute & HIDDEN and not special:
            return b""
        if attribute & SPECIAL:
            return text
        if attribute & Attribute.NORMAL:
            return text.replace(SPACE, b" ") if self.escape_spaces else spelled_bytes(text)
        if attribute & Attribute.BYTE:
            return byte_token_value(text)
        return b""

    def detokenize(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True
    ) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        `remove_special` drops the BOS and EOS that `add_special` adds; `unparse_special` writes
        control tokens out.
        """
        tokens, strip = list(ids), self.add_space_prefix
        if remove_special and self.add_bos and tokens[:1] == [self.special.bos]:
            tokens, strip = tokens[1:], False
        if remove_special and self.add_eos and tokens[-1:] == [self.special.eos]:
            tokens.pop()
        pieces = [self.token_to_piece(token, special=unparse_special) for token in tokens]
        if strip and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        data = b"".join(pieces)
        return (clean_up_spaces(data) if self.clean_spaces else data).decode("utf-8", "replace")

    @functools.cached_property
    def token_to_id(self) -> dict[bytes, int]:
        """Spelling -> id."""
        ids = {text: token for token, text in enumerate(self.tokens)}
        if len(ids) < self.n_tokens:
            repeated = next(text for token, text in enumerate(self.tokens) if ids[text] != token)
            raise ModelError(
                f"{KEY}tokens holds {repeated.decode('utf-8', 'replace')!r} more than once: "
                "the file is damaged, convert the model anew"
            )
        return ids

    @functools.cached_property
    def _specials(self) -> SpecialFinder:
        return SpecialFinder(self.tokens, self.attributes)

    @functools.cached_property
    def _tokenizer(self) -> _Tokenizer:
        if self.type == "spm":
            return SpmTokenizer(self.token_to_id, self.scores.tolist())
        merges = self.metadata.get_string_bytes(KEY + "merges", [])
        return BpeTokenizer(self.token_to_id, merges, find_pretokenizer(self.pre))

    @property
    def _prefixes_space(self) -> bool:
        return self.type == "spm" and self.add_space_prefix

    def _check(self, token: int) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise UserError(
                f"token {token} is not in the vocabulary: ids are 0..{self.n_tokens - 1}"
            )
        return self.tokens[token]
