"""How a model describes itself, beside llama.cpp's words for the same file."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
from oracle import library
from tiny import write_tiny
from tiny_llama import metadata, split, tiny_model, with_keys

from pyggml.dtypes import GGMLType
from pyggml.gguf import open_gguf
from pyggml.llama.description import FILE_TYPES, describe, file_type, size_label
from pyggml.llama.loader import load_model

MOSTLY_MXFP4 = 38


def of_llama_cpp(path: Path) -> tuple[str, int, int]:
    """Description, number of weights and bytes."""
    c = library()
    params = c.llama_model_default_params()
    params.n_gpu_layers = 0
    model = ctypes.c_void_p(c.llama_model_load_from_file(str(path).encode(), params))
    assert model, path
    try:
        text = ctypes.create_string_buffer(256)
        c.llama_model_desc(model, text, ctypes.c_size_t(len(text)))
        c.llama_model_n_params.restype = c.llama_model_size.restype = ctypes.c_uint64
        return text.value.decode(), c.llama_model_n_params(model), c.llama_model_size(model)
    finally:
        c.llama_model_free(model)


def words(path: Path) -> str:
    """The file's type as we call it."""
    with open_gguf(path) as gguf:
        return file_type(gguf.metadata, [t.type for t in gguf.tensors.values()])


@pytest.mark.parametrize("number", [*FILE_TYPES, 4, 99])
def test_file_types_are_called_as_in_llama_cpp(tmp_path: Path, number: int) -> None:
    path = with_keys(write_tiny(tmp_path / "m.gguf", "llama"), general__file_type=number)
    description, _, _ = of_llama_cpp(path)
    assert description == f"llama ?B {words(path)}"


QUICK = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS TQ1_0 TQ2_0"


@pytest.mark.parametrize("weight_type", QUICK.split())
def test_the_most_frequent_type_is_the_guess(tmp_path: Path, weight_type: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type=weight_type)
    description, _, _ = of_llama_cpp(path)
    assert description == f"llama ?B {words(path)}"


def test_mxfp4_is_guessed_too(tmp_path: Path) -> None:
    """Where llama.cpp says "all F32"."""
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="MXFP4")
    assert words(path) == f"(guessed) {FILE_TYPES[MOSTLY_MXFP4]}"


@pytest.mark.parametrize(
    ("n_params", "label"),
    [
        (331_392, "331K"),
        (999_499, "999K"),
        (134_515_008, "135M"),
        (999_499_999, "999M"),
        (999_500_000, "1.0B"),
        (1_720_574_976, "1.7B"),
        (9_949_999_999, "9.9B"),
        (9_950_000_000, "10B"),
        (32_763_876_352, "33B"),
    ],
)
def test_sizes(n_params: int, label: str) -> None:
    assert size_label(n_params) == label


@pytest.mark.parametrize(
    ("keys", "description"),
    [
        ({"general.size_label": "8x7B"}, "llama 8x7B Q4_0"),
        ({"general.size_label": ""}, "llama 2M Q4_0"),
        ({"general.size_label": 7}, "llama 2M Q4_0"),
        ({"general.size_label": "7B\x1b[2J"}, "llama 2M Q4_0"),
        ({"general.size_label": "7" * 25}, "llama 2M Q4_0"),
        ({"general.file_type": 2.0}, "llama 2M (guessed) Q8_0"),
    ],
)
def test_odd_keys(tmp_path: Path, keys: dict[str, Any], description: str) -> None:
    items = {"general.architecture": "llama", "general.file_type": 2} | keys
    types = [GGMLType.F32, GGMLType.Q8_0, GGMLType.Q8_0]
    assert describe(metadata(tmp_path / "m.gguf", items), 1_500_000, types) == description


@pytest.mark.parametrize("omit", [(), ("output",)])
def test_numbers_of_single_and_split_files(tmp_path: Path, omit: tuple[str, ...]) -> None:
    """A tied output counts once."""
    single = tiny_model(tmp_path / "m.gguf", omit=omit)
    parts = load_model(split(tmp_path / "m.gguf", 3)[0], devices=single.devices)
    _, n_params, nbytes = of_llama_cpp(tmp_path / "m.gguf")
    for model in (single, parts):
        assert (model.n_params, model.nbytes) == (n_params, nbytes)
        assert model.description == f"llama {n_params / 1e3:.0f}K (guessed) all F32"


def test_real_models(smollm2: Path, gemma3: Path) -> None:
    described = {}
    for path in (smollm2, gemma3):
        with open_gguf(path) as gguf:
            types = [t.type for t in gguf.tensors.values()]
            n_params = sum(math.prod(t.ne) for t in gguf.tensors.values())
            described[path] = describe(gguf.metadata, n_params, types)
    assert described[smollm2] == "llama 135M Q4_1"
    assert described[gemma3] == "gemma3 270M Q4_K - Medium"
    assert of_llama_cpp(gemma3)[0] == described[gemma3]
    assert of_llama_cpp(smollm2)[0] == "llama 256M Q4_1"  # by its number of layers
