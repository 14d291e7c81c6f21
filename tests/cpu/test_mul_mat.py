"""Matrix products of the CPU backend: values, and one order of addition everywhere."""

import numpy as np
import pytest
from cpu_products import F32, Products, expected, random_columns, random_weights

from pyggml import build, quants
from pyggml.backend import alloc_tensors
from pyggml.backends.cpu import lower_matmul
from pyggml.backends.cpu.buffers import is_repacked
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.backends.cpu.plan import Plan
from pyggml.dtypes import GGMLType as T
from pyggml.graph import build_graph
from pyggml.tensor import new_tensor

QUANTIZED = tuple(LAYOUTS)
FLOATS = (T.F32, T.F16, T.BF16)
# Float32 sums of a few hundred terms, relative to the largest result.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def cpu():
    products = Products()
    yield products
    products.backend.close()


def close(got, want) -> bool:
    return float(np.abs(got - want).max()) <= TOLERANCE * float(np.abs(want).max())


@pytest.mark.parametrize("type", QUANTIZED + FLOATS, ids=lambda t: t.label)
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_values(cpu, type, n) -> None:
    """Odd rows, and an odd number of small blocks."""
    k = 2 * 256 if type.block_size == 256 else 7 * max(32, type.block_size)
    raw, x = random_weights(type, 21, k), random_columns(n, k)
    assert close(cpu.product(raw, type, x), expected(raw, type, x))


@pytest.mark.parametrize("type", QUANTIZED + FLOATS, ids=lambda t: t.label)
def test_bits_do_not_depend_on_columns_threads_or_layout(cpu, type) -> None:
    k, rows = 768, 40
    raw, x = random_weights(type, rows, k), random_columns(33, k)
    whole = cpu.product(raw, type, x)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13):
        assert np.array_equal(cpu.product(raw, type, x[:n]), whole[:n]), n
    for n_threads in (1, 3):
        assert np.array_equal(cpu.product(raw, type, x, n_threads=n_threads), whole)
    # rows that are not a whole panel
    part = raw.reshape(rows, -1)[3:22]
    assert np.array_equal(cpu.product(part, type, x[:5]), whole[:5, 3:22])
    if type in QUANTIZED:
        for n in (1, 3, 33):
            assert np.array_equal(cpu.product(raw, type, x[:n], repack=True), whole[:n]), n
        # an odd number of panels
        half = raw.reshape(rows, -1)[:24]
        assert np.array_equal(cpu.product(half, type, x[:9], repack=True), whole[:9, :24])


@pytest.mark.parametrize("type", [T.Q4_0, T.F16], ids=lambda t: t.label)
def test_bits_do_not_depend_on_blocking(cpu, type, monkeypatch) -> None:
    raw, x = random_weights(type, 24, 256), random_columns(50, 256)
    whole = cpu.product(raw, type, x)
    monkeypatch.setattr(lower_matmul, "BLOCK_BYTES", 1)
    assert np.array_equal(cpu.product(raw, type, x), whole)


@pytest.mark.parametrize("type", FLOATS, ids=lambda t: t.label)
@pytest.mark.parametrize("k", [1, 7, 8, 37, 100])
def test_rows_of_any_length(cpu, type, k) -> None:
    raw, x = random_weights(type, 11, k), random_columns(6, k)
    got = cpu.product(raw, type, x)
    assert close(got, expected(raw, type, x))
    assert np.array_equal(cpu.product(raw, type, x[:1]), got[:1])


def test_float_lanes(cpu) -> None:
    """The order of addition is the documented one."""
    w, x = random_columns(1, 45, 2), random_columns(1, 45, 3)
    lanes = np.zeros(8, np.float64)
    for i in range(45):
        product = np.float64(w[0, i]) * np.float64(x[0, i]) + lanes[i % 8]
        lanes[i % 8] = np.float32(product)
    low, high = lanes[:4].astype(np.float32), lanes[4:].astype(np.float32)
    a, b, c, d = low + high
    assert cpu.product(w, T.F32, x)[0, 0] == (a + c) + (b + d)


def test_extreme_quants(cpu) -> None:
    """All quants and activations at their limits: nothing saturates."""
    for type in QUANTIZED:
        k = 512
        x = np.where(random_columns(5, k) < 0, -1, 1).astype(np.float32)
        for byte in (0x00, 0x7F, 0xFF):
            raw = random_weights(type, 16, k).reshape(16, -1, type.type_size).copy()
            record = raw.view(quants.CODECS[type].layout)
            for field in record.dtype.names:
                if field not in ("d", "dmin", "m", "e"):
                    record[field] = (
                        np.frombuffer(bytes([byte]) * record[field].nbytes, np.uint8)
                        .view(record[field].dtype)
                        .reshape(record[field].shape)
                    )
            if type == T.Q8_0 and byte == 0xFF:
                record["qs"] = -127
            if type == T.IQ1_M:  # the upper bits are those of d
                record["scales"] = record["scales"] & 0x0FFF | 0x2000
            want = expected(raw.reshape(-1), type, x)
            for repack in (False, True):
                got = cpu.product(raw.reshape(-1), type, x, repack=repack)
                size = np.abs(expected(raw.reshape(-1), type, np.abs(x))).max()
                assert np.abs(got - want).max() <= 1e-5 * max(size, np.abs(want).max()), (
                    type,
                    byte,
                )


# ---------------------------------------------------------------- shapes and strides
@pytest.mark.parametrize("type", [T.F32, T.F16, T.Q8_0, T.Q4_K], ids=lambda t: t.label)
def test_broadcast_of_weights(cpu, type) -> None:
    k, rows = 256, 10
    raw = random_weights(type, 2 * 2 * rows, k)
    x = random_columns(2 * 6 * 5, k)
    weights = cpu.leaf(raw, type, k, rows, 2, 2)
    got = cpu.compute(build.mul_mat(weights, cpu.leaf(x, F32, k, 5, 6, 2)))
    planes = raw.reshape(2, 2, -1)
    columns = x.reshape(2, 6, 5, k)
    for i3 in range(2):
        for i2 in range(6):
            alone = cpu.product(planes[i3, i2 // 3], type, columns[i3, i2])
            assert np.array_equal(got[i3, i2], alone), (i3, i2)


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("type", [T.F32, T.F16], ids=lambda t: t.label)
def test_cache_views(cpu, type, n_tokens) -> None:
    """Keys, transposed values and queries as attention views them."""
    head, n_kv, n_head, n_head_kv = 40, 19, 6, 2
    k = random_columns(n_kv * n_head_kv, head).astype(np.float16)
    cache = cpu.leaf(k if type == T.F16 else k.astype(np.float32), type, head * n_head_kv, n_kv)
    keys = build.view(cache, (head, n_kv, n_head_kv), (cache.nb[1], type.row_size(head)), 0)
    q = random_columns(n_tokens * n_head, head)
    queries = build.permute(cpu.leaf(q, F32, head, n_head, n_tokens), 0, 2, 1, 3)
    got = cpu.compute(build.mul_mat(keys, queries))[0]
    keys_of = k.reshape(n_kv, n_head_kv, head).transpose(1, 0, 2).astype(np.float64)
    queries_of = q.reshape(n_tokens, n_head, head).transpose(1, 0, 2)
    want = np.stack([queries_of[h] @ keys_of[h // 3].T for h in range(n_head)])
    assert close(got, want)
    if n_tokens > 1:
        alone = build.permute(cpu.leaf(q[-n_head:], F32, head, n_head, 1), 0, 2, 1, 3)
        assert np.array_equal(cpu.compute(build.mul_mat(keys, alone))[0, :, 0], got[:, -1])


def test_half_activations(cpu) -> None:
    x = random_columns(5, 64).astype(np.float16)
    for type in (T.F32, T.Q4_0):
        raw = random_weights(type, 9, 64)
        got = cpu.compute(build.mul_mat(cpu.leaf(raw, type, 64, 9), cpu.leaf(x, T.F16, 64, 5)))
        assert np.array_equal(got[0, 0], cpu.product(raw, type, x.astype(np.float32)))


@pytest.mark.parametrize("type", [T.F32, T.Q8_0], ids=lambda t: t.label)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_empty(cpu, type, shape) -> None:
    n, rows = shape
    result = build.mul_mat(new_tensor(type, 64, rows), new_tensor(F32, 64, n))
    assert cpu.compute(result).size == 0


def test_zero_activations(cpu) -> None:
    raw = random_weights(T.Q4_1, 16, 64)
    assert not cpu.product(raw, T.Q4_1, np.zeros((2, 64), np.float32)).any()


# ---------------------------------------------------------------- what is supported
def supported(cpu, type, k, rows, repack=False, activations=F32) -> bool:
    weights = new_tensor(type, k, rows)
    if repack:
        weights = cpu.leaf(random_weights(type, rows, k), type, k, rows, repack=True)
        assert is_repacked(weights)
    return cpu.device.supports_op(build.mul_mat(weights, new_tensor(activations, k, 3)))


def test_supports_op(cpu) -> None:
    assert supported(cpu, T.Q4_0, 64, 7)
    assert supported(cpu, T.Q4_0, 64, 8, repack=True)
    assert not supported(cpu, T.F32, 64, 7, activations=T.I32)
    weights = cpu.leaf(random_weights(T.Q4_0, 8, 64), T.Q4_0, 64, 8, repack=True)
    assert not cpu.device.supports_op(build.get_rows(weights, new_tensor(T.I32, 2)))
    assert not cpu.device.supports_op(build.mul(new_tensor(F32, 64, 8), weights))


# ---------------------------------------------------------------- sharing of activations
def kernels(cpu, *results) -> list[str]:
    graph = build_graph(results)
    memory = alloc_tensors([*graph.leafs, *graph.nodes], cpu.device.buffer_type())
    plan = Plan(graph, cpu.device.library, 2)
    del memory
    return [label.kernel for label in plan.labels]


def test_activations_are_quantized_once(cpu) -> None:
    x = new_tensor(F32, 256, 5)
    a, b, c = (build.mul_mat(new_tensor(t, 256, 16), x) for t in (T.Q4_0, T.Q4_0, T.Q4_1))
    names = kernels(cpu, a, b, c)
    assert names.count("quantize_q8") == 2
    assert names.count("mul_mat_q4_0") == 2


def test_written_activations_are_quantized_again(cpu) -> None:
    """A copy into the tensor between two products must be seen by the second."""
    raw = random_weights(T.Q8_0, 8, 64)
    old, new = random_columns(1, 64, 5), random_columns(1, 64, 6)
    weights, x = cpu.leaf(raw, T.Q8_0, 64, 8), cpu.leaf(old, F32, 64, 1)
    first = build.mul_mat(weights, x)
    copied = build.cpy(cpu.leaf(new, F32, 64, 1), x)
    second = build.mul_mat(weights, copied)
    third = build.mul_mat(weights, x)  # the same tensor, later
    total = build.concat(build.concat(first, second, 1), third, 1)
    got = cpu.compute(total)[0, 0]
    want = [cpu.product(raw, T.Q8_0, v)[0] for v in (old, new, new)]
    assert np.array_equal(got, np.stack(want))
