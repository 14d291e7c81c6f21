"""Tiny models in the types that few files have, against real llama.cpp and against themselves."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divergence import strict
from exact import kl, log_softmax
from numpy.typing import NDArray
from op_case import random_blocks
from oracle import LlamaCpp
from raw_gguf import RawGguf, RawTensor
from tiny import WIDE, write_tiny
from tiny_llama import contents

from pyggml.dtypes import GGMLType as T
from pyggml.quants import QUANTIZABLE, dequantize, quantize

TYPES = (
    *(T.Q1_0, T.Q2_0, T.TQ1_0, T.TQ2_0, T.MXFP4, T.NVFP4, T.IQ1_S, T.IQ1_M),
    *(T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S),
)
IDS = [int(i) for i in np.random.default_rng(0).integers(3, 280, 80)]


def converted(values: NDArray[np.float32], type: T) -> NDArray[np.uint8]:
    """Rows in a type; where it has no quantizer, random blocks that are as large on average."""
    if type in QUANTIZABLE:
        return quantize(values, type)
    n, seed = values.size // type.block_size, zlib.crc32(values.tobytes())
    ones = random_blocks(np.random.default_rng(seed), type, n, 1.0, 1.0)
    d = float(values.std() / dequantize(ones, type).std())
    return random_blocks(np.random.default_rng(seed), type, n, d, d)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32 whose matrices have rows of whole blocks."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "f32.gguf", "llama", **WIDE)


@pytest.fixture(params=TYPES, ids=lambda t: t.label)
def model(request: pytest.FixtureRequest, wide: Path, tmp_path: Path) -> Path:
    """The same with all matrices in a type, the embedding's too."""
    pairs, tensors = contents(wide)
    for i, (name, ne, _, data) in enumerate((t.name, t.ne, t.type, t.data) for t in tensors):
        if len(ne) == 2:
            values = np.frombuffer(data, np.float32).reshape(ne[::-1])
            raw = converted(values, request.param).tobytes()
            tensors[i] = RawTensor(name, ne, request.param, raw)
    path = tmp_path / "m.gguf"
    path.write_bytes(RawGguf(pairs, tensors).build())
    return path


def logits(path: Path, **params: Any) -> NDArray[np.float32]:
    """Of all positions, with an F32 cache and no flash attention."""
    with strict(path, **{"n_ctx": 128, "n_threads": 1, **params}) as llama:
        return llama.logits(IDS, all=True)


def test_whole_models(model: Path) -> None:
    expected = logits(model)
    with LlamaCpp(model) as theirs:
        assert kl(theirs.logprobs(IDS), log_softmax(expected)).mean() < 2e-3
    for params in ({"n_ubatch": 7, "n_threads": 2}, {"n_ubatch": 1}, {"repack": False}):
        np.testing.assert_array_equal(logits(model, **params), expected, str(params))
