"""Real ggml's GGUF reader, through ctypes."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from ggml_oracle import library

from pyggml.gguf import ValueType


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_CTX = ctypes.c_void_p
_I64 = ctypes.c_int64
_SIGNATURES = {
    "gguf_init_from_file": (_CTX, [ctypes.c_char_p, _InitParams]),
    "gguf_free": (None, [_CTX]),
    "gguf_get_n_kv": (_I64, [_CTX]),
    "gguf_get_key": (ctypes.c_char_p, [_CTX, _I64]),
    "gguf_find_key": (_I64, [_CTX, ctypes.c_char_p]),
    "gguf_get_kv_type": (ctypes.c_int, [_CTX, _I64]),
    "gguf_get_arr_type": (ctypes.c_int, [_CTX, _I64]),
    "gguf_get_arr_n": (ctypes.c_size_t, [_CTX, _I64]),
    "gguf_get_arr_str": (ctypes.c_char_p, [_CTX, _I64, ctypes.c_size_t]),
    "gguf_get_arr_data": (ctypes.c_void_p, [_CTX, _I64]),
    "gguf_get_val_str": (ctypes.c_char_p, [_CTX, _I64]),
    "gguf_get_n_tensors": (_I64, [_CTX]),
    "gguf_get_tensor_name": (ctypes.c_char_p, [_CTX, _I64]),
    "gguf_get_tensor_type": (ctypes.c_int, [_CTX, _I64]),
    "gguf_get_tensor_offset": (ctypes.c_size_t, [_CTX, _I64]),
    "gguf_get_tensor_size": (ctypes.c_size_t, [_CTX, _I64]),
    "gguf_get_data_offset": (ctypes.c_size_t, [_CTX]),
}


@cache
def _lib() -> ctypes.CDLL:
    lib = library("ggml-base")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class RealGguf:
    """A file opened by ggml; `ok` says whether it accepted it."""

    def __init__(self, path: Path) -> None:
        self.lib = _lib()
        self.ctx = self.lib.gguf_init_from_file(bytes(path), _InitParams(True, None))
        self.ok = self.ctx is not None

    def __del__(self) -> None:
        if self.ok:
            self.lib.gguf_free(self.ctx)

    def keys(self) -> list[str]:
        n = self.lib.gguf_get_n_kv(self.ctx)
        return [self.lib.gguf_get_key(self.ctx, i).decode() for i in range(n)]

    def find(self, key: str) -> int:
        return int(self.lib.gguf_find_key(self.ctx, key.encode()))

    def type_of(self, key: str) -> int:
        return int(self.lib.gguf_get_kv_type(self.ctx, self.find(key)))

    def array_type(self, key: str) -> int:
        return int(self.lib.gguf_get_arr_type(self.ctx, self.find(key)))

    def string(self, key: str) -> str:
        return str(self.lib.gguf_get_val_str(self.ctx, self.find(key)).decode())

    def strings(self, key: str) -> list[bytes]:
        i = self.find(key)
        n, get = self.lib.gguf_get_arr_n(self.ctx, i), self.lib.gguf_get_arr_str
        return [get(self.ctx, i, k) for k in range(n)]

    def array_bytes(self, key: str) -> bytes:
        i = self.find(key)
        dtype = ValueType(self.array_type(key)).dtype
        n = self.lib.gguf_get_arr_n(self.ctx, i) * np.dtype(dtype).itemsize
        return ctypes.string_at(self.lib.gguf_get_arr_data(self.ctx, i), n)

    def tensors(self) -> list[tuple[str, int, int, int]]:
        """Name, type, offset in the file, bytes."""
        ctx, lib = self.ctx, self.lib
        start = lib.gguf_get_data_offset(ctx)
        return [
            (
                lib.gguf_get_tensor_name(ctx, i).decode(),
                lib.gguf_get_tensor_type(ctx, i),
                start + lib.gguf_get_tensor_offset(ctx, i),
                lib.gguf_get_tensor_size(ctx, i),
            )
            for i in range(lib.gguf_get_n_tensors(ctx))
        ]
