"""llama.cpp's tokenizer, called through the C functions that the xllamacpp wheel exports.

Its server routes cannot detokenize with the clean-up of spaces, drop BOS/EOS or name the special
tokens, so the C API is used: a vocabulary is loaded without weights.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

INT32 = ctypes.c_int32
BOOL = ctypes.c_bool
POINTER = ctypes.c_void_p
LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)

ROLES = ("bos", "eos", "eot", "sep", "pad", "nl", "mask") + tuple(
    f"fim_{part}" for part in ("pre", "suf", "mid", "pad", "rep", "sep")
)


class ModelParams(ctypes.Structure):
    """`llama_model_params`; the tail is room for fields that newer builds append."""

    _fields_ = (
        ("devices", POINTER),
        ("tensor_buft_overrides", POINTER),
        ("n_gpu_layers", INT32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", INT32),
        ("tensor_split", POINTER),
        ("progress_callback", POINTER),
        ("progress_callback_user_data", POINTER),
        ("kv_overrides", POINTER),
        ("vocab_only", BOOL),
        ("check_tensors", BOOL),
        ("use_extra_bufts", BOOL),
        ("tail", ctypes.c_byte * 253),
    )


@LOG_CALLBACK
def _silent(_level: int, _text: bytes, _user: int) -> None:
    """Keep llama.cpp's log out of the test output."""


SIGNATURES = {
    "llama_log_set": (None, LOG_CALLBACK, POINTER),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (POINTER, ctypes.c_char_p, ModelParams),
    "llama_model_free": (None, POINTER),
    "llama_model_get_vocab": (POINTER, POINTER),
    "llama_tokenize": (INT32, POINTER, ctypes.c_char_p, INT32, POINTER, INT32, BOOL, BOOL),
    "llama_detokenize": (INT32, POINTER, POINTER, INT32, ctypes.c_char_p, INT32, BOOL, BOOL),
    "llama_token_to_piece": (INT32, POINTER, INT32, ctypes.c_char_p, INT32, INT32, BOOL),
    "llama_vocab_n_tokens": (INT32, POINTER),
    "llama_vocab_is_eog": (BOOL, POINTER, INT32),
    "llama_vocab_get_attr": (ctypes.c_int, POINTER, INT32),
    "llama_vocab_get_add_bos": (BOOL, POINTER),
    "llama_vocab_get_add_eos": (BOOL, POINTER),
    **{f"llama_vocab_{role}": (INT32, POINTER) for role in ROLES},
}


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library inside the wheel, with typed functions; skips the test when missing."""
    wheel = pytest.importorskip("xllamacpp.xllamacpp")
    library = ctypes.CDLL(wheel.__file__)
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_silent, None)
    defaults = library.llama_model_default_params()
    assert defaults.use_extra_bufts and not defaults.vocab_only, "llama_model_params has moved"
    return library


class LlamaVocab:
    """The vocabulary of one GGUF file as llama.cpp sees it."""

    def __init__(self, path: Path) -> None:
        self._c = library()
        params = self._c.llama_model_default_params()
        params.vocab_only = True
        self._model = self._c.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp refuses {path}")
        self._vocab = self._c.llama_model_get_vocab(self._model)
        self.n_tokens: int = self._c.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        """Free the model."""
        self._c.llama_model_free(self._model)

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of UTF-8 `text`."""
        room = len(text) + 8
        ids = (INT32 * room)()
        n = self._c.llama_tokenize(
            self._vocab, text, len(text), ids, room, add_special, parse_special
        )
        assert n >= 0, f"{-n} tokens from {len(text)} bytes"
        return list(ids[:n])

    def detokenize(
        self, ids: Sequence[int], remove_special: bool = False, unparse_special: bool = True
    ) -> bytes:
        """Text of `ids`, cleaned up as the model asks."""
        array = (INT32 * max(1, len(ids)))(*ids)
        size = 4096
        while True:
            out = ctypes.create_string_buffer(size)
            n = self._c.llama_detokenize(
                self._vocab, array, len(ids), out, size, remove_special, unparse_special
            )
            if n >= 0:
                return out.raw[:n]
            size = -n

    def piece(self, token: int, special: bool) -> bytes:
        """Bytes of one token."""
        out = ctypes.create_string_buffer(4096)
        n = self._c.llama_token_to_piece(self._vocab, token, out, 4096, 0, special)
        assert n >= 0
        return out.raw[:n]

    def eog(self) -> set[int]:
        """The tokens that end a generation."""
        return {i for i in range(self.n_tokens) if self._c.llama_vocab_is_eog(self._vocab, i)}

    def attributes(self) -> list[int]:
        """Attribute bits of every token."""
        return [self._c.llama_vocab_get_attr(self._vocab, i) for i in range(self.n_tokens)]

    def special_ids(self) -> dict[str, int]:
        """Role -> id, -1 where the vocabulary has none."""
        return {role: getattr(self._c, f"llama_vocab_{role}")(self._vocab) for role in ROLES}

    def adds(self) -> tuple[bool, bool]:
        """Whether BOS and EOS are added to a prompt."""
        return (
            self._c.llama_vocab_get_add_bos(self._vocab),
            self._c.llama_vocab_get_add_eos(self._vocab),
        )
