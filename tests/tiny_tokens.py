"""Small vocabularies for the models of tiny.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocab:
    """Tokens in the order of their ids, and the "tokenizer." keys."""

    tokens: list[str]
    metadata: dict[str, Any]


# In order of rank; each is two earlier tokens (or letters), a space being written as "_".
MERGES = (
    "_ t|h e|a n|i n|_t he|_ a|r e|o n|e r|an d|_a nd|_ s|_ w|e n|in g|o r|_ o|_o f|i s|_ b|a t"
    "|e s|_ c|i t|_t o|_ f|_ i|_i n|o u|_ y|_y ou|l l|e d|h a|_w or|l d|_wor ld|H e|ll o|He llo"
)
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def bpe(pre: str, add_bos: bool) -> Vocab:
    """Byte-level BPE: the 256 bytes, the merges, four control tokens."""
    merges = MERGES.replace("_", letter_of_byte(ord(" "))).split("|")
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    normal = [letter_of_byte(byte) for byte in range(256)]
    normal += [merge.replace(" ", "") for merge in merges]
    n = len(normal)
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": normal + control,
        "ggml.token_type": [NORMAL] * n + [CONTROL] * len(control),
        "ggml.merges": merges,
        "ggml.bos_token_id": n,
        "ggml.eos_token_id": n + 3,
        "ggml.add_bos_token": add_bos,
        "chat_template": CHATML,
    }
    return Vocab(normal + control, metadata)


def letter_of_byte(byte: int) -> str:
    """The visible letter that stands for a byte in a GPT-2 vocabulary.

    Printable Latin-1 bytes stand for themselves, the 68 others for U+0100 onwards.
    """
    hidden = [*range(33), *range(127, 161), 173]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)


def spm() -> Vocab:
    """SentencePiece: control tokens, byte fallback, common letters, merges by score."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = [merge.replace(" ", "") for merge in MERGES.split("|")]
    pieces = [piece.replace("_", "\u2581") for piece in (*merged, *"_abcdefghiklmnoprstuvwyH,.")]
    kinds = [CONTROL] * len(control) + [BYTE] * 256 + [NORMAL] * len(pieces)
    kinds[control.index("<unk>")] = UNKNOWN
    unscored = [0.0] * (len(control) + 256)
    metadata = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": control + fallback + pieces,
        "ggml.scores": unscored + [-float(rank) for rank in range(len(pieces))],
        "ggml.token_type": kinds,
        "ggml.bos_token_id": control.index("<bos>"),
        "ggml.eos_token_id": control.index("<eos>"),
        "ggml.unknown_token_id": control.index("<unk>"),
        "ggml.padding_token_id": control.index("<pad>"),
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": False,
        "chat_template": TURNS,
    }
    return Vocab(control + fallback + pieces, metadata)


VOCABS: dict[str, Callable[[], Vocab]] = {
    "llama-bpe": functools.partial(bpe, "llama-bpe", add_bos=True),
    "qwen2": functools.partial(bpe, "qwen2", add_bos=False),
    "qwen35": functools.partial(bpe, "qwen35", add_bos=False),
    "glm4": functools.partial(bpe, "glm4", add_bos=False),
    "tekken": functools.partial(bpe, "tekken", add_bos=True),
    "smaug-bpe": functools.partial(bpe, "smaug-bpe", add_bos=False),
    "dbrx": functools.partial(bpe, "dbrx", add_bos=False),
    "refact": functools.partial(bpe, "refact", add_bos=False),
    "deepseek-llm": functools.partial(bpe, "deepseek-llm", add_bos=True),
    "deepseek-v3": functools.partial(bpe, "deepseek-v3", add_bos=True),
    "gpt-4o": functools.partial(bpe, "gpt-4o", add_bos=False),
    "spm": spm,
}
