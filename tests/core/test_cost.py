"""Costs: by hand, and by watching the reference operations at work."""

import numpy as np
import pytest
from cases import CASES
from op_case import GARBAGE, Case, place

from pyggml import build as b
from pyggml.backends.reference.device import RefDevice
from pyggml.cost import Cost, Rates, Work, dense_bytes, expected_experts, node_cost
from pyggml.dtypes import GGMLType as T
from pyggml.ops import Op
from pyggml.params import FlashAttnParams
from pyggml.tensor import Tensor, new_tensor

PRODUCTS = (Op.MUL_MAT, Op.MUL_MAT_ID, Op.FLASH_ATTN_EXT)


# ---------------------------------------------------------------- by hand
def test_matrix_vector_product_reads_the_weights_once():
    node = b.mul_mat(new_tensor(T.Q4_0, 64, 10), new_tensor(T.F32, 64, 1))
    weights = 2 * 18 * 10
    moved = weights + 64 * 4 + 10 * 4
    assert node_cost(node) == Cost(moved, 2 * 64 * 10, weights, T.Q4_0, Work.PRODUCT)


def test_experts_of_a_token_and_of_many():
    weights = new_tensor(T.F16, 32, 8, 16)
    expert = 2 * 32 * 8
    one = b.mul_mat_id(weights, new_tensor(T.F32, 32, 1, 1), new_tensor(T.I32, 4, 1))
    assert node_cost(one).weight_bytes == pytest.approx(4 * expert)
    assert node_cost(one).flops == 2 * 32 * 8 * 4
    many = b.mul_mat_id(weights, new_tensor(T.F32, 32, 1, 2), new_tensor(T.I32, 4, 2))
    assert node_cost(many).weight_bytes == pytest.approx(16 * (1 - (12 / 16) ** 2) * expert)


def test_expected_experts_are_the_mean_of_draws():
    rng = np.random.default_rng(0)
    for n_expert, n_used, n_tokens in ((8, 2, 5), (32, 4, 16), (5, 5, 2), (64, 1, 40)):
        draws = [
            len({e for _ in range(n_tokens) for e in rng.permutation(n_expert)[:n_used]})
            for _ in range(600)
        ]
        spread = 4 * np.std(draws) / np.sqrt(len(draws)) + 1e-9
        assert expected_experts(n_expert, n_used, n_tokens) == pytest.approx(
            np.mean(draws), abs=spread
        )
    assert expected_experts(8, 2, 0) == 0


def test_rows_that_are_looked_up_or_set_not_the_table():
    table = new_tensor(T.Q8_0, 32, 1000)
    assert node_cost(b.get_rows(table, new_tensor(T.I32, 3))).bytes == 3 * 34 + 3 * 4 + 3 * 128
    cache = new_tensor(T.F16, 32, 1000)
    node = b.set_rows(cache, new_tensor(T.F32, 32, 3), new_tensor(T.I64, 3))
    assert node_cost(node).bytes == 3 * 32 * 4 + 3 * 8 + 3 * 32 * 2


def test_attention_by_its_keys():
    q, k = new_tensor(T.F32, 16, 2, 8), new_tensor(T.F16, 16, 256, 4)
    v, mask = new_tensor(T.F16, 32, 256, 4), new_tensor(T.F16, 256, 2)
    cost = node_cost(b.flash_attn_ext(q, k, v, mask, FlashAttnParams(1.0)))
    read = 4 * 16 * 2 * 8 + 2 * 256 * 4 * (16 + 32) + 2 * 256 * 2
    assert cost.bytes == read + 4 * 32 * 8 * 2
    assert cost.flops == 2 * 2 * 8 * 256 * (16 + 32)


def test_gaps_between_rows_do_not_count():
    wide = new_tensor(T.F32, 64, 4)
    left = Tensor(T.F32, (16, 4, 1, 1), wide.nb)
    assert dense_bytes(left) == 4 * 16 * 4
    assert node_cost(b.cont(left)).bytes == 2 * 4 * 16 * 4


def test_views_and_empty_nodes_are_free():
    a = new_tensor(T.F32, 8, 4)
    assert node_cost(b.reshape(a, 4, 8)).is_free
    assert node_cost(a).is_free
    assert node_cost(b.mul_mat(new_tensor(T.F32, 8, 4), new_tensor(T.F32, 8, 0))).is_free


# ---------------------------------------------------------------- by watching the reference
def _names(*ops: Op, without: tuple[str, ...] = ()) -> list[Case]:
    return [
        case
        for case in CASES
        if case.name.startswith(tuple(f"{op.name.lower()}-" for op in ops))
        and not any(word in case.name for word in without)
    ]


@pytest.mark.parametrize(
    "case", _names(*PRODUCTS, without=("absent", "cold"))[::5], ids=lambda case: case.name
)
def test_flops_of_products_are_those_of_the_matrices_that_are_multiplied(case, monkeypatch):
    counted, matmul = 0, np.matmul

    def counting(x, y, *args, **kwargs):
        nonlocal counted
        out = matmul(x, y, *args, **kwargs)
        counted += 2 * x.shape[-1] * out.size
        return out

    device = RefDevice()
    placed = place(case, device.buffer_type())
    if placed.result.op not in PRODUCTS:
        pytest.skip("the product is not the last node")
    monkeypatch.setattr(np, "matmul", counting)
    placed.run(device.init_backend())
    assert node_cost(placed.result).flops == counted


def _rows_that_matter(case: Case, slot: int) -> tuple[int, int]:
    """Rows of a source in which garbage changes the result, and the bytes of a row."""
    device = RefDevice()
    placed, backend = place(case, device.buffer_type()), RefDevice().init_backend()
    before = placed.run(backend).tobytes()
    source = placed.result.src[slot]
    assert source in placed.leafs
    stored, matters = placed.leafs[source], 0
    rows = stored.reshape(-1, stored.shape[-1])
    for i in range(len(rows)):
        keep = rows[i].copy()
        rows.view(np.uint8)[i] = 0xFF  # NaN, or as scale of a block
        matters += placed.run(backend).tobytes() != before
        rows[i] = keep
    return matters, source.type.row_size(source.ne[0])


READERS = _names(Op.MUL_MAT, Op.ADD, Op.MUL, Op.RMS_NORM, Op.GET_ROWS, without=("f16", "bf16"))


@pytest.mark.parametrize("case", READERS[::9], ids=lambda case: case.name)
def test_what_counts_as_read_is_what_garbage_would_change(case):
    placed = place(case, RefDevice().buffer_type())
    node = placed.result
    if any(s not in placed.leafs or len(placed.leafs[s]) > 64 for s in node.src if s is not None):
        pytest.skip("computed or long sources")
    floats = [i for i, s in enumerate(node.src) if s is not None and s.type != T.I32]
    read = sum(rows * size for rows, size in (_rows_that_matter(case, i) for i in floats))
    read += sum(dense_bytes(s) for s in node.src if s is not None and s.type == T.I32)
    distinct = node.op != Op.GET_ROWS  # a row that is looked up twice is read twice
    counted = node_cost(node).bytes - dense_bytes(node)
    assert counted == read if distinct else counted >= read


@pytest.mark.parametrize("case", _names(Op.SET_ROWS)[:6], ids=lambda case: case.name)
def test_rows_that_are_set_are_those_that_change(case):
    device = RefDevice()
    placed = place(case, device.buffer_type())
    node = placed.result
    target = node.src[2]
    placed.leafs[target][...] = np.frombuffer(bytes([GARBAGE]), np.uint8).view(np.int8)[0]
    before = placed.leafs[target].reshape(-1, placed.leafs[target].shape[-1]).copy()
    after = placed.run(device.init_backend()).reshape(before.shape)
    changed = int((after.view(np.uint8) != before.view(np.uint8)).any(axis=1).sum())
    values, ids = node.src[:2]
    assert node_cost(node).bytes == (
        dense_bytes(values) + dense_bytes(ids) + changed * node.type.row_size(node.ne[0])
    )


# ---------------------------------------------------------------- time
def test_time_is_the_slower_of_memory_and_arithmetic():
    rates = Rates(
        gbs=100,
        gflops=10,
        tensor_gflops=1000,
        gbs_of={T.Q4_0: 50},
        gflops_of={T.Q8_0: 500},
        node_latency=1e-6,
    )
    assert rates.seconds(Cost()) == 0
    assert rates.seconds(Cost(bytes=1e9)) == pytest.approx(1e-2 + 1e-6)
    assert rates.seconds(Cost(bytes=1e3, flops=1e9)) == pytest.approx(0.1 + 1e-6)
    vector = Cost(2e9, 1e6, 1e9, T.Q4_0, Work.PRODUCT)
    assert rates.seconds(vector) == pytest.approx(1e9 / 50e9 + 1e9 / 100e9 + 1e-6)
    for weights, gflops in ((T.Q4_0, 1000), (T.Q8_0, 500)):
        product = Cost(1e3, 1e12, 1e3, weights, Work.PRODUCT)
        assert rates.seconds(product) == pytest.approx(1e3 / gflops + 1e-6)
