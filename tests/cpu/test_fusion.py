"""Fused steps: the same bits as one step per node, and none where somebody looks between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cpu_ops import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from op_case import Array, Leafs, read
from tiny import VARIANTS, write_tiny

from pyggml import build
from pyggml.backend import Buffer, alloc_tensors, tensor_set
from pyggml.backends.cpu.device import CpuBackend
from pyggml.backends.cpu.plan import Plan, kernel_names
from pyggml.backends.cpu.pool import Pool
from pyggml.dtypes import GGMLType as T
from pyggml.errors import IdError
from pyggml.graph import Graph, build_graph
from pyggml.llama import Llama, load
from pyggml.llama.batch import Batch
from pyggml.ops import GluOp, RopeMode, TensorFlag
from pyggml.params import RopeParams
from pyggml.tensor import Tensor

NORM, LONG = "RMS_NORM+MUL", "RMS_NORM+MUL+ADD+RMS_NORM+MUL"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(3, DEVICE.library)
    yield found
    found.close()


class Case:
    """A graph in memory, computed with and without fusion."""

    def __init__(self, leafs: Leafs, *results: Tensor) -> None:
        self.results = results
        self.graph = build_graph(results)
        self.leafs = {t: v for t, v in leafs.values.items() if t in self.graph.use_counts}
        tensors = [*self.graph.leafs, *self.graph.nodes]
        self.buffer: Buffer | None = alloc_tensors(tensors, DEVICE.buffer_type())

    def plan(self, fuse: bool = True, n_threads: int = 2) -> Plan:
        return Plan(self.graph, DEVICE.library, n_threads, fuse=fuse)

    def ops(self, n_threads: int = 2) -> list[str]:
        """What the steps of the fused plan are."""
        return [label.op for label in self.plan(n_threads=n_threads).labels]

    def run(self, pool: Pool, fuse: bool, n_threads: int = 2) -> list[bytes]:
        plan = self.plan(fuse, n_threads)
        for t, values in self.leafs.items():
            tensor_set(t, memoryview(values.tobytes()))
        plan.run(pool, n_threads)
        return [read(t).tobytes() for t in self.results]

    def check(self, pool: Pool, n_threads: int = 2) -> None:
        expected = self.run(pool, fuse=False)
        assert self.run(pool, fuse=True, n_threads=n_threads) == expected


def weighted(leafs: Leafs, x: Tensor, eps: float = 1e-5) -> Tensor:
    return build.mul(build.rms_norm(x, eps), leafs(x.ne[0]))


# ---------------------------------------------------------------- the same bits
KINDS = (T.F32, T.Q4_0, T.Q4_1, T.Q8_0, T.Q2_K, T.Q4_K, T.Q6_K)
Chain = Callable[[Leafs, Tensor, Tensor], tuple[Tensor, Tensor | None, str]]
# (leafs, x, residual) -> normed, sum, the step
CHAINS: dict[str, Chain] = {
    "norm": lambda make, x, r: (weighted(make, x), None, NORM),
    "sum": lambda make, x, r: (weighted(make, s := build.add(x, r)), s, f"ADD+{NORM}"),
    "after": lambda make, x, r: (build.add(weighted(make, x), r), None, f"{NORM}+ADD"),
    "both": lambda make, x, r: (
        weighted(make, s := build.add(weighted(make, x, 1e-6), r)),
        s,
        LONG,
    ),
}


@settings(max_examples=60)
@given(
    chain=st.sampled_from(sorted(CHAINS)),
    kind=st.sampled_from(KINDS),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 21),
    planes=st.integers(1, 3),
    n_threads=st.integers(1, 3),
)
def test_norms(
    pool: Pool, chain: str, kind: T, blocks: int, rows: int, planes: int, n_threads: int
) -> None:
    """Alone, and followed by a product that takes the columns."""
    make = Leafs(rows + 100 * blocks)
    n = blocks * kind.block_size + (kind == T.F32)
    x, residual = make(n, rows, planes), make(n, rows, planes)
    normed, total, step = CHAINS[chain](make, x, residual)
    products = [build.mul_mat(make(n, m, type=kind), normed) for m in (8, 24)]
    case = Case(make, *products, normed, *([] if total is None else [total]))
    assert case.ops(n_threads)[0] == step
    if kind != T.F32:
        assert case.plan().labels[0].kernel.startswith("norms_q8")
        # after several planes of columns too: one matrix of weights takes them all
        assert len(case.plan()) == 3
    case.check(pool, n_threads)


@settings(max_examples=40)
@given(
    op=st.sampled_from([op for op in GluOp if op.name != "COUNT"]),
    kind=st.sampled_from(KINDS[1:]),
    blocks=st.integers(1, 3),
    rows=st.integers(1, 19),
    halves=st.booleans(),
    n_threads=st.integers(1, 3),
)
def test_gated_activations(
    pool: Pool, op: GluOp, kind: T, blocks: int, rows: int, halves: bool, n_threads: int
) -> None:
    make, n = Leafs(rows), blocks * kind.block_size
    if halves and op in (GluOp.REGLU, GluOp.GEGLU, GluOp.SWIGLU):
        gated = build.glu(make(2 * n, rows), op)
    else:
        gated = build.glu_split(make(n, rows), make(n, rows), op, alpha=1.702, limit=7.0)
    case = Case(make, build.mul_mat(make(n, 16, type=kind), gated), gated)
    assert len(case.plan()) == 2
    case.check(pool, n_threads)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS[1:]),
    n_used=st.integers(1, 4),
    tokens=st.integers(1, 9),
    n_threads=st.integers(1, 3),
)
def test_experts_take_columns(
    pool: Pool, kind: T, n_used: int, tokens: int, n_threads: int
) -> None:
    """Norms and gated activations leave the columns of chosen experts, if these have few each."""
    make, n, n_experts = Leafs(tokens), kind.block_size, 5
    normed = weighted(make, make(n, tokens))
    ids = make.ids(n_used, tokens, high=n_experts)
    shaped = build.reshape(normed, n, 1, tokens)
    gate, up = (
        build.mul_mat_id(make(n, 2 * n, n_experts, type=kind), shaped, ids) for _ in range(2)
    )
    gated = build.glu_split(gate, up, GluOp.SWIGLU)
    down = build.mul_mat_id(make(2 * n, 16, n_experts, type=kind), gated, ids)
    case = Case(make, down, build.mul_mat(make(n, 5), normed))
    kernels = [label.kernel for label in case.plan(n_threads=n_threads).labels]
    few = n_used * tokens < 2 * n_experts
    assert ("glu_swiglu_q8" in "".join(kernels)) == few
    assert kernels[0].startswith("norms_q8") == (tokens == 1)
    assert any(kernel.startswith("quantize") for kernel in kernels) == (tokens > 1)
    case.check(pool, n_threads)


CACHES = (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.IQ4_NL)


@settings(max_examples=60)
@given(
    cache=st.sampled_from((None, *CACHES)),
    mode=st.sampled_from((RopeMode.NORMAL, RopeMode.NEOX)),
    n_dims=st.sampled_from((6, 32, 64)),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 9),
    with_norm=st.booleans(),
    wide_ids=st.booleans(),
    n_threads=st.integers(1, 3),
)
def test_rope(
    pool: Pool,
    cache: T | None,
    mode: RopeMode,
    n_dims: int,
    heads: int,
    tokens: int,
    with_norm: bool,
    wide_ids: bool,
    n_threads: int,
) -> None:
    """Heads with or without a norm, left where they are or written to rows of a cache."""
    make = Leafs(heads + 10 * tokens)
    a = make(64, heads, tokens)
    a = weighted(make, a) if with_norm else a
    pos = make.ids(tokens, high=500)
    result = build.rope_ext(a, pos, None, RopeParams(n_dims, mode))
    ops = [NORM] * with_norm + ["ROPE"]
    if cache is not None:
        rows = make(64 * heads, 16, type=cache)
        ids = make.distinct(tokens, high=16, type=T.I64 if wide_ids else T.I32)
        result = build.set_rows(rows, build.reshape(result, 64 * heads, tokens), ids)
        ops.append("SET_ROWS")
    case = Case(make, result)
    assert case.ops(n_threads) == ["+".join(ops)]
    case.check(pool, n_threads)


def test_a_row_that_does_not_exist_is_named(pool: Pool) -> None:
    make = Leafs(1)
    rows, ids = make(64, 4, type=T.F16).named("cache"), make.ids(2, low=4, high=5).named("cells")
    rotated = build.rope_ext(make(32, 2, 2), make.ids(2, high=9), None, RopeParams(32))
    result = build.set_rows(rows, build.reshape(rotated, 64, 2), ids).named("stored")
    case = Case(make, result)
    assert case.ops() == ["ROPE+SET_ROWS"]
    with pytest.raises(IdError, match="stored: cells asks for row 4, which cache"):
        case.run(pool, fuse=True)


# ---------------------------------------------------------------- no fusion
def output(t: Tensor) -> None:
    t.flags |= TensorFlag.OUTPUT


Look = Callable[[Tensor], Sequence[Tensor]]
LOOKS: dict[str, Look] = {
    "reader": lambda t: [build.scale(t, 2.0)],
    "view": lambda t: [build.view(t, (8, 2), (t.nb[1],))],
    "output": lambda t: output(t) or [],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("place", "left"),
    [
        (0, ["RMS_NORM", "MUL", "ROPE+SET_ROWS"]),
        (1, [NORM, "ROPE+SET_ROWS"]),
        (2, [f"{NORM}+ROPE", "SET_ROWS"]),
    ],
)
def test_nothing_is_fused_away_that_somebody_needs(
    look: str, place: int, left: list[str], pool: Pool
) -> None:
    make = Leafs(3)
    normed = weighted(make, make(32, 2, 3))
    rotated = build.rope_ext(normed, make.ids(3, high=9), None, RopeParams(32))
    cells = build.reshape(rotated, 64, 3)
    stored = build.set_rows(make(64, 8, type=T.F16), cells, make.distinct(3, high=8))
    seen = (normed.src[0], normed, rotated)[place]
    assert seen is not None
    case = Case(make, stored, seen, *LOOKS[look](seen))
    assert [step for step in case.ops() if step != "SCALE"] == left
    case.check(pool)


@pytest.mark.parametrize("shape", [(32, 1), (1, 3), (32, 3)])
def test_weights_of_another_shape(shape: tuple[int, ...], pool: Pool) -> None:
    """Only one row of weights for all rows is in the table."""
    make = Leafs(4)
    case = Case(make, build.mul(build.rms_norm(make(32, 3), 1e-5), make(*shape)))
    assert case.ops() == ([NORM] if shape == (32, 1) else ["RMS_NORM", "MUL"])
    case.check(pool)


def test_rows_with_gaps_are_computed_one_by_one(pool: Pool) -> None:
    make = Leafs(5)
    part = build.view(make(48, 4, 3), (32, 2, 3), (4 * 48, 16 * 48))
    case = Case(make, weighted(make, part))
    assert case.ops() == ["RMS_NORM", "MUL"]
    case.check(pool)


# ---------------------------------------------------------------- memory that is used again
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("offset", [0, 1, -1, 3, 7])
@pytest.mark.parametrize("taken", ["a", "b"])
def test_the_result_lies_on_an_operand(taken: str, offset: int, n_threads: int, pool: Pool) -> None:
    """The allocator may put the result where a or b was: row on row, or shifted by rows."""
    make = Leafs(6)
    room = make(64, 40)
    first = build.view(room, (64, 12), offset=256 * 14)
    other = make(64, 12)
    a, b = (first, other) if taken == "a" else (other, first)
    total = build.add(a, b)
    result = weighted(make, total)
    case = Case(make, result, total)
    assert first.data is not None
    result.data = first.data + 256 * offset
    # apart only from 12 rows on
    assert case.ops() == ([f"ADD+{NORM}"] if offset == 0 else ["ADD", NORM])
    case.check(pool, n_threads)


@pytest.mark.parametrize("offset", [0, 1, 12])
def test_the_sum_lies_on_the_result(offset: int, pool: Pool) -> None:
    """A sum that nobody else needs may be overwritten by the result."""
    make = Leafs(7)
    total = build.add(make(64, 12), make(64, 12))
    room = make(64, 40)
    result = weighted(make, total)
    case = Case(make, result)
    case.graph.expand(room)
    memory = alloc_tensors([room], DEVICE.buffer_type())
    assert room.data is not None
    total.data, result.data = room.data, room.data + 256 * offset
    shifted = ["ADD", "RMS_NORM", "MUL"]  # the weights must not overwrite later rows of the sum
    assert case.ops() == (shifted if offset == 1 else [f"ADD+{NORM}"])
    case.check(pool, 3)
    del memory


# ---------------------------------------------------------------- whole models
def distributions(model: Llama, fuse: bool) -> tuple[list[Array], int]:
    """Logits of prompts and of single tokens, and how many steps the last graph had."""
    context = model.context()
    backend = next(b for b in context.backends if isinstance(b, CpuBackend))
    backend.fuse = fuse
    ids = np.random.default_rng(0).integers(3, model.model.hparams.n_vocab, 40).tolist()
    rows, at = [], 0
    for n in (1, 17, 1, 3, 1):
        context.decode(Batch.of(ids[at : at + n], at, logits="all"))
        rows.append(context.all_logits().copy())
        at += n
    (kept,) = backend._plans.values()
    (plan,) = kept.by_threads.values()
    n_steps = len(plan)
    model.close_context(context)
    return rows, n_steps


@pytest.mark.parametrize("variant", VARIANTS)
def test_models(variant: str, tmp_path: Path) -> None:
    arch, options = VARIANTS[variant]
    path = write_tiny(tmp_path / "m.gguf", arch, weight_type="Q8_0", **options)
    with load(path, n_ctx=64, n_threads=2, warmup=False) as model:
        (got, fewer), (expected, n_steps) = (distributions(model, fuse) for fuse in (True, False))
    assert fewer < n_steps
    assert [g.tobytes() for g in got] == [e.tobytes() for e in expected]


@pytest.mark.parametrize("wanted", [{"ROPE", "ADD"}, {"RMS_NORM", "MUL", "SWIGLU"}, None])
def test_callbacks_see_every_node_they_ask_for(wanted: set[str] | None, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q8_0")
    ids = list(range(3, 9))

    def seen(model: Llama, fuse: bool) -> list[tuple[str, bytes]]:
        context = model.context()
        backend = next(b for b in context.backends if isinstance(b, CpuBackend))
        backend.fuse = fuse
        found: list[tuple[str, bytes]] = []

        def callback(node: Tensor, ask: bool) -> bool:
            if not ask:
                found.append((node.name, read(node).tobytes()))
            return not ask or wanted is None or node.op_desc in wanted

        context.sched.eval_callback = callback
        context.decode(Batch.of(ids, 0))
        found.append(("logits", context.all_logits().tobytes()))
        model.close_context(context)
        return found

    with load(path, n_ctx=64, n_threads=2, warmup=False) as model:
        got, expected = seen(model, True), seen(model, False)
    assert len(got) > 6 and got == expected


# ---------------------------------------------------------------- the switch
def small_graph() -> tuple[Graph, Buffer | None]:
    make = Leafs(8)
    case = Case(make, weighted(make, make(32, 2)))
    return case.graph, case.buffer


@pytest.mark.parametrize(
    ("value", "ops"), [("", [NORM]), ("0", [NORM]), ("1", ["RMS_NORM", "MUL"])]
)
def test_the_variable(value: str, ops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CPU_DISABLE_FUSION", value)
    graph, memory = small_graph()
    backend = CpuBackend(DEVICE, 1)
    plan = backend.plan(graph)
    assert [label.op for label in plan.labels] == ops
    assert all(op in plan.describe() for op in ops)
    backend.close()
    del memory


def test_kernels_of_both_ways_are_prepared() -> None:
    """A callback may ask for a node that the plan of the whole graph fuses."""
    graph, memory = small_graph()
    assert kernel_names(graph, 1) == {"norms", "rms_norm", "mul"}
    assert kernel_names(graph, 1, fuse=False) == {"rms_norm", "mul"}
    del memory
