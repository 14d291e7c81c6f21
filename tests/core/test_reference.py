"""The reference operations against values worked out by hand, and their own corner cases."""

import math

import numpy as np
import pytest
from cases import CASES
from op_case import F16, I32, I64, Array, Case, Leafs, node, place

from pyggml import build as b
from pyggml import formulas
from pyggml import params as p
from pyggml.backends.reference.device import RefDevice
from pyggml.dtypes import GGMLType
from pyggml.errors import IdError
from pyggml.ops import GluOp, Op, RopeMode, UnaryOp

DEVICE = RefDevice()
INF = math.inf


def run(build, device: RefDevice = DEVICE) -> Array:
    """Values of the node that `build` makes, without its dimensions of 1."""
    return place(Case("hand", build), device.buffer_type()).run(device.init_backend()).squeeze()


def given(x: Leafs, values, type: GGMLType = GGMLType.F32):
    return x.given(np.array(values), type)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_supports_every_case(case: Case) -> None:
    assert all(DEVICE.supports_op(t) for t in place(case, DEVICE.buffer_type()).graph.nodes)


def test_second_operand_is_tiled() -> None:
    out = run(lambda x: b.add(given(x, [[1, 2, 3, 4], [5, 6, 7, 8]]), given(x, [10, 20])))
    assert out.tolist() == [[11, 22, 13, 24], [15, 26, 17, 28]]


def test_add_id_takes_the_row_of_the_expert() -> None:
    out = run(
        lambda x: node(
            Op.ADD_ID,
            given(x, [[[1.0, 2.0], [3.0, 4.0]]]),
            given(x, [[10.0, 10.0], [20.0, 20.0], [30.0, 30.0]]),
            given(x, [[2, 0]], I32),
        )
    )
    assert out.tolist() == [[31, 32], [13, 14]]


@pytest.mark.parametrize(
    ("op", "x", "y"),
    [
        (UnaryOp.SILU, 1.0, 0.7310585786),
        (UnaryOp.GELU, 1.0, 0.8411919906),
        (UnaryOp.GELU_ERF, 1.0, 0.8413447461),
        (UnaryOp.GELU_QUICK, 1.0, 0.8457957659),
        (UnaryOp.SOFTPLUS, 0.0, math.log(2)),
        (UnaryOp.SOFTPLUS, 21.0, 21.0),
        (UnaryOp.ELU, -1.0, math.exp(-1) - 1),
        (UnaryOp.HARDSWISH, 1.0, 4 / 6),
        (UnaryOp.HARDSIGMOID, 5.0, 1.0),
        (UnaryOp.ROUND, -2.5, -3.0),
        (UnaryOp.STEP, 0.0, 0.0),
        (UnaryOp.SGN, -7.0, -1.0),
    ],
)
def test_activations(op: UnaryOp, x: float, y: float) -> None:
    assert run(lambda leafs: b.unary(given(leafs, [x]), op)) == pytest.approx(y, rel=1e-6)


def test_glu_halves_and_their_order() -> None:
    row = [-1.0, 2.0, 10.0, 20.0]
    assert run(lambda x: b.glu(given(x, row), GluOp.REGLU)).tolist() == [0, 40]
    assert run(lambda x: b.glu(given(x, row), GluOp.REGLU, swapped=True)).tolist() == [-10, 40]


def test_norms() -> None:
    row = [3.0, 4.0]
    assert run(lambda x: b.rms_norm(given(x, row), 0.0)) == pytest.approx(
        [3 / 12.5**0.5, 4 / 12.5**0.5]
    )
    assert run(lambda x: b.l2_norm(given(x, row), 1e-6)) == pytest.approx([0.6, 0.8])
    assert run(lambda x: b.norm(given(x, row), 0.0)) == pytest.approx([-1, 1])


def test_get_and_set_rows() -> None:
    table = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    out = run(lambda x: b.get_rows(given(x, table), given(x, [2, 0], I32)))
    assert out.tolist() == [[5, 6], [1, 2]]
    out = run(lambda x: b.set_rows(given(x, table), given(x, [[9.0, 8.0]]), given(x, [1], I64)))
    assert out.tolist() == [[1, 2], [9, 8], [5, 6]]


def test_get_rows_refuses_rows_that_do_not_exist() -> None:
    with pytest.raises(IdError, match=r"asks for row 3.*\nthere are 0 to 2$"):
        run(lambda x: b.get_rows(x(4, 3), given(x, [3], I32)))


def test_set_rows_rounds_to_nearest_even() -> None:
    exact = 1 + 2.0**-11  # half way between two F16 values
    out = run(lambda x: b.set_rows(x(1, 2, type=F16), given(x, [[exact]]), given(x, [0], I64)))
    assert out[0] == 1


def test_copy_follows_the_logical_order() -> None:
    out = run(lambda x: b.cont(b.transpose(given(x, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])), 6))
    assert out.tolist() == [1, 4, 2, 5, 3, 6]


def test_large_integers_survive_a_copy() -> None:
    big = 2**31 - 1
    assert run(lambda x: b.cont(given(x, [big], I32))) == big


def test_product() -> None:
    out = run(lambda x: b.mul_mat(given(x, [[1.0, 2.0], [3.0, 4.0]]), given(x, [[10.0, 1.0]])))
    assert out.tolist() == [12, 34]


def test_products_round_activations_when_asked() -> None:
    def build(x: Leafs):
        return b.mul_mat(given(x, [[1.0]], F16), given(x, [[1 + 2.0**-12]]))

    assert run(build) == 1 + 2.0**-12
    assert run(build, RefDevice(quantize_activations=True)) == 1


def test_experts_and_absent_experts() -> None:
    experts = [[[1.0, 0.0]], [[0.0, 1.0]]]  # each one row of two columns
    out = run(
        lambda x: b.mul_mat_id(
            given(x, experts), given(x, [[[5.0, 7.0]]]), given(x, [[1, -1]], I32)
        )
    )
    untouched = np.frombuffer(b"\xaa" * 4, np.float32)[0]
    assert out.tolist() == [7, untouched]


def test_cold_experts_complete_another_product() -> None:
    experts = [[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]
    out = run(
        lambda x: b.mul_mat_id_cold(
            given(x, experts),
            given(x, [[[5.0, 7.0]]]),
            given(x, [[2, 1, 0, -1]], I32),
            given(x, [1, 0, 1], I32),
            into=given(x, [[[0.25], [0.5], [0.75], [1.0]]]),
        )
    )
    assert out.tolist() == [12, 0.5, 5, 1]


def test_no_expert_adds_nothing() -> None:
    a, bias = [[[1.0, 2.0], [3.0, 4.0]]], [[10.0, 20.0]]
    out = run(lambda x: b.add_id(given(x, a), given(x, bias), given(x, [[-1, 0]], I32)))
    assert out.tolist() == [[1, 2], [13, 24]]


def test_softmax_with_mask_and_sink() -> None:
    scores, mask = [[0.0, math.log(3.0), 5.0]], [[0.0, 0.0, -INF]]
    out = run(lambda x: b.soft_max_ext(given(x, scores), given(x, mask), 1.0))
    assert out == pytest.approx([0.25, 0.75, 0])
    sink = [math.log(4.0)]
    out = run(lambda x: b.soft_max_ext(given(x, scores), given(x, mask), 1.0, 0.0, given(x, sink)))
    assert out == pytest.approx([0.125, 0.375, 0])


def test_alibi_slopes() -> None:
    assert formulas.alibi_slopes(4, 8.0) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8])
    assert formulas.alibi_slopes(3, 8.0) == pytest.approx([2**-4, 2**-8, 2**-2])
    assert formulas.alibi_slopes(2, 0.0) == [1, 1]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (RopeMode.NORMAL, [math.cos(3), math.sin(3), -math.sin(0.03), math.cos(0.03)]),
        (RopeMode.NEOX, [math.cos(3), -math.sin(0.03), math.sin(3), math.cos(0.03)]),
    ],
)
def test_rope_turns_pairs(mode: RopeMode, expected: list[float]) -> None:
    """Position 3, base 10000: angles 3 and 3 / 100."""
    row = {RopeMode.NORMAL: [1.0, 0.0, 0.0, 1.0], RopeMode.NEOX: [1.0, 0.0, 0.0, 1.0]}[mode]
    out = run(
        lambda x: b.rope_ext(given(x, [[row]]), given(x, [3], I32), None, p.RopeParams(4, mode))
    )
    assert out == pytest.approx(expected, abs=1e-6)


def test_rope_leaves_the_channels_outside() -> None:
    params = p.RopeParams(2, n_offs=2)
    out = run(
        lambda x: b.rope_ext(given(x, [[[1.0, 2, 3, 4, 5, 6]]]), given(x, [1], I32), None, params)
    )
    assert out[[0, 1, 4, 5]].tolist() == [1, 2, 5, 6]
    assert out[2:4] == pytest.approx(
        [3 * math.cos(1) - 4 * math.sin(1), 3 * math.sin(1) + 4 * math.cos(1)]
    )


def test_attention_of_one_visible_key_is_its_value() -> None:
    q, k, v = [[[1.0, 0.0]]], [[[1.0, 0.0], [9.0, 9.0]]], [[[1.0, 2.0], [3.0, 4.0]]]
    params = p.FlashAttnParams(1.0)

    def build(mask: list[list[float]]):
        return lambda x: b.flash_attn_ext(
            given(x, q), given(x, k), given(x, v), given(x, mask, F16), params
        )

    assert run(build([[0.0, -INF]])).tolist() == [1, 2]
    assert run(build([[-INF, -INF]])).tolist() == [0, 0]


def test_sorting() -> None:
    row = [0.5, 2.0, -1.0]
    assert run(lambda x: b.argsort(given(x, row))).tolist() == [2, 0, 1]
    assert run(lambda x: b.argsort(given(x, row), descending=True)).tolist() == [1, 0, 2]
