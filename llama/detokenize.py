"""From tokens back to text: byte spellings, clean-up of spaces, incomplete characters."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyggml.llama.vocab import Vocab

_CLEAN_UP = (
    (re.compile(rb" (?=[?!.,])"), b""),
    (re.compile(rb" ' "), b"'"),
    (re.compile(rb" (?='(?:[sm]|re|ve))"), b""),
)
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


def clean_up_spaces(data: bytes) -> bytes:
    """Drop the spaces before punctuation and English contractions that old tokenizers put there."""
    for pattern, replacement in _CLEAN_UP:
        data = pattern.sub(replacement, data)
    return data


def byte_token_value(text: bytes) -> bytes:
    """The byte of a token spelled <0xXX>; any other spelling stays as it is."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes.fromhex(match[1].decode()) if match else text


class Utf8Stream:
    """Turns bytes that arrive in arbitrary pieces into text, holding back incomplete characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that is complete now; bytes that can never be UTF-8 become U+FFFD."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back, as U+FFFD; the stream can be used anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class Detokenizer:
    """Text of a generation, token by token.

    Unlike `Vocab.detokenize` it neither strips nor cleans up spaces: what was shown stays shown.
    """

    def __init__(self, vocab: Vocab, *, special: bool = False) -> None:
        self._vocab = vocab
        self._special = special
        self._stream = Utf8Stream()

    def push(self, token: int) -> str:
        """The text that this token completes, often all of its own, sometimes none."""
        return self._stream.push(self._vocab.token_to_piece(token, special=self._special))

    def flush(self) -> str:
        """What an unfinished character left behind, as U+FFFD."""
        return self._stream.flush()
