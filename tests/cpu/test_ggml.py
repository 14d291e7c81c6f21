"""Real ggml computes the same cases: it agrees with our reference, and with our CPU backend."""

import ctypes
from functools import cache

import pytest
from cases import CASES
from ggml_ops import GgmlBackend, Missing
from ggml_oracle import library
from op_case import Case, nmse, place

from pyggml.backends.reference.device import RefDevice


@cache
def wheel() -> GgmlBackend:
    """ggml 0.20 of libggml-python."""
    return GgmlBackend(library("ggml-base"), library("ggml-cpu"))


@cache
def llama_cpp() -> GgmlBackend:
    """The newer ggml inside xllamacpp."""
    module = pytest.importorskip("xllamacpp.xllamacpp")
    lib = ctypes.CDLL(module.__file__)
    return GgmlBackend(lib, lib)


@pytest.mark.parametrize("ggml", [wheel, llama_cpp], ids=["libggml", "xllamacpp"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_ggml(case: Case, ggml) -> None:
    if case.missing:
        pytest.skip(case.missing)
    if ggml().version < case.since:
        pytest.skip(f"ggml {ggml().version} lacks it")
    device = RefDevice(quantize_activations=True)
    placed = place(case, device.buffer_type())
    expected = placed.run(device.init_backend())
    try:
        got = placed.run(ggml())
    except Missing as e:
        pytest.skip(str(e))
    assert nmse(case, got, expected, placed.result.type) <= case.ggml
