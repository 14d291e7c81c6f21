"""SentencePiece: neighbours whose concatenation is a token merge, the best score first."""

import re
from collections.abc import Mapping, Sequence

from pyggml.errors import ModelError
from pyggml.llama.merge import merge, remember_words
from pyggml.llama.utf8 import SPACE, characters, is_utf8


def word_boundaries(tokens: Sequence[bytes]) -> re.Pattern[bytes]:
    """Matches the empty string where text can be cut without changing its tokens.

    A cut before U+2581 is safe when no token holds U+2581 after the byte before the cut: nothing
    can merge across it. Cutting makes words, and words repeat.
    """
    parts = b"\xff".join([*tokens, SPACE]).split(SPACE)
    before = {part[-1:] or SPACE[-1:] for part in parts}  # \xff where a token begins
    joining = b"".join(b"\\x%02x" % byte[0] for byte in before)
    return re.compile(rb"(?<=[^%s])(?=%s)" % (joining, SPACE))


class SpmTokenizer:
    """Tokenizes text that holds no special tokens; safe to use from several threads."""

    def __init__(self, token_to_id: Mapping[bytes, int], scores: Sequence[float]) -> None:
        self._ids = token_to_id
        self._scores = scores
        self._boundaries = word_boundaries(list(token_to_id))
        self._encode = remember_words(self._word)

    def tokenize(self, data: bytes) -> list[int]:
        """Ids of UTF-8 text; spaces become U+2581."""
        data = data.replace(b" ", SPACE)
        ids: list[int] = []
        for word in self._boundaries.split(data) if is_utf8(data) else [data]:
            ids.extend(self._encode(word))
        return ids

    def _word(self, word: bytes) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in merge(characters(word), self._badness):
            token = self._ids.get(symbol)
            ids += [token] if token is not None else map(self._byte_token, symbol)
        return tuple(ids)

    def _byte_token(self, byte: int) -> int:
        for text in (b"<0x%02X>" % byte, b"%c" % byte):
            if text in self._ids:
                return self._ids[text]
        raise ModelError(
            f"the vocabulary has no token for byte 0x{byte:02X}, so this text cannot be tokenized\n"
            f"a complete SPM vocabulary holds <0x00> to <0xFF>"
        )

    def _badness(self, left: bytes, right: bytes) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]
