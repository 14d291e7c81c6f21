"""Products with chosen experts: the same bits as single products of each token."""

import numpy as np
import pytest
from cpu_products import F32, Products, random_columns, random_weights
from hypothesis import given
from hypothesis import strategies as st

from pyggml import build
from pyggml.alloc import GraphAllocator
from pyggml.backend import tensor_get
from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.lower_matmul import BLOCK_BYTES
from pyggml.backends.cpu.lowering import CHUNK_BYTES, PlanContext, find_lowering
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.dtypes import GGMLType as T
from pyggml.graph import build_graph
from pyggml.ops import Op
from pyggml.tensor import new_tensor

TYPES = (*LAYOUTS, T.F16, T.BF16, T.F32)
K, ROWS = 256, 24


@pytest.fixture(scope="module")
def cpu():
    products = Products()
    yield products
    products.backend.close()


def experts_product(cpu, raw, type, x, ids, *, repack=False, n_experts=6):
    """x [tokens, n_b, k], ids [tokens, n_used]: [tokens, n_used, rows]."""
    rows = raw.nbytes // n_experts // type.row_size(K)
    weights = cpu.leaf(raw, type, K, rows, n_experts, repack=repack)
    assert is_repacked(weights) == repack
    xs = cpu.leaf(x, F32, K, x.shape[1], x.shape[0])
    chosen = cpu.leaf(ids.astype(np.int32), T.I32, ids.shape[1], ids.shape[0])
    node = build.mul_mat_id(weights, xs, chosen)
    assert cpu.device.supports_op(node)
    return cpu.compute(node)[0]


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.label)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("per_token", [1, 2])
def test_bits_of_single_products(cpu, type, tokens, per_token) -> None:
    rng = np.random.default_rng(tokens)
    raw = random_weights(type, 6 * ROWS, K)
    x = random_columns(tokens * per_token, K).reshape(tokens, per_token, K)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(tokens)])
    got = experts_product(cpu, raw, type, x, ids)
    of_expert = raw.reshape(6, -1)
    for e in range(6):
        alone = cpu.product(of_expert[e], type, x.reshape(-1, K)).reshape(tokens, per_token, ROWS)
        for t, s in np.argwhere(ids == e):
            assert np.array_equal(got[t, s], alone[t, s % per_token]), (t, s)
    if type in LAYOUTS:
        assert np.array_equal(experts_product(cpu, raw, type, x, ids, repack=True), got)


def test_odd_rows(cpu) -> None:
    raw = random_weights(T.Q8_0, 2 * 19, K)
    x, ids = random_columns(9, K).reshape(9, 1, K), np.arange(9).reshape(9, 1) % 2
    got = experts_product(cpu, raw, T.Q8_0, x, ids, n_experts=2)
    for t in range(9):
        alone = cpu.product(raw.reshape(2, -1)[t % 2], T.Q8_0, x[t])
        assert np.array_equal(got[t], alone)


def test_one_expert_takes_all(cpu) -> None:
    raw = random_weights(T.Q4_0, 6 * ROWS, K)
    x, ids = random_columns(33, K).reshape(33, 1, K), np.full((33, 1), 5)
    got = experts_product(cpu, raw, T.Q4_0, x, ids)
    assert np.array_equal(got[:, 0], cpu.product(raw.reshape(6, -1)[5], T.Q4_0, x[:, 0]))


@pytest.mark.parametrize("type", [T.F16, T.BF16, T.F32], ids=lambda t: t.label)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_float_experts_with_many_and_with_few_columns(cpu, type, n_threads) -> None:
    """Blocks of rows, pieces of k that end anywhere, and groups that are filled in part."""
    k, rows, counts = 1033, 70, (0, 1, 3, 4, 7, 19)
    raw = random_weights(type, len(counts) * rows, k).reshape(len(counts), -1)
    ids = np.random.default_rng(2).permutation(np.repeat(np.arange(len(counts)), counts))
    x = random_columns(ids.size, k)
    weights = cpu.leaf(raw, type, k, rows, len(counts))
    chosen = cpu.leaf(ids.astype(np.int32), T.I32, 1, ids.size)
    node = build.mul_mat_id(weights, cpu.leaf(x, F32, k, 1, ids.size), chosen)
    got = cpu.compute(node, n_threads)[0, :, 0]
    for e in set(ids.tolist()):
        assert np.array_equal(got[ids == e], cpu.product(raw[e], type, x)[ids == e]), e


def test_more_columns_than_stay_in_the_cache(cpu) -> None:
    """Columns of an expert are taken in blocks if their activations are large."""
    k, n = 8192, 60
    raw = random_weights(T.Q4_0, 2 * 16, k).reshape(2, -1)
    x, ids = random_columns(n, k), np.arange(n) % 2
    assert n * k // 2 * 40 // 32 > BLOCK_BYTES
    weights = cpu.leaf(raw, T.Q4_0, k, 16, 2, repack=True)
    chosen = cpu.leaf(ids.astype(np.int32), T.I32, 1, n)
    got = cpu.compute(build.mul_mat_id(weights, cpu.leaf(x, F32, k, 1, n), chosen))[0, :, 0]
    for e in range(2):
        assert np.array_equal(got[ids == e], cpu.product(raw[e], T.Q4_0, x)[ids == e])


def test_an_expert_twice_in_a_token(cpu) -> None:
    raw = random_weights(T.Q4_0, 6 * ROWS, K)
    x = random_columns(8, K).reshape(4, 2, K)
    got = experts_product(cpu, raw, T.Q4_0, x, np.full((4, 2), 3))
    alone = cpu.product(raw.reshape(6, -1)[3], T.Q4_0, x.reshape(-1, K))
    assert np.array_equal(got.reshape(-1, ROWS), alone)


def test_strided_ids(cpu) -> None:
    """As a top-k view of sorted experts."""
    raw = random_weights(T.Q4_0, 6 * ROWS, K)
    x = random_columns(5, K).reshape(5, 1, K)
    order = np.stack([np.random.default_rng(i).permutation(6) for i in range(5)]).astype(np.int32)
    weights = cpu.leaf(raw, T.Q4_0, K, ROWS, 6)
    top = build.view(cpu.leaf(order, T.I32, 6, 5), (2, 5), (24,))
    got = cpu.compute(build.mul_mat_id(weights, cpu.leaf(x, F32, K, 1, 5), top))[0]
    assert np.array_equal(got, experts_product(cpu, raw, T.Q4_0, x, order[:, :2]))


# ---------------------------------------------------------------- two products, one result
EXPERTS = 5


@st.composite
def joins(draw):
    """Ids [tokens, used] with absent ones, columns per token, and which experts are cold."""
    tokens, used = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    per_token = draw(st.sampled_from([n for n in (1, 2, 4) if used % n == 0]))
    expert = st.integers(-1, EXPERTS - 1)
    ids = draw(st.lists(expert, min_size=tokens * used, max_size=tokens * used))
    cold = draw(st.lists(st.sampled_from([0, 0, 1, -7]), min_size=EXPERTS, max_size=EXPERTS))
    return np.array(ids).reshape(tokens, used), per_token, np.array(cold)


@pytest.mark.parametrize("type", [T.Q4_0, T.Q6_K, T.F16], ids=lambda t: t.label)
@given(join=joins(), repack=st.booleans(), n_threads=st.integers(1, 3))
def test_hot_and_cold_rows_together_are_the_plain_product(
    cpu, type, join, repack, n_threads
) -> None:
    """The cold product takes over the memory of the hot one: each row is written once."""
    ids, per_token, cold = join
    tokens, used = ids.shape
    repack = repack and type in LAYOUTS
    raw = random_weights(type, EXPERTS * 16, K)
    weights = cpu.leaf(raw, type, K, 16, EXPERTS, repack=repack)
    x = cpu.leaf(random_columns(tokens * per_token, K), F32, K, per_token, tokens)
    before = cpu.leaf(random_columns(tokens * used, 16), F32, 16, used, tokens)

    def chosen(values):
        return cpu.leaf(values.astype(np.int32), T.I32, used, tokens)

    all_ids, hot_ids = chosen(ids), chosen(np.where(cold[ids] != 0, -1, ids))
    marks = cpu.leaf(cold.astype(np.int32), T.I32, EXPERTS)
    plain = build.mul_mat_id(weights, x, all_ids, into=before)
    hot = build.mul_mat_id(weights, x, hot_ids, into=before)
    joined = build.mul_mat_id_cold(weights, x, all_ids, marks, into=hot)
    graph = build_graph([plain.as_output(), joined.as_output()])
    allocator = GraphAllocator([cpu.device.buffer_type()])
    allocator.alloc_graph(graph)
    assert joined.data == hot.data
    cpu.backend.set_n_threads(n_threads)
    cpu.backend.graph_compute(graph)
    results = []
    for t in (plain, joined):
        results.append(bytearray(t.nbytes))
        tensor_get(t, memoryview(results[-1]))
    assert results[0] == results[1]


# ---------------------------------------------------------------- work that is shared
@pytest.mark.parametrize("tokens", [1, 40])
def test_activations_are_quantized_and_sorted_once(tokens) -> None:
    """Gate, up and the cold part of both: one column per token, whoever takes it."""
    gate, up = (new_tensor(T.Q4_0, K, ROWS, 6) for _ in range(2))
    x, ids = new_tensor(F32, K, 1, tokens), new_tensor(T.I32, 2, tokens)
    cold = new_tensor(T.I32, 6)
    context = PlanContext(n_threads=2)
    nodes = [build.mul_mat_id(w, x, ids) for w in (gate, up)]
    nodes += [build.mul_mat_id_cold(w, x, ids, cold) for w in (gate, up)]
    steps = [s for node in nodes for s in find_lowering(node)(node, context)]
    names = [s.kernel for s in steps]
    assert names.count("quantize_q8") == 1
    assert names.count("route_experts") == 2  # of all experts and of the cold ones
    assert names.count("gather_columns") == (0 if tokens == 1 else 2)
    (quantized,) = (s.dst for s in steps if s.kernel == "quantize_q8")
    assert quantized.nbytes == tokens * K // 32 * LAYOUTS[T.Q4_0].activations.nbytes


def test_a_route_ends_when_its_marks_are_written() -> None:
    weights, x = new_tensor(T.Q4_0, K, ROWS, 6), new_tensor(F32, K, 1, 3)
    ids, cold = new_tensor(T.I32, 2, 3), new_tensor(T.I32, 6)
    context, names = PlanContext(n_threads=2), []
    written = build.cpy(new_tensor(T.I32, 6), cold)
    assert written.op == Op.CPY and written.view_src is cold
    for node in (*(2 * [build.mul_mat_id_cold(weights, x, ids, cold)]), written):
        names += [s.kernel for s in find_lowering(node)(node, context)]
        context.written(node)
    again = build.mul_mat_id_cold(weights, x, ids, cold)
    names += [s.kernel for s in find_lowering(again)(again, context)]
    assert names.count("route_experts") == 2


@pytest.mark.parametrize("n_threads", [2, 3, 8])
def test_threads_share_one_token(n_threads) -> None:
    """Chunks of one expert's rows, even if there are more threads than experts in use."""
    node = build.mul_mat_id(
        new_tensor(T.Q4_0, K, 16 * 64, 6), new_tensor(F32, K, 1, 1), new_tensor(T.I32, 1, 1)
    )
    steps = list(find_lowering(node)(node, PlanContext(n_threads)))
    assert steps[-1].n_chunks == n_threads


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("op", [build.mul_mat, build.mul_mat_id])
def test_a_chunk_is_worth_its_start(op, n_tokens) -> None:
    """More chunks than threads only where each reads enough; a thread that is late is helped."""
    found = []
    for rows in (16, 160, 1600, 16000):
        weights = new_tensor(T.Q8_0, 2048, rows, *([4] if op is build.mul_mat_id else []))
        operands = (
            (new_tensor(F32, 2048, 1, n_tokens), new_tensor(T.I32, 2, n_tokens))
            if op is build.mul_mat_id
            else (new_tensor(F32, 2048, n_tokens),)
        )
        node = op(weights, *operands)
        step = list(find_lowering(node)(node, PlanContext(2)))[-1]
        reads = weights.type.row_size(2048) * rows * node.ne[1] * (node.ne[2] or 1)
        found.append(step.n_chunks)
        if n_tokens == 1:
            assert step.n_chunks <= 2 or reads / step.n_chunks >= CHUNK_BYTES
    assert found[0] <= found[1] <= found[2] <= found[3] >= 8
