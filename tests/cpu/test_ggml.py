"""Real ggml computes the same cases: it agrees with our reference, and with our CPU backend."""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from cases import CASES
from cpu_ops import ON_CPU, placed, ready_backend
from ggml_ops import GgmlBackend, Missing
from ggml_oracle import library
from op_case import Array, Case, Placed, nmse, place

from pyggml.backends.cpu.device import CpuBackend
from pyggml.backends.reference.device import RefDevice
from pyggml.ops import Op


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


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = ready_backend()
    yield backend
    backend.close()


def run_in_ggml(case: Case, found: Placed, ggml: GgmlBackend) -> Array:
    """What real ggml computes; skips what this version cannot."""
    if ggml.version < case.since:
        pytest.skip(f"ggml {ggml.version} lacks it")
    try:
        return found.run(ggml)
    except Missing as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("ggml", [wheel, llama_cpp], ids=["libggml", "xllamacpp"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.missing], ids=str)
def test_reference_agrees_with_ggml(case: Case, ggml: Callable[[], GgmlBackend]) -> None:
    """Products round their activations as ggml does, so only the order of sums differs."""
    device = RefDevice(quantize_activations=True)
    found = place(case, device.buffer_type())
    got = run_in_ggml(case, found, ggml())
    expected = found.run(device.init_backend())
    assert nmse(case, got, expected, found.result.type) <= case.ggml


@pytest.mark.parametrize("case", [case for case in ON_CPU if not case.missing], ids=str)
def test_cpu_backend_agrees_with_ggml(case: Case, cpu: CpuBackend) -> None:
    found = placed(case)
    expected = run_in_ggml(case, found, llama_cpp())
    got = found.run(cpu)
    limit = case.ggml + case.tolerance
    if found.result.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
        limit = 5e-4  # activations are rounded here or there, differently
    assert nmse(case, got, expected, found.result.type) <= limit
