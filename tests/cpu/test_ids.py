"""Ids: what an absent expert leaves alone, and ids that name nothing, on every backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cases_experts import ABSENT, SHAPES, operands
from cpu_ops import DEVICE
from op_case import F16, F32, I32, I64, Array, Case, Computes, Leafs, Placed, place, read

from pyggml import build as b
from pyggml.backend import BufferType, tensor_set
from pyggml.backends.cpu.device import CpuBackend
from pyggml.backends.reference.device import RefDevice
from pyggml.dtypes import GGMLType as T
from pyggml.errors import IdError
from pyggml.graph import next_uid
from pyggml.tensor import Tensor

Where = tuple[Computes, BufferType]
REFERENCE = RefDevice()


@pytest.fixture(scope="module", params=["reference", "cpu-1", "cpu-3"])
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    """A backend and its memory."""
    name, _, n_threads = request.param.partition("-")
    if name == "reference":
        yield REFERENCE.init_backend(), REFERENCE.buffer_type()
        return
    backend = CpuBackend(DEVICE, int(n_threads))
    yield backend, DEVICE.buffer_type()
    backend.close()


# ---------------------------------------------------------------- absent experts
@pytest.mark.parametrize("type", [F32, F16, T.Q4_0, T.Q4_K], ids=lambda t: t.label)
@pytest.mark.parametrize("shape", ["decode", "decode-down", "shared-columns", "grouped"])
@pytest.mark.parametrize("absent", ABSENT)
def test_rows_of_absent_experts_are_not_touched(
    where: Where, type: T, shape: str, absent: str
) -> None:
    backend, buft = where
    case = Case("absent", lambda x: b.mul_mat_id(*operands(x, type, SHAPES[shape], absent)))
    found = place(case, buft)
    ids = list(found.leafs.values())[2]
    found.reset()
    poison = np.full(found.result.ne[::-1], np.float32(np.nan))
    poison.view(np.uint32)[...] += np.arange(poison.size, dtype=np.uint32).reshape(poison.shape)
    tensor_set(found.result, memoryview(poison.tobytes()))
    backend.graph_compute(found.graph)
    got = read(found.result)
    assert got[0][ids < 0].tobytes() == poison[0][ids < 0].tobytes()
    assert np.isfinite(got[0][ids >= 0]).all()


# ---------------------------------------------------------------- ids that name nothing
Make = Callable[[Leafs, Array], Tensor]
N = 6  # rows, or experts, that there are


def _experts(type: T, *, cold: bool = False) -> Make:
    def make(x: Leafs, ids: Array) -> Tensor:
        table = x(256, 16, N, type=type).named("table")
        columns, chosen = x(256, 1, len(ids)), x.given(ids[:, None], I32).named("chosen")
        if cold:
            return b.mul_mat_id_cold(table, columns, chosen, x.given(np.ones(N), I32))
        return b.mul_mat_id(table, columns, chosen)

    return make


def _get_rows(type: T) -> Make:
    return lambda x, ids: b.get_rows(
        x(256, N, type=type).named("table"), x.given(ids, I32).named("chosen")
    )


def _set_rows(width: int, index: T) -> Make:
    return lambda x, ids: b.set_rows(
        x(width, N).named("table"), x(width, len(ids)), x.given(ids, index).named("chosen")
    )


def _add_id(x: Leafs, ids: Array) -> Tensor:
    table, chosen = x(40, N).named("table"), x.given(ids[:, None], I32).named("chosen")
    return b.add_id(x(40, 1, len(ids)), table, chosen)


READERS: dict[str, tuple[Make, str]] = {
    "MUL_MAT_ID f32": (_experts(F32), "expert"),
    "MUL_MAT_ID q4_0": (_experts(T.Q4_0), "expert"),
    "MUL_MAT_ID_COLD f16": (_experts(F16, cold=True), "expert"),
    "MUL_MAT_ID_COLD q4_K": (_experts(T.Q4_K, cold=True), "expert"),
    "ADD_ID": (_add_id, "row"),
    "GET_ROWS f32": (_get_rows(F32), "row"),
    "GET_ROWS q6_K": (_get_rows(T.Q6_K), "row"),
    "SET_ROWS i64": (_set_rows(64, I64), "row"),
    "SET_ROWS i32": (_set_rows(64, I32), "row"),
    "SET_ROWS single": (_set_rows(1, I64), "row"),
}
GOOD = np.array([0, N - 1, 2])


def _placed(reader: str, buft: BufferType) -> Placed:
    found = place(Case(reader, lambda x: READERS[reader][0](x, GOOD)), buft)
    found.result.named("result")
    found.graph.uid = next_uid()  # plans are kept
    return found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("wrong", [N, 2**30, -2, -(2**31)])
def test_ids_that_name_nothing_are_errors(where: Where, reader: str, wrong: int) -> None:
    """They say which node asks for what; the next run with good ids is none the worse."""
    backend, buft = where
    found = _placed(reader, buft)
    expected = found.run(backend)
    chosen = next(t for t in found.leafs if t.name == "chosen")
    good = found.leafs[chosen]
    found.leafs[chosen] = np.where(good == 2, good.dtype.type(wrong), good)
    noun = READERS[reader][1]
    message = f"{reader.split()[0]} result: chosen asks for {noun} {wrong}, which table does not"
    with pytest.raises(IdError, match=re.escape(message)):
        found.run(backend)
    assert found.untouched()
    found.leafs[chosen] = good
    assert found.run(backend).tobytes() == expected.tobytes()


@pytest.mark.parametrize("reader", [r for r in READERS if "ROWS" in r])
def test_no_row_is_no_answer(where: Where, reader: str) -> None:
    """Only experts may be absent."""
    backend, buft = where
    found = _placed(reader, buft)
    chosen = next(t for t in found.leafs if t.name == "chosen")
    found.leafs[chosen] = found.leafs[chosen] * 0 - 1
    with pytest.raises(IdError, match=r"row -1.*\nthere are 0 to 5$"):
        found.run(backend)


@pytest.mark.parametrize("width", [1, 8])
def test_rows_that_exist_are_written_all_the_same(width: int) -> None:
    ids = np.array([1, 3, -1])
    case = Case("one", lambda x: b.set_rows(x(width, 3), x(width, 3), x.given(ids, I64)))
    found, backend = place(case, DEVICE.buffer_type()), CpuBackend(DEVICE, 2)
    with pytest.raises(IdError):
        found.run(backend)
    backend.close()
    target, source = list(found.leafs.values())[:2]
    out = read(found.result)[0, 0]
    assert out[1].tolist() == source[0].tolist()
    assert out[[0, 2]].tolist() == target[[0, 2]].tolist()


def test_the_first_node_that_fails_is_named(where: Where) -> None:
    backend, buft = where

    def make(x: Leafs) -> Tensor:
        ids, table = x.given(np.array([9]), I32), x(64, 4)
        first = b.get_rows(table, ids).named("first")
        return b.add(first, b.get_rows(table, ids).named("second"))

    with pytest.raises(IdError, match="GET_ROWS first: "):
        place(Case("two", make), buft).run(backend)
