"""What CUDA computes, row by row of its rules, and when it takes weights from host memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated import F32, simulation

from pyggml import build
from pyggml.backend import alloc_tensors
from pyggml.backends.cuda.support import batch_of, supports
from pyggml.backends.cuda.support_attention import attention_scratch, uses_vector_kernel
from pyggml.dtypes import GGMLType
from pyggml.ops import GluOp, Op, Precision, UnaryOp
from pyggml.params import FlashAttnParams, RopeParams, SortParams
from pyggml.tensor import Tensor, new_tensor

T = GGMLType
I32, I64, F16, BF16 = T.I32, T.I64, T.F16, T.BF16
Q4_0, Q8_0 = T.Q4_0, T.Q8_0


def t(type: GGMLType, *ne: int) -> Tensor:
    return new_tensor(type, *ne)


def node(op: Op, type: GGMLType, *src: Tensor, ne: tuple[int, ...] = ()) -> Tensor:
    """A node that `build` has no function for, or whose types it would choose itself."""
    return Tensor(type, (*ne, 1, 1, 1, 1)[:4] if ne else src[0].ne, op=op, src=src)


# ---------------------------------------------------------------- products
PRODUCT_TYPES = (
    *("f32", "f16", "bf16", "q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("mxfp4", "nvfp4", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_K"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs"),
)
NO_PRODUCT_TYPES = ("tq1_0", "tq2_0", "q8_1", "i32", "f64")


@pytest.mark.parametrize("type", T)
def test_types_of_weights(type: GGMLType) -> None:
    expected = type.label in PRODUCT_TYPES
    assert expected != (type.label in NO_PRODUCT_TYPES) or type in (T.I8, T.I16, T.I64)
    w = t(type, 256, 8)
    assert supports(build.mul_mat(w, t(F32, 256, 3))) == expected
    experts = t(type, 256, 8, 4)
    ids = t(I32, 2, 3)
    assert supports(build.mul_mat_id(experts, t(F32, 256, 1, 3), ids)) == expected
    cold = build.mul_mat_id_cold(experts, t(F32, 256, 1, 3), ids, t(I32, 4))
    assert supports(cold) == expected


@pytest.mark.parametrize("type", T)
def test_types_of_rows(type: GGMLType) -> None:
    expected = type.label in [*PRODUCT_TYPES, "i32"] and type != T.NVFP4
    assert supports(build.get_rows(t(type, 256, 8), t(I32, 3))) == expected


@pytest.mark.parametrize(
    ("type", "ne0", "expected"),
    [(T.IQ4_NL, 256, True), (T.IQ4_NL, 288, False), (T.MXFP4, 288, False), (T.Q8_0, 288, True)],
)
def test_some_rows_are_read_in_whole_superblocks(type: T, ne0: int, expected: bool) -> None:
    assert supports(build.get_rows(t(type, ne0, 8), t(I32, 3))) == expected


def test_half_precision_activations_need_such_weights() -> None:
    assert supports(build.mul_mat(t(F16, 64, 8), t(F16, 64, 2)))
    for type in (F32, BF16, Q8_0):
        assert not supports(build.mul_mat(t(type, 64, 8), t(F16, 64, 2)))


def test_products_read_packed_columns() -> None:
    w = t(F32, 64, 8)
    assert supports(build.mul_mat(w, build.view(t(F32, 128, 2), (64, 2), (512,))))
    x = build.permute(t(F32, 2, 64), 1, 0, 2, 3)
    assert not supports(build.mul_mat(w, x))


def test_precise_products_of_experts_run_elsewhere() -> None:
    product = build.mul_mat(t(F16, 64, 8), t(F32, 64, 2), Precision.F32)
    assert supports(product)
    experts = build.mul_mat_id(t(F16, 64, 8, 4), t(F32, 64, 1, 2), t(I32, 2, 2))
    assert supports(experts)
    experts.params = product.params
    assert not supports(experts)


# ---------------------------------------------------------------- writing and copying
@pytest.mark.parametrize(
    ("values", "table", "ids", "expected"),
    [
        *((F32, type, I64, True) for type in (F32, F16, BF16, Q4_0, Q8_0, T.Q4_1, T.IQ4_NL)),
        (F32, T.Q5_0, I32, True),
        (F32, T.Q5_1, I32, True),
        (F32, T.Q4_K, I64, False),
        (F16, F16, I64, True),
        (F16, F32, I64, False),
        (F32, F32, T.I16, False),
    ],
)
def test_set_rows(values: T, table: T, ids: T, expected: bool) -> None:
    found = node(Op.SET_ROWS, table, t(values, 256, 2), t(ids, 2), t(table, 256, 8), ne=(256, 8))
    assert supports(found) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        *((a, b, True) for a in (F32, F16, BF16) for b in (F32, F16, BF16)),
        *((F32, q, True) for q in (Q8_0, Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.IQ4_NL)),
        *((q, F32, True) for q in (Q8_0, Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)),
        (T.IQ4_NL, F32, False),
        (F16, Q8_0, False),
        (F32, T.Q4_K, False),
        (T.Q4_K, T.Q4_K, True),
        (F32, I32, True),
        (I32, F32, True),
        (I32, I32, True),
        (I64, I64, True),
        (I64, F32, False),
    ],
)
def test_copies(source: T, target: T, expected: bool) -> None:
    assert supports(node(Op.CPY, target, t(source, 256, 2), t(target, 256, 2))) == expected


def test_copies_with_gaps_need_a_kernel() -> None:
    rows = build.view(t(T.Q4_K, 512, 4), (256, 4), (T.Q4_K.row_size(512),))
    assert not supports(node(Op.CPY, T.Q4_K, rows, t(T.Q4_K, 256, 4)))
    rows = build.view(t(F32, 512, 4), (256, 4), (2048,))
    assert supports(build.cont(rows))


# ---------------------------------------------------------------- the rest of the table
a, b, h = t(F32, 64, 3), t(F32, 64, 3), t(F16, 64, 3)
halves = build.view(t(F32, 128, 3), (64, 3), (512,))  # rows with gaps between them
turned = build.permute(t(F32, 3, 64), 1, 0, 2, 3)
gaps = build.view(t(F32, 64, 6, 2), (64, 3, 2), (256, 1536))  # gaps only above the rows
POSITIONS = t(I32, 3)
ROWS: list[tuple[Tensor, bool]] = [
    (build.add(a, b), True),
    (node(Op.ADD, F32, h, a), True),
    (node(Op.MUL, T.BF16, t(BF16, 64), t(F32, 64)), True),
    (node(Op.DIV, F32, h, t(BF16, 64, 3)), False),
    (node(Op.SUB, F32, t(I32, 64), t(I32, 64)), False),
    (build.unary(a, UnaryOp.SILU), True),
    (build.unary(halves, UnaryOp.SILU), False),
    (build.glu(a, GluOp.SWIGLU), True),
    (build.glu(halves, GluOp.GEGLU), True),
    (build.rms_norm(halves, 1e-5), True),
    (build.norm(turned, 1e-5), False),
    (build.l2_norm(a, 1e-5), True),
    (build.rope_ext(t(F32, 64, 2, 3), POSITIONS, None, RopeParams(64)), True),
    (build.rope_ext(turned, t(I32, 1), None, RopeParams(64)), False),
    (build.scale(a, 2.0), True),
    (node(Op.SCALE, F16, h), False),
    (build.sum_rows(halves), True),
    (node(Op.SUM_ROWS, F16, h), False),
    (build.sum_rows(turned), False),
    (build.repeat(a, t(F32, 64, 6)), True),
    (build.repeat(h, t(F16, 64, 6)), True),
    (build.repeat(t(I32, 64), t(I32, 64, 2)), False),
    (build.concat(a, b, 1), True),
    (build.concat(t(I32, 4), t(I32, 4), 0), False),
    (build.soft_max(a), True),
    (build.clamp(a, 0, 1), True),
    (build.sqr(h), True),
    (build.argsort(a), True),
    (build.argsort(t(F32, 100_000)), True),
    (node(Op.TOP_K, I32, a, ne=(4, 3)), True),
    (build.add_id(t(F32, 64, 2, 3), t(F32, 64, 4), t(I32, 2, 3)), True),
    (build.fill(a, 1.0), True),
    (build.view(a, (32,)), True),
    (t(T.TQ1_0, 256), True),
    (node(Op.OUT_PROD, F32, a, b), True),
    (node(Op.OUT_PROD, F32, h, b), False),
    (node(Op.MAP_CUSTOM1, F32, a), False),
    (node(Op.SSM_CONV, F32, t(F32, 6, 256), t(F32, 4, 256), ne=(256, 3)), True),
    (node(Op.SSM_CONV, F32, t(F32, 6, 192), t(F32, 4, 192), ne=(192, 3)), False),
]


@pytest.mark.parametrize(("found", "expected"), ROWS, ids=lambda x: getattr(x, "op_desc", str(x)))
def test_rows(found: Tensor, expected: bool) -> None:
    assert supports(found) == expected


def test_sorting_order_does_not_matter() -> None:
    found = build.argsort(a)
    assert isinstance(found.params, SortParams)
    found.params = replace(found.params, descending=True)
    assert supports(found)


# ---------------------------------------------------------------- attention
def attention(
    sizes: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (8, 2),
    types: tuple[T, T] = (F16, F16),
    n_kv: int = 512,
    n_batch: int = 1,
    *,
    masked: bool = True,
    max_bias: float = 0.0,
) -> Tensor:
    q = t(F32, sizes[0], n_batch, heads[0])
    k, v = (t(type, size, n_kv, heads[1]) for type, size in zip(types, sizes, strict=True))
    mask = t(F16, n_kv, n_batch) if masked or max_bias else None
    return build.flash_attn_ext(q, k, v, mask, FlashAttnParams(0.1, max_bias=max_bias))


ATTENTION: list[tuple[Callable[[], Tensor], bool]] = [
    *((lambda d=d: attention((d, d)), True) for d in (40, 64, 72, 80, 96, 112, 128, 256)),
    *((lambda d=d: attention((d, d), types=(F32, F32)), False) for d in (16, 32, 48, 160, 192)),
    (lambda: attention((192, 128), (8, 1)), True),
    (lambda: attention((192, 128), (8, 2)), False),  # groups of 4
    (lambda: attention((320, 256), (32, 1)), True),
    (lambda: attention((320, 256), (16, 1)), False),
    (lambda: attention((512, 512), (2, 1)), True),
    (lambda: attention((512, 512), (2, 2)), False),  # no groups
    (lambda: attention((576, 512), (16, 1)), True),
    (lambda: attention((576, 512), (16, 1), n_kv=500), False),
    (lambda: attention((576, 512), (16, 1), masked=False), False),
    (lambda: attention((576, 512), (16, 1), max_bias=8.0), False),
    (lambda: attention(max_bias=8.0), True),
    (lambda: attention(types=(Q8_0, Q4_0)), True),
    (lambda: attention(types=(T.Q5_1, BF16)), True),
    (lambda: attention(types=(T.IQ4_NL, T.IQ4_NL)), False),
]


@pytest.mark.parametrize(("made", "expected"), ATTENTION)
def test_attention(made: Callable[[], Tensor], expected: bool) -> None:
    assert supports(made()) == expected


def test_one_mask_for_all_heads() -> None:
    q, k = t(F32, 64, 1, 2), t(F16, 64, 256, 2)
    found = build.flash_attn_ext(q, k, k, t(F16, 256, 1, 2), FlashAttnParams(0.1))
    assert not supports(found)


@pytest.mark.parametrize(
    ("changes", "capability", "is_vector"),
    [
        ({}, 89, True),
        ({}, 86, False),  # groups of queries, and before Ada
        ({"heads": (2, 2)}, 86, True),  # no groups
        ({"n_batch": 2}, 89, False),
        ({"heads": (8, 1), "n_kv": 8192}, 89, False),  # heavy
        ({"types": (Q8_0, Q8_0), "n_batch": 2}, 89, True),
        ({"types": (Q8_0, Q8_0), "n_batch": 2}, 86, False),
        ({"types": (Q8_0, Q8_0)}, 86, True),
        ({"sizes": (80, 80), "heads": (2, 2)}, 89, False),
        ({"n_kv": 300, "heads": (2, 2)}, 89, False),
        ({"sizes": (72, 72), "heads": (2, 2)}, 89, True),
        ({"sizes": (72, 72), "types": (Q8_0, Q8_0), "n_batch": 2}, 89, True),
        ({"sizes": (72, 72)}, 89, False),
    ],
)
def test_which_kernel(changes: dict[str, object], capability: int, is_vector: bool) -> None:
    made = attention(**changes)  # type: ignore[arg-type]  # a row of keywords
    assert uses_vector_kernel(made, capability) == is_vector


@pytest.mark.parametrize(
    ("types", "n_batch", "copied"),
    [
        ((F16, F16), 64, ()),
        ((Q8_0, Q8_0), 1, ()),  # the vector kernel reads them
        ((Q8_0, Q8_0), 64, ("k", "v")),
        ((Q8_0, Q4_0), 1, ("k", "v")),  # not compiled
        ((F16, Q8_0), 64, ("v",)),
        ((F32, F32), 1, ("k", "v")),
    ],
)
def test_scratch_holds_copies_in_half_precision(
    types: tuple[T, T], n_batch: int, copied: tuple[str, ...]
) -> None:
    made = attention(types=types, n_batch=n_batch)
    assert attention_scratch(made, 89) == len(copied) * 2 * 128 * 512 * 2
    card = simulation("rtx4090").devices[0]
    assert card.buffer_type().alloc_size(made) == made.nbytes + attention_scratch(made, 89)


# ---------------------------------------------------------------- devices
def test_a_source_on_another_card_is_refused() -> None:
    sim = simulation("rtx3060:64MiB", "rtx3060:64MiB")
    first, second, cpu = sim.devices
    w = t(F32, 64, 64)
    product = build.mul_mat(w, t(F32, 64, 2))
    assert first.supports_op(product) and second.supports_op(product)
    buffer = alloc_tensors([w], first.buffer_type())
    assert first.supports_op(product) and not second.supports_op(product)
    assert first.supports_buft(first.buffer_type()) and not first.supports_buft(cpu.buffer_type())
    pinned = first.host_buffer_type()
    assert pinned is second.host_buffer_type() and pinned is not None
    assert not first.supports_buft(pinned) and cpu.supports_buft(pinned)
    assert buffer is not None


def test_what_nobody_can_compute_here_is_not_promised() -> None:
    """CUDA adds numbers in half precision; the CPU that computes for a simulated card does not."""
    odd = node(Op.OUT_PROD, F32, t(F32, 8, 8), t(F32, 8, 8))
    assert supports(odd)
    assert not simulation("rtx3060:64MiB").devices[0].supports_op(odd)
    assert simulation("rtx3060", execute="dry").devices[0].supports_op(odd)


BATCHES: list[tuple[Tensor, int]] = [
    (build.get_rows(t(F32, 64, 8), t(I32, 100)), 0),
    (build.mul_mat(t(F32, 64, 8), t(F32, 64, 31)), 31),
    (build.mul_mat(t(F32, 64, 8, 2), t(F32, 64, 7, 2)), 7),
    (build.mul_mat_id(t(F32, 64, 8, 16), t(F32, 64, 1, 31), t(I32, 8, 31)), 31),
    (build.mul_mat_id_cold(t(F32, 64, 8, 16), t(F32, 64, 1, 5), t(I32, 8, 5), t(I32, 16)), 5),
    (build.rope_ext(t(F32, 64, 4, 9), t(I32, 9), None, RopeParams(64)), 9),
    (build.mul(t(F32, 64, 5, 6), t(F32, 64)), 30),
]


@pytest.mark.parametrize(("found", "batch"), BATCHES)
def test_batches(found: Tensor, batch: int) -> None:
    assert batch_of(found) == batch


@pytest.mark.parametrize(("variable", "least"), [(None, 32), ("4", 4), ("0", 0)])
def test_large_batches_are_offloaded(
    variable: str | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GGML_OP_OFFLOAD_MIN_BATCH", raising=False)
    if variable is not None:
        monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", variable)
    card = simulation("rtx3060").devices[0]
    monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "1000")  # it has been read
    for n in (1, 3, 4, 31, 32, 33):
        product = build.mul_mat(t(F32, 64, 8), t(F32, 64, n))
        assert card.offload_op(product) == (n >= least)
    rows = build.get_rows(t(F32, 64, 8), t(I32, 100))
    assert card.offload_op(rows) == (least == 0)
