"""Cases of products with chosen experts: shapes, absent experts, cold ones, joined results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from cases_products import EXACT_PRODUCTS, PRODUCTS
from op_case import F16, F32, I32, ROUNDED, Array, Case, Leafs

from pyggml import build as b
from pyggml.dtypes import GGMLType as T
from pyggml.tensor import Tensor

ROWS = 40
# name -> experts, used per token, tokens, columns of activations per token
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "one-expert": (1, 1, 5, 1),
    "one-used": (6, 1, 7, 1),
    "all-used": (4, 4, 5, 1),
    "all-used-down": (4, 4, 5, 4),
    "shared-columns": (6, 4, 3, 2),  # slots 0 and 2 take column 0, slots 1 and 3 column 1
    "decode": (8, 3, 1, 1),
    "decode-down": (8, 3, 1, 3),
    "decode-one-used": (8, 1, 1, 1),
    "grouped": (3, 2, 40, 1),  # more columns per expert than a group holds
    "grouped-down": (3, 2, 40, 2),
    "no-tokens": (6, 2, 0, 1),
}
# which slots [n_tokens, n_used] have no expert
ABSENT: dict[str, Callable[[Array], Array]] = {
    "some": lambda draw: draw < 0.5,
    "all": lambda draw: draw < 2,
    "first": lambda draw: np.arange(draw.size).reshape(draw.shape) == 0,
    "last": lambda draw: np.arange(draw.size).reshape(draw.shape) == draw.size - 1,
}
ABSENT_SHAPES = ("decode", "decode-down", "all-used-down", "shared-columns", "grouped")
OURS = "ggml knows neither absent nor cold experts"


def operands(
    x: Leafs, type: T, shape: tuple[int, int, int, int], absent: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, activations and ids: drawn without regard to repetitions in a token."""
    n_experts, n_used, n_tokens, per_token = shape
    k = 512 if type.block_size > 64 else 192
    ids = x.rng.integers(0, n_experts, (n_tokens, n_used))
    if absent:
        ids[ABSENT[absent](x.rng.random(ids.shape))] = -1
    weights = x(k, ROWS, n_experts, type=type)
    return weights, x(k, per_token, n_tokens), x.given(ids, I32)


def _case(type: T, shape: str, *, absent: str = "", cold: bool = False, into: bool = False) -> Case:
    n_experts, n_used, n_tokens, _ = SHAPES[shape]

    def make(x: Leafs) -> Tensor:
        weights, columns, ids = operands(x, type, SHAPES[shape], absent)
        target = x(ROWS, n_used, n_tokens) if into else None
        if not cold:
            return b.mul_mat_id(weights, columns, ids, into=target)
        marks = x.ids(n_experts, low=-1, high=2)
        return b.mul_mat_id_cold(weights, columns, ids, marks, into=target)

    flags = {"cold": cold, "into": into, f"{absent}-absent": bool(absent)}
    suffix = "".join(f"-{flag}" for flag, there in flags.items() if there)
    return Case(
        f"mul_mat_id-{shape}{suffix}-{type.label}",
        make,
        1e-12 if type in EXACT_PRODUCTS else 5e-4,
        ggml=ROUNDED,
        missing=OURS if suffix else "",
    )


def _experts() -> Iterator[Case]:
    for type in (F32, F16, T.Q4_0, T.Q4_K):
        for shape in SHAPES:
            yield _case(type, shape)
            yield _case(type, shape, cold=True)
        for shape in ABSENT_SHAPES:
            for absent in ABSENT:
                yield _case(type, shape, absent=absent)
            yield _case(type, shape, absent="some", into=True)
            yield _case(type, shape, absent="some", cold=True, into=True)
    for type in PRODUCTS:
        if type not in (F32, F16, T.Q4_0, T.Q4_K):
            yield _case(type, "shared-columns", absent="some", cold=True)
    yield Case(
        "add_id-absent",
        lambda x: b.add_id(x(40, 3, 5), x(40, 8), x.ids(3, 5, low=-1, high=8)),
        0,
        missing=OURS,
    )


CASES = list(_experts())
