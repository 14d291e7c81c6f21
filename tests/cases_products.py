"""Cases of matrix products."""

from __future__ import annotations

from collections.abc import Iterator

from op_case import BF16, F16, F32, ROUNDED, Case

from pyggml import build as b
from pyggml.dtypes import GGMLType as T
from pyggml.quants import CODECS

PRODUCTS = tuple(t for t in CODECS if t not in (T.Q8_1, T.Q8_K))
EXACT_PRODUCTS = (F32, F16, BF16)


def _products() -> Iterator[Case]:
    for type in PRODUCTS:
        k = 512 if type.block_size > 64 else 192
        tolerance = 1e-12 if type in EXACT_PRODUCTS else 5e-4
        for m in (1, 3, 17):
            yield Case(
                f"mul_mat-{type.label}-{m}",
                lambda x, t=type, k=k, m=m: b.mul_mat(x(k, 40, type=t), x(k, m)),
                tolerance,
                ggml=ROUNDED,
            )
        yield Case(
            f"mul_mat_id-{type.label}",
            lambda x, t=type, k=k: b.mul_mat_id(
                x(k, 24, 6, type=t), x(k, 1, 5), x.distinct(3, 5, high=6)
            ),
            tolerance,
            ggml=ROUNDED,
        )


def _batched_products() -> Iterator[Case]:
    for type in (F32, F16):
        yield Case(
            f"mul_mat-heads-{type.label}",
            lambda x, t=type: b.mul_mat(x(64, 33, 2, type=t), x(64, 5, 6, 2)),
            1e-12,
        )
        yield Case(
            f"mul_mat-cached-{type.label}",  # keys and queries as they lie in memory
            lambda x, t=type: b.mul_mat(
                b.permute(x(64, 2, 33, type=t), 0, 2, 1, 3),
                b.permute(x(64, 6, 5), 0, 2, 1, 3),
            ),
            1e-12,
        )
    yield Case("mul_mat-odd", lambda x: b.mul_mat(x(37, 3), x(37, 2)), 1e-12)
    yield Case("mul_mat-none", lambda x: b.mul_mat(x(64, 40), x(64, 0)), 0)
    for type in (F32, F16, T.Q4_0, T.Q4_K, T.Q6_K, T.Q8_0):
        yield Case(
            f"mul_mat_id-down-{type.label}",  # one activation per expert; strided ids
            lambda x, t=type: b.mul_mat_id(
                x(512, 24, 8, type=t), x(512, 3, 5), b.argsort_top_k(x.shuffled(8, 5), 3)
            ),
            1e-12 if type in EXACT_PRODUCTS else 5e-4,
        )


CASES = [*_products(), *_batched_products()]
