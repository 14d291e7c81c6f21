"""llama.cpp's C functions for samplers and chat formats, out of the xllamacpp wheel.

No model is needed: candidate lists and messages go in, candidate lists and text come out.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest


class TokenData(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class TokenDataArray(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


class LogitBias(ctypes.Structure):
    _fields_ = [("token", ctypes.c_int32), ("bias", ctypes.c_float)]


class ChatMessage(ctypes.Structure):
    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]


class Vector(ctypes.Structure):
    """std::vector<T>: begin, end, end of storage."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("begin", "end", "storage")]


_SIGNATURES = {
    "top_k": [ctypes.c_int32],
    "top_p": [ctypes.c_float, ctypes.c_size_t],
    "min_p": [ctypes.c_float, ctypes.c_size_t],
    "typical": [ctypes.c_float, ctypes.c_size_t],
    "top_n_sigma": [ctypes.c_float],
    "temp": [ctypes.c_float],
    "temp_ext": [ctypes.c_float] * 3,
    "xtc": [ctypes.c_float, ctypes.c_float, ctypes.c_size_t, ctypes.c_uint32],
    "penalties": [ctypes.c_int32] * 2 + [ctypes.c_float] * 3,  # n_vocab first
    "logit_bias": [ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(LogitBias)],
    "mirostat": [
        ctypes.c_int32,
        ctypes.c_uint32,
        ctypes.c_float,
        ctypes.c_float,
        ctypes.c_int32,
    ],
    "mirostat_v2": [ctypes.c_uint32, ctypes.c_float, ctypes.c_float],
    "adaptive_p": [ctypes.c_float, ctypes.c_float, ctypes.c_uint32],
    "dist": [ctypes.c_uint32],
    "greedy": [],
    "dry_testing": [
        ctypes.c_float,
        ctypes.c_float,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.POINTER(Vector),
    ],
}
# a C++ function: std::vector<std::vector<int>> const& is a pointer to the outer vector
_SYMBOLS = {
    "dry_testing": "_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE",
}


@cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(pytest.importorskip("xllamacpp.xllamacpp").__file__)
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, _SYMBOLS.get(name, f"llama_sampler_init_{name}"))
        function.argtypes = arguments
        function.restype = ctypes.c_void_p
    lib.llama_sampler_apply.argtypes = [ctypes.c_void_p, ctypes.POINTER(TokenDataArray)]
    lib.llama_sampler_accept.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_sampler_reset.argtypes = [ctypes.c_void_p]
    lib.llama_sampler_free.argtypes = [ctypes.c_void_p]
    lib.llama_sampler_name.argtypes = [ctypes.c_void_p]
    lib.llama_sampler_name.restype = ctypes.c_char_p
    return lib


@dataclass
class Row:
    """A candidate list as llama.cpp leaves it."""

    ids: np.ndarray
    logits: np.ndarray
    probs: np.ndarray
    sorted: bool
    selected: int


class RealSampler:
    """One llama.cpp sampler."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.lib = library()
        symbol = _SYMBOLS.get(name, f"llama_sampler_init_{name}")
        self.handle = getattr(self.lib, symbol)(*arguments)

    def __del__(self) -> None:
        self.lib.llama_sampler_free(self.handle)

    @property
    def name(self) -> str:
        return self.lib.llama_sampler_name(self.handle).decode()

    def accept(self, token: int) -> None:
        self.lib.llama_sampler_accept(self.handle, token)

    def reset(self) -> None:
        self.lib.llama_sampler_reset(self.handle)

    def __call__(self, row: Row) -> Row:
        n = len(row.ids)
        data = (TokenData * n)()
        view = np.frombuffer(data, dtype=[("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        view["id"], view["logit"], view["p"] = row.ids, row.logits, row.probs
        array = TokenDataArray(data, n, row.selected, row.sorted)
        self.lib.llama_sampler_apply(self.handle, ctypes.byref(array))
        # xtc moves the pointer forward instead of copying
        start = (ctypes.addressof(array.data.contents) - ctypes.addressof(data)) // 12
        kept = view[start : start + array.size].copy()
        return Row(kept["id"], kept["logit"], kept["p"], array.sorted, array.selected)


def real_dry(
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: Sequence[Sequence[int]],
) -> RealSampler:
    """llama.cpp's DRY sampler with breakers given as tokens."""
    lists = [(ctypes.c_int32 * len(b))(*b) for b in breakers]
    rows = (Vector * max(len(lists), 1))()
    for row, content in zip(rows, lists, strict=False):
        row.begin = ctypes.addressof(content)
        row.end = row.storage = row.begin + ctypes.sizeof(content)
    begin = ctypes.addressof(rows)
    end = begin + len(lists) * ctypes.sizeof(Vector)
    return RealSampler("dry_testing", multiplier, base, allowed, last_n, Vector(begin, end, end))


def builtin_formats() -> list[str]:
    lib = library()
    count = lib.llama_chat_builtin_templates(None, ctypes.c_size_t(0))
    names = (ctypes.c_char_p * count)()
    lib.llama_chat_builtin_templates(names, ctypes.c_size_t(count))
    return [name.decode() for name in names if name]


def apply_format(template: str, messages: Sequence[tuple[str, str]], ask: bool) -> str | None:
    """The prompt for a format name or a template text; None if llama.cpp knows no format."""
    chat = (ChatMessage * len(messages))(*[(r.encode(), c.encode()) for r, c in messages])
    buffer = ctypes.create_string_buffer(1 << 16)
    size = library().llama_chat_apply_template(
        template.encode(),
        chat,
        ctypes.c_size_t(len(messages)),
        ctypes.c_bool(ask),
        buffer,
        ctypes.c_int32(len(buffer)),
    )
    return None if size < 0 else buffer.raw[:size].decode()
