"""Byte-pair encoding: text is cut into words; in each, the best-ranked pair merges first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyggml.llama.merge import merge, remember_words
from pyggml.llama.pretokenizers import PreTokenizer
from pyggml.llama.utf8 import SPACE, characters, to_text

if TYPE_CHECKING:
    import regex


def _printable_bytes() -> list[str]:
    """GPT-2's character for every byte: itself if it prints, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARACTERS = _printable_bytes()
CHARACTER_BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
_SPELLED = [character.encode() for character in BYTE_CHARACTERS]


def rank_merges(merges: Sequence[bytes]) -> dict[bytes, int]:
    """`left right` -> rank; of equal merges the first counts."""
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))


def cut(pattern: regex.Pattern[str], text: str) -> list[str]:
    """Matches of the pattern and the gaps between them, in order; nothing is lost."""
    matches = list(pattern.finditer(text))
    if len(matches) > 1 and matches[0].start() > matches[-1].start():
        matches.reverse()
    pieces, end = [], 0
    for match in matches:
        if match.start() > end:
            pieces.append(text[end : match.start()])
        pieces.append(match.group())
        end = match.end()
    if end < len(text):
        pieces.append(text[end:])
    return pieces


def _cut_at_spaces(piece: str) -> list[str]:
    """Words that each begin with U+2581; a run of newlines stays whole."""
    if not piece.strip("\n"):
        return [piece]
    return ["\u2581" + word for word in piece.removeprefix("\u2581").split("\u2581")]


def spelled_bytes(text: bytes) -> bytes:
    """The bytes a byte-level token stands for; a character that stands for none is named."""
    out = b""
    for character in text.decode("utf-8", "surrogateescape"):
        byte = CHARACTER_BYTES.get(character)
        if byte is None:
            raw = character.encode("utf-8", "surrogateescape")
            out += b"[UNK_BYTE_0x" + raw.hex().encode() + text + b"]"
        else:
            out += b"%c" % byte
    return out


class BpeTokenizer:
    """Tokenizes text that holds no special tokens; safe to use from several threads."""

    def __init__(
        self, token_to_id: Mapping[bytes, int], merges: Sequence[bytes], pre: PreTokenizer
    ) -> None:
        import regex

        self._ids = token_to_id
        self._ranks = rank_merges(merges)
        self._pre = pre
        self._passes = [regex.compile(p, regex.V1) for p in pre.patterns]
        self._encode = remember_words(self._word)

    def tokenize(self, data: bytes) -> list[int]:
        """Ids of UTF-8 text."""
        if self._pre.escape_spaces:
            data = data.replace(b" ", SPACE)
        ids: list[int] = []
        for word in self._words(to_text(data)):
            ids.extend(self._encode(word))
        return ids

    def _words(self, text: str) -> Iterable[str]:
        """The pieces that merges must not cross."""
        if self._pre.drop_gaps:
            return [word for pattern in self._passes for word in pattern.findall(text)]
        pieces = [text]
        for pattern in self._passes:
            pieces = [part for piece in pieces for part in cut(pattern, piece)]
        if self._pre.cut_at_spaces:
            return [word for piece in pieces for word in _cut_at_spaces(piece)]
        return pieces

    def _word(self, word: str) -> tuple[int, ...]:
        raw = word.encode()
        symbols = [_SPELLED[b] for b in raw] if self._pre.byte_encode else characters(raw)
        if self._pre.ignore_merges or (self._pre.newlines_whole and not word.strip("\n")):
            token = self._ids.get(b"".join(symbols))
            if token is not None:
                return (token,)
        return tuple(self._emit(merge(symbols, self._rank)))

    def _rank(self, left: bytes, right: bytes) -> int | None:
        return self._ranks.get(left + b" " + right)

    def _emit(self, symbols: Iterable[bytes]) -> Iterable[int]:
        """Ids of merged symbols; what is no token falls apart into bytes, which may have none."""
        for symbol in symbols:
            token = self._ids.get(symbol)
            if token is not None:
                yield token
                continue
            for byte in symbol:
                spelling = b"%c" % byte if self._pre.byte_encode else b"<0x%02X>" % byte
                if spelling in self._ids:
                    yield self._ids[spelling]
