"""Cases of functions of single elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from op_case import AGREES, BF16, F16, TABLED, Case, Leafs, Make, node

from pyggml import build as b
from pyggml import params as p
from pyggml.dtypes import GGMLType as T
from pyggml.ops import GluOp, Op, UnaryOp
from pyggml.tensor import Tensor

BROADCAST: dict[str, tuple[Make, Make]] = {
    "same": (lambda x: x(7, 5, 3, 2), lambda x: x(7, 5, 3, 2)),
    "row": (lambda x: x(64, 5, 3), lambda x: x(64)),
    "tiled": (lambda x: x(12, 6, 4, 2), lambda x: x(3, 2, 2)),
    "column": (lambda x: x(33, 9), lambda x: x(1, 9)),
    "scalar": (lambda x: x(40, 3), lambda x: x(1)),
    "heads": (lambda x: x(16, 4, 6), lambda x: x(16, 1, 6)),
    "permuted": (
        lambda x: b.permute(x(8, 5, 12, 2), 0, 2, 1, 3),
        lambda x: b.permute(x(8, 1, 12), 0, 2, 1, 3),
    ),
    "window": (
        lambda x: b.view(x(50, 6), (41, 6), (200,), 12),
        lambda x: b.view(x(64, 6), (41, 6), (256,), 4),
    ),
    "long": (lambda x: x(1031, 7), lambda x: x(1031, 7)),
    "empty": (lambda x: x(64, 0), lambda x: x(64, 1)),
}
BINARY = {"add": b.add, "sub": b.sub, "mul": b.mul, "div": b.div}


def _binary() -> Iterator[Case]:
    for op, function in BINARY.items():
        for name, (left, right) in BROADCAST.items():
            yield Case(
                f"{op}-{name}",
                lambda x, f=function, a=left, c=right: f(a(x), c(x)),
                tolerance=1e-14 if op == "div" else 0,
            )
        for type in (F16, BF16):
            yield Case(
                f"{op}-{type.label}",
                lambda x, f=function, t=type: f(x(16, 3, type=t), x(16, 3, type=t)),
                cpu=False,
            )
    yield Case("add-q4_0", lambda x: b.add(x(64, 3, type=T.Q4_0), x(64, 3)), cpu=False)


def _add_id(x: Leafs) -> Tensor:
    return node(Op.ADD_ID, x(40, 3, 5), x(40, 8), x.ids(3, 5, high=8))


ONE_OPERAND: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda a: b.scale(a, 0.37),
    "scale_bias": lambda a: b.scale(a, -1.5, 0.25),
    "clamp": lambda a: b.clamp(a, -0.4, 0.3),
    "sqr": b.sqr,
    "sqrt": lambda a: node(Op.SQRT, b.sqr(a)),
    "sum_rows": b.sum_rows,
}
LAYOUTS: dict[str, Make] = {
    "plain": lambda x: x(37, 5, 3, 2),
    "long": lambda x: x(1031, 3),
    "one": lambda x: x(1),
    "empty": lambda x: x(0, 3),
}


def _one_operand() -> Iterator[Case]:
    for op, function in ONE_OPERAND.items():
        exact = op in ("clamp", "sqr", "sqrt")
        for name, make in LAYOUTS.items():
            yield Case(
                f"{op}-{name}",
                lambda x, f=function, m=make: f(m(x)),
                tolerance=0 if exact else 1e-13,
            )
    yield Case(
        "scale-window",
        lambda x: b.scale(b.view(x(50, 6), (40, 6), (200,), 40), 2.0),
        missing="rows with gaps are ours",
    )
    yield Case("sum_rows-permuted", lambda x: b.sum_rows(b.permute(x(9, 5, 3), 0, 2, 1, 3)))
    fill = p.FillParams(1.25)
    yield Case("fill", lambda x: node(Op.FILL, x(37, 5), params=fill), tolerance=0)
    yield Case("add_id", _add_id, tolerance=0)


XIELU = (1.3, 0.8, 0.5, -1e-6)


def _unary() -> Iterator[Case]:
    for op in UnaryOp:
        tabled = TABLED if op in (UnaryOp.GELU, UnaryOp.GELU_QUICK) else AGREES
        small = 1e-8 if op == UnaryOp.EXPM1 else tabled  # ggml subtracts 1 from e**x

        def make(a: Tensor, op: UnaryOp = op) -> Tensor:
            t = b.unary(a, op)
            if op == UnaryOp.XIELU:
                t.params = p.UnaryParams(op, XIELU)
            return t

        name = op.name.lower()
        yield Case(f"{name}-plain", lambda x, m=make: m(x(131, 3, 2, scale=4)), ggml=tabled)
        yield Case(f"{name}-wide", lambda x, m=make: m(x(1031, 2, scale=200)), ggml=tabled)
        yield Case(f"{name}-narrow", lambda x, m=make: m(x(1031, 2, scale=1e-3)), ggml=small)
    rows = lambda x: b.view(x(64, 3, 2), (40, 3, 2), (256, 768), 32)  # noqa: E731
    yield Case("silu-window", lambda x: b.silu(rows(x)))
    yield Case("silu-f16", lambda x: b.silu(x(40, 3, type=F16)), cpu=False)
    yield Case("silu-empty", lambda x: b.silu(x(40, 0)))


def _glu() -> Iterator[Case]:
    for op in GluOp:
        name = op.name.lower()
        tabled = TABLED if op in (GluOp.GEGLU, GluOp.GEGLU_QUICK) else AGREES
        split = lambda x, op=op: b.glu_split(  # noqa: E731
            x(136, 3, 2, scale=4), x(136, 3, 2, scale=4), op, alpha=1.702, limit=2.5
        )
        yield Case(f"{name}-split", split, ggml=tabled)
        if op in (GluOp.SWIGLU_OAI, GluOp.SWIGLU_CLAMP):
            continue
        for swapped in (False, True):
            yield Case(
                f"{name}-halves-{swapped}",
                lambda x, op=op, s=swapped: b.glu(x(134, 5, scale=4), op, swapped=s),
                ggml=tabled,
            )
    window = lambda x: b.view(x(100, 5), (64, 5), (400,), 16)  # noqa: E731
    yield Case("swiglu-window", lambda x: b.glu(window(x), GluOp.SWIGLU))
    yield Case(
        "swiglu-columns",  # gate and up are windows of one wide product
        lambda x: b.glu_split(window(x), window(x), GluOp.SWIGLU),
    )


CASES = [*_binary(), *_one_operand(), *_unary(), *_glu()]
