"""Products with chosen experts: the same bits as single products of each token."""

import numpy as np
import pytest
from cpu_products import F32, Products, random_columns, random_weights

from pyggml import build
from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.dtypes import GGMLType as T

TYPES = (T.Q4_0, T.Q4_K, T.F16)
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


def test_ids_outside_take_part_in_nothing(cpu) -> None:
    raw = random_weights(T.Q4_0, 6 * ROWS, K)
    x = random_columns(4, K).reshape(4, 1, K)
    ids = np.array([[0, -1], [-1, 6], [3, 1000], [2, 1]])
    got = experts_product(cpu, raw, T.Q4_0, x, ids)
    for t, s in np.argwhere((ids >= 0) & (ids < 6)):
        alone = cpu.product(raw.reshape(6, -1)[ids[t, s]], T.Q4_0, x[t])
        assert np.array_equal(got[t, s], alone[0])


def test_strided_ids(cpu) -> None:
    """As a top-k view of sorted experts."""
    raw = random_weights(T.Q4_0, 6 * ROWS, K)
    x = random_columns(5, K).reshape(5, 1, K)
    order = np.stack([np.random.default_rng(i).permutation(6) for i in range(5)]).astype(np.int32)
    weights = cpu.leaf(raw, T.Q4_0, K, ROWS, 6)
    top = build.view(cpu.leaf(order, T.I32, 6, 5), (2, 5), (24,))
    got = cpu.compute(build.mul_mat_id(weights, cpu.leaf(x, F32, K, 1, 5), top))[0]
    assert np.array_equal(got, experts_product(cpu, raw, T.Q4_0, x, order[:, :2]))
