"""Small vocabularies in GGUF files without tensors: enough to tokenize, here and in llama.cpp."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pyggml.gguf import open_gguf
from pyggml.llama.pretokenizers import PRETOKENIZERS
from pyggml.llama.tokenize_bpe import BYTE_CHARACTERS
from pyggml.llama.vocab import Vocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def write_vocab(
    path: Path,
    *,
    model: str,
    tokens: Sequence[str | bytes],
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    name: str = "",
    **keys: Any,
) -> Path:
    """Write a vocabulary; `keys` are names below `tokenizer.ggml.` with int, bool or str values."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if types is not None:
        writer.add_token_types(list(types))
    if scores is not None:
        writer.add_token_scores(list(scores))
    if merges is not None:
        writer.add_token_merges(list(merges))
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in keys.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def open_vocab(path: Path) -> Vocab:
    """The vocabulary of a file."""
    with open_gguf(path) as file:
        return Vocab.from_metadata(file.metadata)


def spell(text: str, byte_level: bool) -> str:
    """Text as a vocabulary writes it."""
    if byte_level:
        return "".join(BYTE_CHARACTERS[byte] for byte in text.encode())
    return text.replace(" ", "\u2581")


def pair_vocab(pre: str, alphabet: Iterable[str], words: Iterable[str]) -> dict[str, Any]:
    """A BPE vocabulary in which any two neighbours merge, so that every cut can be seen.

    Its tokens are the bytes, the characters of `alphabet`, all pairs of them, and `words`, which
    no merge reaches.
    """
    byte_level = PRETOKENIZERS[pre].byte_encode
    tokens = list(BYTE_CHARACTERS) if byte_level else list(BYTE_TOKENS)
    units = [spell(character, byte_level) for character in sorted(set(alphabet))]
    merges = [f"{unit[:n]} {unit[n]}" for unit in units for n in range(1, len(unit))]
    tokens += [unit[:n] for unit in units for n in range(1, len(unit) + 1)]
    pairs = list(product(units, units))
    random.Random(1).shuffle(pairs)
    merges += [f"{left} {right}" for left, right in pairs]
    tokens += [left + right for left, right in pairs]
    tokens += [spell(word, byte_level) for word in words]
    return {
        "model": pre if pre in ("gemma4", "whitespace") else "gpt2",
        "pre": pre,
        "tokens": list(dict.fromkeys(tokens)),
        "merges": list(dict.fromkeys(merges)),
    }
