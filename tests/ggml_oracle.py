"""Real ggml for comparisons: the shared libraries of the libggml-python wheel, through ctypes."""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyggml.dtypes import GGMLType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Row conversions that ggml exports but does not list in its type traits.
UNLISTED = {GGMLType.Q8_K: ("dequantize_row_q8_K", "quantize_row_q8_K_ref")}


class TypeTraits(ctypes.Structure):
    """ggml_type_traits; the two functions are (source, target, number of values)."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


RowFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@cache
def library(name: str) -> ctypes.CDLL:
    """One of ggml's libraries: "ggml-base", "ggml-cpu" or "ggml"; skips the test without it."""
    spec = find_spec("libggml")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for pattern in (f"lib*/lib{name}.so", f"lib*/lib{name}.dylib", f"**/{name}.dll"):
        for path in (p for folder in folders for p in Path(folder).glob(pattern)):
            return ctypes.CDLL(str(path))
    pytest.skip(f"no {name} library: pip install libggml-python")


@cache
def base() -> ctypes.CDLL:
    """ggml-base with the signatures of what this module calls."""
    lib = library("ggml-base")
    lib.ggml_version.restype = ctypes.c_char_p
    lib.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return lib


def ggml_version() -> str:
    version: bytes = base().ggml_version()
    return version.decode()


def type_traits(type: GGMLType) -> TypeTraits:
    traits: TypeTraits = base().ggml_get_type_traits(type)[0]
    return traits


def has_dequantize(type: GGMLType) -> bool:
    return type in UNLISTED or bool(type_traits(type).to_float)


def has_quantize(type: GGMLType) -> bool:
    return type in UNLISTED or bool(type_traits(type).from_float_ref)


def ggml_dequantize(raw: Bytes, type: GGMLType) -> Floats:
    """[..., row_bytes] -> [..., n] by ggml's row function."""
    function = _row_function(type, 0, type_traits(type).to_float)
    raw = np.ascontiguousarray(raw)
    out = np.zeros((*raw.shape[:-1], raw.shape[-1] // type.type_size * type.block_size), np.float32)
    function(raw.ctypes.data, out.ctypes.data, out.size)
    return out


def ggml_quantize(x: Floats, type: GGMLType) -> Bytes:
    """[..., n] -> [..., row_bytes] by ggml's reference quantizer."""
    function = _row_function(type, 1, type_traits(type).from_float_ref)
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((*x.shape[:-1], type.row_size(x.shape[-1])), np.uint8)
    function(x.ctypes.data, out.ctypes.data, x.size)
    return out


def ggml_quantize_file(x: Floats, type: GGMLType, imatrix: Floats | None = None) -> Bytes:
    """[rows, n] -> [rows, row_bytes] as llama-quantize does it; imatrix: [n] importances."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((x.shape[0], type.row_size(x.shape[1])), np.uint8)
    weights = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
    base().ggml_quantize_chunk(
        type,
        x.ctypes.data,
        out.ctypes.data,
        0,
        *x.shape,
        None if weights is None else weights.ctypes.data,
    )
    return out


def _row_function(type: GGMLType, direction: int, address: int | None) -> Any:
    if address:
        return RowFunction(address)
    if type not in UNLISTED:
        raise ValueError(f"ggml has no such conversion for {type.label}")
    return RowFunction((UNLISTED[type][direction], base()))
