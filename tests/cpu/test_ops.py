"""Every operation of the CPU backend against the reference, and what must not change its bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cases import CASES
from cpu_ops import DEVICE, ON_CPU, placed, ready_backend
from llvmlite.binding import get_host_cpu_features, get_process_triple
from op_case import Array, Case, Leafs, nmse, place

from pyggml import build as b
from pyggml import params as p
from pyggml.backends.cpu import work
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.library import KernelLibrary
from pyggml.backends.cpu.target import Target
from pyggml.backends.reference.device import RefDevice
from pyggml.dtypes import GGMLType
from pyggml.graph import build_graph
from pyggml.ops import OPS, Op, UnaryOp

F16, I32 = GGMLType.F16, GGMLType.I32
REFERENCE = RefDevice()


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = ready_backend()
    yield backend
    backend.close()


def test_the_backend_has_what_it_must_have() -> None:
    assert [case.name for case in CASES if case.cpu and case not in ON_CPU] == []


@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_agrees_with_the_reference(case: Case, cpu: CpuBackend) -> None:
    on_cpu, on_reference = placed(case), place(case, REFERENCE.buffer_type())
    expected = on_reference.run(REFERENCE.init_backend())
    got = on_cpu.run(cpu)
    assert nmse(case, got, expected, on_cpu.result.type) <= case.tolerance
    assert on_cpu.untouched()


@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_threads_and_chunks_do_not_change_bits(
    case: Case, cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = placed(case)
    cpu.set_n_threads(1)
    expected = on_cpu.run(cpu).tobytes()
    monkeypatch.setattr(work, "GRAIN", 1)  # as many chunks as there are rows
    for n_threads in (2, 3):
        cpu.set_n_threads(n_threads)
        assert on_cpu.run(cpu).tobytes() == expected, f"{n_threads} threads"


IN_PLACE = (
    *("add-same", "sub-long", "mul-row", "div-same", "scale-plain", "clamp-long", "sqr-plain"),
    *("sqrt-plain", "silu-plain", "gelu-wide", "rms_norm-long", "soft_max-mask-f16", "add_id"),
    *("rope-normal-partial", "rope-neox", "rope-neox-f16", "rope-vision", "fill"),
)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in IN_PLACE], ids=str)
def test_results_may_replace_their_source(case: Case, cpu: CpuBackend) -> None:
    """The allocator gives the result of some operations the memory of a source."""
    on_cpu = placed(case)
    result = on_cpu.result
    source = result.src[0]
    assert OPS[result.op].in_place and source is not None and result.ne == source.ne
    expected = on_cpu.run(cpu)
    result.data = source.data
    assert on_cpu.run(cpu).tobytes() == expected.tobytes()


def run(build, cpu: CpuBackend) -> Array:
    """Values of the node that `build` makes."""
    return place(Case("one", build), DEVICE.buffer_type()).run(cpu)


# ---------------------------------------------------------------- accuracy
GRID = np.concatenate(
    [np.linspace(-20, 20, 40_001), np.geomspace(1e-30, 80, 2000), -np.geomspace(1e-30, 80, 2000)]
).astype(np.float32)
# Units in the last place, for values above FLOOR. The GELUs take e**u of a rounded u.
ULPS = dict.fromkeys((UnaryOp.GELU, UnaryOp.GELU_QUICK, UnaryOp.GELU_ERF), 32)
FLOOR = np.float32(1e-7)


@pytest.mark.parametrize(
    "op", [op for op in UnaryOp if op != UnaryOp.XIELU], ids=lambda op: op.name
)
def test_functions_keep_within_a_few_units_in_the_last_place(op: UnaryOp, cpu: CpuBackend) -> None:
    case = Case("grid", lambda x: b.unary(x.given(GRID), op))
    exact = place(case, REFERENCE.buffer_type()).run(REFERENCE.init_backend())
    got = placed(case).run(cpu)
    ulp = np.spacing(np.maximum(np.abs(exact), FLOOR))
    error = np.abs(got - exact)
    assert (error / ulp).max() <= ULPS.get(op, 2)


@pytest.mark.parametrize("op", [UnaryOp.EXP, UnaryOp.SILU, UnaryOp.TANH, UnaryOp.SIGMOID])
def test_functions_of_infinity_and_nan(op: UnaryOp, cpu: CpuBackend) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 0.0], np.float32)
    case = Case("limits", lambda x: b.unary(x.given(values), op))
    expected = place(case, REFERENCE.buffer_type()).run(REFERENCE.init_backend())
    got = place(case, DEVICE.buffer_type()).run(cpu)
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- other CPUs
HASWELL = Target("haswell", "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2")


@pytest.mark.slow
@pytest.mark.parametrize("target", [HASWELL, Target.portable()], ids=["avx2", "sse2"])
def test_kernels_for_older_cpus(target: Target) -> None:
    """Vectors of other widths, no FMA, no F16 conversions: the same operations."""
    host = get_host_cpu_features()
    if not get_process_triple().startswith("x86_64") or not (host["avx2"] and host["fma"]):
        pytest.skip("needs an x86-64 CPU with AVX2")
    cases = [case for case in ON_CPU if not case.name.startswith("mul_mat")]  # test_library's
    backend = ready_backend(CpuDevice(KernelLibrary(target)), cases)
    wrong = []
    for case in cases:
        expected = place(case, REFERENCE.buffer_type()).run(REFERENCE.init_backend())
        found = placed(case)
        if nmse(case, found.run(backend), expected, found.result.type) > case.tolerance:
            wrong.append(case.name)
    backend.close()
    assert wrong == []


# ---------------------------------------------------------------- sorting
def test_equal_values_keep_their_order(cpu: CpuBackend) -> None:
    row = np.array([1, 0, 1, 0, 1], np.float32)
    assert run(lambda x: b.argsort(x.given(row)), cpu).ravel().tolist() == [1, 3, 0, 2, 4]
    largest_first = run(lambda x: b.argsort(x.given(row), descending=True), cpu)
    assert largest_first.ravel().tolist() == [0, 2, 4, 1, 3]


# ---------------------------------------------------------------- attention
def attend(cpu: CpuBackend, arrays: tuple[Array, Array, Array, Array], **options: float) -> Array:
    """Attention over q, k, v, mask in NumPy's order; K, V and mask in F16."""

    def build(x: Leafs):
        q, k, v, mask = arrays
        params = p.FlashAttnParams(**{"scale": 0.125, **options})
        return b.flash_attn_ext(
            x.given(q), x.given(k, F16), x.given(v, F16), x.given(mask, F16), params
        )

    return run(build, cpu)


def attention_inputs(
    n_batch: int, n_kv: int, n_head: int = 6, n_head_kv: int = 2
) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(n_kv)
    q = rng.normal(size=(1, n_head, n_batch, 64)).astype(np.float32)
    k, v = (rng.normal(size=(1, n_head_kv, n_kv, 64)).astype(np.float32) for _ in "kv")
    visible = np.arange(n_kv) <= np.arange(n_batch)[:, None] + n_kv - n_batch
    return q, k, v, np.where(visible, 0, -np.inf).astype(np.float32)[None, None]


@pytest.mark.parametrize("n_kv", [40, 700, 1300])
def test_a_query_does_not_see_its_batch(n_kv: int, cpu: CpuBackend) -> None:
    """One at a time (keys in segments, on several threads) or all together: the same bits."""
    cpu.set_n_threads(3)
    q, k, v, mask = attention_inputs(37, n_kv)
    together = attend(cpu, (q, k, v, mask))
    for t in (0, 13, 36):
        alone = attend(cpu, (q[:, :, t : t + 1], k, v, mask[:, :, t : t + 1]))
        assert alone.tobytes() == together[:, t : t + 1].tobytes()


@pytest.mark.parametrize("n_batch", [1, 20])
def test_masked_keys_do_not_change_bits(n_batch: int, cpu: CpuBackend) -> None:
    """Room at the end of the cache, and blocks that no query sees, leave no trace."""
    q, k, v, mask = attention_inputs(n_batch, 300)
    expected = attend(cpu, (q, k, v, mask))

    def room(a: Array, value: float) -> Array:
        return np.concatenate([a, np.full((*a.shape[:2], 600, 64), value, np.float32)], axis=2)

    hidden = np.full((1, 1, n_batch, 600), -np.inf, np.float32)
    longer = (q, room(k, 3.0), room(v, 5.0), np.concatenate([mask, hidden], axis=3))
    assert attend(cpu, longer).tobytes() == expected.tobytes()


def test_a_sliding_window_gives_the_same_bits_as_its_keys_in_place(cpu: CpuBackend) -> None:
    q, k, v, mask = attention_inputs(3, 640)
    mask[..., :512] = -np.inf
    windowed = attend(cpu, (q, k, v, mask))
    k[:, :, :512], v[:, :, :512] = 0, 0
    assert attend(cpu, (q, k, v, mask)).tobytes() == windowed.tobytes()


def test_a_query_without_keys_is_zero(cpu: CpuBackend) -> None:
    q, k, v, mask = attention_inputs(2, 70)
    mask[0, 0, 0] = -np.inf
    out = attend(cpu, (q, k, v, mask))
    assert not out[0, 0].any() and out[0, 1].all()


# ---------------------------------------------------------------- graphs
def test_empty_nodes_run(cpu: CpuBackend) -> None:
    leafs = Leafs(1)
    node = b.silu(b.add(leafs(8, 0), leafs(8)))
    assert node.op == Op.UNARY and node.is_empty
    cpu.graph_compute(build_graph([node]))
