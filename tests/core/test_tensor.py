"""Tensors' derived quantities and marks, and the facts about the operations' ids."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml import build
from pyggml.dtypes import GGMLType
from pyggml.ops import OPS, GluOp, Op, TensorFlag, UnaryOp
from pyggml.tensor import Tensor, new_tensor

F32, F16, Q4_0 = GGMLType.F32, GGMLType.F16, GGMLType.Q4_0


def last_byte(t: Tensor) -> int:
    """One past the last byte that any element of a plain tensor uses."""
    ends = [0]
    for index in itertools.product(*map(range, t.ne)):
        ends.append(sum(i * nb for i, nb in zip(index, t.nb, strict=True)) + t.type.type_size)
    return max(ends)


sizes = st.integers(0, 3)
strides = st.integers(0, 9).map(lambda n: 4 * n)
shapes = st.tuples(sizes, sizes, sizes, sizes)


@given(shapes, st.tuples(strides, strides, strides, strides))
def test_nbytes_reaches_to_the_last_element(
    ne: tuple[int, int, int, int], nb: tuple[int, int, int, int]
) -> None:
    t = Tensor(F32, ne, nb)
    assert t.nbytes == last_byte(t)


@pytest.mark.parametrize(
    ("type", "ne", "nbytes", "nb"),
    [
        (F32, (5, 3), 60, (4, 20, 60, 60)),
        (F16, (5, 3, 2), 60, (2, 10, 30, 60)),
        (Q4_0, (64, 3), 108, (18, 36, 108, 108)),
        (GGMLType.Q6_K, (512, 2, 2), 1680, (210, 420, 840, 1680)),
        (Q4_0, (32,), 18, (18, 18, 18, 18)),
        (F32, (), 4, (4, 4, 4, 4)),
    ],
)
def test_packed_tensors(
    type: GGMLType, ne: tuple[int, ...], nbytes: int, nb: tuple[int, ...]
) -> None:
    t = new_tensor(type, *ne)
    assert (t.nbytes, t.nb) == (nbytes, nb)
    assert t.is_contiguous and t.has_contiguous_rows
    assert not t.is_transposed and not t.is_permuted
    assert t.nelements * type.type_size // type.block_size == nbytes
    assert t.nrows == t.ne[1] * t.ne[2] * t.ne[3]


@pytest.mark.parametrize("ne", [(0, 4, 1, 1), (4, 0, 1, 1), (4, 4, 0, 1), (4, 4, 1, 0)])
def test_strided_tensor_without_elements_has_no_bytes(ne: tuple[int, int, int, int]) -> None:
    t = Tensor(F32, ne, (4, 1000, 10, 1))  # unsigned arithmetic once gave 2**64 - 984
    assert t.nbytes == 0 and t.is_empty


@pytest.mark.parametrize(
    ("ne", "nb", "contiguous"),
    [
        # contiguous with no, one and two padded dimensions, and in the first 1, 2, 3 dimensions
        ((4, 3, 2, 2), (4, 16, 48, 96), "012 123"),
        ((4, 3, 2, 2), (4, 20, 60, 120), " 12 1  "),
        ((4, 3, 2, 2), (4, 16, 64, 128), "  2 12 "),
        ((4, 3, 2, 2), (4, 16, 48, 100), "    123"),
        ((4, 3, 2, 2), (16, 4, 48, 96), "       "),
        ((1, 3, 1, 1), (99, 4, 99, 99), "012 123"),  # strides of single elements do not matter
        ((4, 1, 2, 1), (4, 99, 16, 99), "0 2 123"),
    ],
)
def test_contiguity(
    ne: tuple[int, int, int, int], nb: tuple[int, int, int, int], contiguous: str
) -> None:
    t = Tensor(F32, ne, nb)
    assert [t.is_contiguous_n(m) for m in range(3)] == [c != " " for c in contiguous[:3]]
    assert [t.is_contiguous_n(0, n) for n in (1, 2, 3)] == [c != " " for c in contiguous[4:]]
    assert t.is_contiguous == t.is_contiguous_n(0)


def test_transposed_and_permuted() -> None:
    a = new_tensor(F32, 4, 3, 2)
    assert build.transpose(a).is_transposed and build.transpose(a).is_permuted
    swapped = build.permute(a, 0, 2, 1, 3)
    assert swapped.is_permuted and not swapped.is_transposed and swapped.has_contiguous_rows
    assert not build.transpose(a).has_contiguous_rows


@pytest.mark.parametrize(
    ("ne", "n"), [((1,), 1), ((7,), 1), ((1, 3), 2), ((4, 1, 2), 3), ((1, 1, 1, 2), 4)]
)
def test_n_dims(ne: tuple[int, ...], n: int) -> None:
    assert new_tensor(F32, *ne).n_dims == n


@pytest.mark.parametrize(
    ("small", "large", "fits"),
    [
        ((2, 1), (4, 3), True),
        ((4, 3), (4, 3), True),
        ((3,), (4, 3), False),
        ((4, 3), (4, 1), False),
        ((0,), (0, 5), True),
        ((0,), (4,), False),
    ],
)
def test_can_repeat(small: tuple[int, ...], large: tuple[int, ...], fits: bool) -> None:
    assert new_tensor(F32, *small).can_repeat_to(new_tensor(F32, *large)) == fits


def test_same_layout_needs_type_shape_and_strides() -> None:
    a = new_tensor(F32, 4, 4)
    assert a.same_layout(new_tensor(F32, 4, 4)) and a.same_shape(build.transpose(a))
    assert not a.same_layout(build.transpose(a))
    assert not a.same_layout(new_tensor(GGMLType.I32, 4, 4))
    assert not a.same_layout(new_tensor(F32, 4, 3))


@pytest.mark.parametrize(
    ("name", "kept"),
    [("x" * 63, "x" * 63), ("x" * 64, "x" * 63), ("ä" * 40, "ä" * 31), ("ä" * 31, "ä" * 31)],
)
def test_names_have_63_bytes(name: str, kept: str) -> None:
    assert new_tensor(F32, 1, name=name).name == kept


def test_output_protects_what_it_views() -> None:
    a = build.scale(new_tensor(F32, 8), 2.0)
    view = build.view(build.view(a, (4,)), (2,)).as_output()
    assert TensorFlag.OUTPUT in view.flags and TensorFlag.OUTPUT in a.flags


def test_results_cannot_be_inputs() -> None:
    with pytest.raises(AssertionError, match="cannot be an input"):
        build.scale(new_tensor(F32, 8), 2.0).as_input()


def test_text() -> None:
    assert repr(new_tensor(Q4_0, 32, 2, name="w")) == "<w: NONE q4_0 [32, 2]>"
    assert repr(build.silu(new_tensor(F32, 4))) == "<tensor: SILU f32 [4]>"


# ---------------------------------------------------------------- ids
def test_operations_have_ggmls_ids() -> None:
    ours = [Op.MUL_MAT_ID_COLD]
    assert [int(op) for op in Op if op not in ours] == list(range(101))
    assert min(ours) > 500  # ggml may add operations
    known = {0: "NONE", 29: "MUL_MAT", 47: "SOFT_MAX_BACK", 74: "FLASH_ATTN_EXT", 100: "GLU"}
    assert {i: Op(i).name for i in known} == known
    assert [int(op) for op in UnaryOp] == list(range(22)) and UnaryOp.TRUNC == 21
    assert [int(op) for op in GluOp] == list(range(7)) and GluOp.SWIGLU == 2


def test_products_may_only_replace_what_they_continue() -> None:
    assert list(OPS[Op.MUL_MAT_ID].in_place) == [3]
    assert list(OPS[Op.MUL_MAT_ID_COLD].in_place) == [4]


def test_table_of_operations_is_complete() -> None:
    assert set(OPS) == set(Op)
    assert {op.name for op in Op if OPS[op].is_view} == {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}
    in_place = {op.name for op in Op if OPS[op].in_place}
    assert len(in_place) == 24
    assert {"ADD", "MUL", "SCALE", "UNARY", "ROPE", "RMS_NORM", "SOFT_MAX"} <= in_place
    assert in_place.isdisjoint({"NORM", "GLU", "CPY", "CONT", "MUL_MAT", "SIN", "COS"})
