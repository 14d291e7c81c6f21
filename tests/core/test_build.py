"""Builders: result shapes, types, names, views, and operands they refuse."""

from collections.abc import Callable

import pytest

from pyggml import build
from pyggml import params as p
from pyggml.dtypes import GGMLType
from pyggml.ops import GluOp, Op, RopeMode
from pyggml.tensor import Tensor, new_tensor

F32, F16, I32, I64, Q4_0 = (
    GGMLType.F32,
    GGMLType.F16,
    GGMLType.I32,
    GGMLType.I64,
    GGMLType.Q4_0,
)


def t(*ne: int, type: GGMLType = F32, name: str = "") -> Tensor:
    return new_tensor(type, *ne, name=name)


EXPERTS = (t(4, 5, 8), t(4, 1, 7), t(2, 7, type=I32))
FLASH = p.FlashAttnParams(1.0)
MASKED = p.FlashAttnParams(1.0, max_bias=8.0)

# builder -> operation, type, shape
RESULTS: dict[str, tuple[Callable[[], Tensor], Op, GGMLType, tuple[int, ...]]] = {
    "add tiles b": (lambda: build.add(t(4, 6), t(2, 3)), Op.ADD, F32, (4, 6)),
    "scale": (lambda: build.scale(t(4, 6), 2.0), Op.SCALE, F32, (4, 6)),
    "sum_rows": (lambda: build.sum_rows(t(4, 6, 2)), Op.SUM_ROWS, F32, (1, 6, 2)),
    "glu": (lambda: build.glu(t(8, 3), GluOp.SWIGLU), Op.GLU, F32, (4, 3)),
    "glu of two": (lambda: build.glu_split(t(8, 3), t(8, 3), GluOp.GEGLU), Op.GLU, F32, (8, 3)),
    "rms_norm": (lambda: build.rms_norm(t(4, 6), 1e-6), Op.RMS_NORM, F32, (4, 6)),
    "mul_mat": (
        lambda: build.mul_mat(t(32, 5, 2, type=Q4_0), t(32, 7, 6, 3)),
        *(Op.MUL_MAT, F32, (5, 7, 6, 3)),
    ),
    "mul_mat_id": (
        lambda: build.mul_mat_id(t(32, 5, 8, type=Q4_0), t(32, 1, 7), t(2, 7, type=I32)),
        *(Op.MUL_MAT_ID, F32, (5, 2, 7)),
    ),
    "mul_mat_id_cold": (
        lambda: build.mul_mat_id_cold(
            *(t(32, 5, 8, type=Q4_0), t(32, 2, 7), t(2, 7, type=I32), t(8, type=I32))
        ),
        *(Op.MUL_MAT_ID_COLD, F32, (5, 2, 7)),
    ),
    "get_rows": (
        lambda: build.get_rows(t(32, 9, 2, type=Q4_0), t(3, 2, type=I32)),
        *(Op.GET_ROWS, F32, (32, 3, 2)),
    ),
    "get_rows of integers": (
        lambda: build.get_rows(t(4, 9, type=I32), t(3, type=I32)),
        *(Op.GET_ROWS, I32, (4, 3)),
    ),
    "set_rows": (
        lambda: build.set_rows(t(32, 9, type=F16), t(32, 3), t(3, type=I64)),
        *(Op.SET_ROWS, F16, (32, 9)),
    ),
    "cpy": (lambda: build.cpy(t(4, 6), t(24, type=F16)), Op.CPY, F16, (24,)),
    "cast": (lambda: build.cast(t(4, 6), F16), Op.CPY, F16, (4, 6)),
    "cont": (lambda: build.cont(build.transpose(t(4, 6))), Op.CONT, F32, (6, 4)),
    "cont reshapes": (lambda: build.cont(t(4, 6), 3, 8), Op.CONT, F32, (3, 8)),
    "concat": (lambda: build.concat(t(4, 6), t(4, 2), 1), Op.CONCAT, F32, (4, 8)),
    "repeat": (lambda: build.repeat(t(2, 1), t(4, 6)), Op.REPEAT, F32, (4, 6)),
    "soft_max": (
        lambda: build.soft_max_ext(t(8, 2, 4), t(8, 3, type=F16), 1.0, 8.0),
        *(Op.SOFT_MAX, F32, (8, 2, 4)),
    ),
    "flash attention": (
        lambda: build.flash_attn_ext(t(16, 3, 4), t(16, 8, 2), t(24, 8, 2), None, FLASH),
        *(Op.FLASH_ATTN_EXT, F32, (24, 4, 3)),
    ),
    "rope": (
        lambda: build.rope_ext(t(8, 2, 3), t(3, type=I32), None, p.RopeParams(8)),
        *(Op.ROPE, F32, (8, 2, 3)),
    ),
    "rope in four sections": (
        lambda: build.rope_ext(t(8, 2, 3), t(12, type=I32), t(4), p.RopeParams(8, RopeMode.MROPE)),
        *(Op.ROPE, F32, (8, 2, 3)),
    ),
    "argsort": (lambda: build.argsort(t(8, 3)), Op.ARGSORT, I32, (8, 3)),
    "top k": (lambda: build.argsort_top_k(t(8, 3), 2), Op.VIEW, I32, (2, 3)),
}


@pytest.mark.parametrize("case", RESULTS.values(), ids=RESULTS.keys())
def test_results(case: tuple[Callable[[], Tensor], Op, GGMLType, tuple[int, ...]]) -> None:
    make, op, type, ne = case
    result = make()
    assert (result.op, result.type, result.ne[: len(ne)]) == (op, type, ne)
    assert set(result.ne[len(ne) :]) <= {1}
    assert result.data is None and result.buffer is None


REFUSED: dict[str, Callable[[], Tensor]] = {
    "add": lambda: build.add(t(4, 6), t(3)),
    "mul": lambda: build.mul(t(4), t(4, 6)),
    "unary of a transposed tensor": lambda: build.silu(build.transpose(t(4, 6))),
    "glu of an odd row": lambda: build.glu(t(7), GluOp.SWIGLU),
    "glu of two shapes": lambda: build.glu_split(t(8), t(4), GluOp.SWIGLU),
    "mul_mat inner": lambda: build.mul_mat(t(4, 5), t(3, 5)),
    "mul_mat heads": lambda: build.mul_mat(t(4, 5, 2), t(4, 5, 3)),
    "mul_mat transposed": lambda: build.mul_mat(build.transpose(t(5, 4)), t(4, 5)),
    "mul_mat_id tokens": lambda: build.mul_mat_id(t(4, 5, 8), t(4, 1, 7), t(2, 6, type=I32)),
    "mul_mat_id rows": lambda: build.mul_mat_id(t(4, 5, 8), t(4, 2, 7), t(3, 7, type=I32)),
    "mul_mat_id types": lambda: build.mul_mat_id(t(4, 5, 8), t(4, 1, 7), t(2, 7, type=I64)),
    "mul_mat_id no rows": lambda: build.mul_mat_id(t(4, 5, 8), t(4, 0, 7), t(2, 7, type=I32)),
    "mul_mat_id into": lambda: build.mul_mat_id(*EXPERTS, into=t(5, 2, 6)),
    "mul_mat_id into type": lambda: build.mul_mat_id(*EXPERTS, into=t(5, 2, 7, type=F16)),
    "mul_mat_id_cold marks": lambda: build.mul_mat_id_cold(*EXPERTS, t(7, type=I32)),
    "mul_mat_id_cold mark type": lambda: build.mul_mat_id_cold(*EXPERTS, t(8)),
    "mul_mat_id_cold into": lambda: build.mul_mat_id_cold(*EXPERTS, t(8, type=I32), into=t(5, 14)),
    "get_rows types": lambda: build.get_rows(t(4, 9), t(3)),
    "get_rows": lambda: build.get_rows(t(4, 9, 2), t(3, 3, type=I32)),
    "set_rows": lambda: build.set_rows(t(4, 9), t(4, 3), t(2, type=I64)),
    "set_rows of columns": lambda: build.set_rows(
        t(4, 9), build.transpose(t(3, 4)), t(3, type=I64)
    ),
    "cpy": lambda: build.cpy(t(4), t(5)),
    "cont": lambda: build.cont(t(4), 5),
    "concat": lambda: build.concat(t(4, 6), t(5, 6), 1),
    "concat types": lambda: build.concat(t(4), t(4, type=F16), 0),
    "repeat": lambda: build.repeat(t(3), t(4)),
    "reshape": lambda: build.reshape(t(4), 5),
    "reshape transposed": lambda: build.reshape(build.transpose(t(4, 6)), 24),
    "view": lambda: build.view(t(4), (4,), offset=4),
    "view strides": lambda: build.view(t(4, 4), (4, 4), (20,)),
    "permute": lambda: build.permute(t(4), 0, 1, 1, 3),
    "soft_max mask": lambda: build.soft_max_ext(t(8, 4), t(8, 3), 1.0),
    "soft_max bias": lambda: build.soft_max_ext(t(8, 4), None, 1.0, 8.0),
    "flash k and v": lambda: build.flash_attn_ext(t(4, 1), t(4, 8), t(4, 9), None, FLASH),
    "flash bias": lambda: build.flash_attn_ext(t(4, 1), t(4, 8), t(4, 8), None, MASKED),
    "flash mask type": lambda: build.flash_attn_ext(t(4, 1), t(4, 8), t(4, 8), t(8, 1), FLASH),
    "flash mask sequences": lambda: build.flash_attn_ext(
        *(t(4, 1, 1, 3), t(4, 8, 1, 3), t(4, 8, 1, 3), t(8, 1, 1, 2, type=F16), FLASH)
    ),
    "rope positions": lambda: build.rope_ext(t(8, 2, 3), t(4, type=I32), None, p.RopeParams(8)),
    "rope odd": lambda: build.rope_ext(t(8, 2, 3), t(3, type=I32), None, p.RopeParams(7)),
    "rope factors": lambda: build.rope_ext(t(8, 2, 3), t(3, type=I32), t(3), p.RopeParams(8)),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_refused_operands_are_named(make: Callable[[], Tensor]) -> None:
    with pytest.raises(build.ShapeError, match=r"^[A-Z_]+ cannot combine <"):
        make()


# ---------------------------------------------------------------- views
def test_view_of_a_view_is_a_view_of_the_root() -> None:
    root = t(16)
    outer = build.view(root, (8,), offset=16)
    inner = build.view(build.reshape(outer, 4, 2), (4,), offset=16)
    assert inner.view_src is root and inner.view_offs == 32
    assert inner.src[0] is not None and inner.src[0].view_src is root


def test_view_strides() -> None:
    a = t(4, 6, 2)
    assert build.view(a, (2, 3)).nb == (4, 8, 24, 24)
    assert build.view(a, (2, 3), (16,)).nb == (4, 16, 48, 48)
    assert build.view(a, (2, 3, 2), (16, 96)).nb == (4, 16, 96, 192)
    assert build.view(t(64, 2, type=Q4_0), (32,), offset=18).nb[1] == 18


def test_views_of_allocated_tensors_know_their_address() -> None:
    a = t(16)
    a.data = 1000
    view = build.view(build.view(a, (8,), offset=16), (4,), offset=8)
    assert view.data == 1024 and view.buffer is None
    assert build.reshape(a, 4, 4).data == 1000


def test_view_without_elements_may_begin_anywhere() -> None:
    view = build.view(t(4, 4), (4, 0), (1000,), offset=4000)
    assert view.nbytes == 0 and view.ne == (4, 0, 1, 1)


def test_permute_moves_dimension_i_to_axis_i() -> None:
    result = build.permute(t(2, 3, 5, 7), 2, 0, 3, 1)
    assert result.ne == (3, 7, 2, 5)
    assert result.nb == (8, 120, 4, 24)


def test_writers_are_views_of_what_they_write() -> None:
    cache = t(4, 9, name="cache")
    written = build.set_rows(cache, t(4, 2), t(2, type=I64))
    assert written.view_src is cache and written.src[2] is cache
    part = build.view(cache, (8,), offset=16)
    copied = build.cpy(t(8, name="k"), part)
    assert (copied.view_src, copied.view_offs, copied.src[1]) == (cache, 16, part)


def test_names() -> None:
    a = t(4, 6, name="a")
    names = [
        *(build.view(a, (4,)), build.reshape(a, 24), build.permute(a, 1, 0, 2, 3)),
        *(build.transpose(a), build.cont(a), build.cast(a, F16)),
        *(build.cpy(a, t(4, 6, name="b")), build.cpy(a, t(4, 6)), build.add(a, a)),
    ]
    assert [n.name for n in names] == [
        *("a (view)", "a (reshaped)", "a (permuted)"),
        *("a (transposed)", "a (cont)", "a (copy)"),
        *("b (copy of a)", "a (copy)", ""),
    ]
