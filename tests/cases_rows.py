"""Cases of norms, gather, scatter, copies and sorting."""

from __future__ import annotations

from collections.abc import Iterator

from cases_elementwise import LAYOUTS
from op_case import BF16, F16, F32, I32, I64, Case, node

from pyggml import build as b
from pyggml import params as p
from pyggml.dtypes import GGMLType as T
from pyggml.ops import Op
from pyggml.quants import CODECS, QUANTIZABLE
from pyggml.tensor import Tensor


def _norms() -> Iterator[Case]:
    for name, function in {"norm": b.norm, "rms_norm": b.rms_norm, "l2_norm": b.l2_norm}.items():
        for layout, make in LAYOUTS.items():
            eps = 1e-5 if layout == "one" else 1e-6
            yield Case(f"{name}-{layout}", lambda x, f=function, m=make, e=eps: f(m(x), e))
        yield Case(
            f"{name}-permuted",
            lambda x, f=function: f(b.permute(x(64, 3, 5), 0, 2, 1, 3), 1e-6),
        )
        yield Case(f"{name}-eps", lambda x, f=function: f(x(16, 9, scale=0.3), 0.5))
        yield Case(f"{name}-zeros", lambda x, f=function: f(x(40, 2, scale=0.0), 1e-6))
        yield Case(f"{name}-large", lambda x, f=function: f(x(576, 2, scale=1e4), 1e-5))


CPU_WRITES = (F32, F16, BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL)


def _get_rows() -> Iterator[Case]:
    for type in (I32, *(t for t in CODECS if t not in (T.Q8_1, T.Q8_K))):
        width = 512 if type.block_size > 64 else 128
        make = (
            (lambda x: x.ids(128, 11, low=-(2**31), high=2**31))
            if type == I32
            else lambda x, t=type, w=width: x(w, 11, type=t)
        )
        yield Case(
            f"get_rows-{type.label}",
            lambda x, m=make: b.get_rows(m(x), x.ids(7, high=11)),
            tolerance=0,
        )
    yield Case(
        "get_rows-batched",
        lambda x: b.get_rows(x(20, 9, 3, 2), x.ids(5, 3, 2, high=9)),
        tolerance=0,
    )
    yield Case(
        "get_rows-weights",  # the weights of a token's experts
        lambda x: b.get_rows(b.reshape(x(8, 6), 1, 8, 6), b.argsort_top_k(x.shuffled(8, 6), 3)),
        tolerance=0,
    )
    yield Case("get_rows-none", lambda x: b.get_rows(x(20, 9), x.ids(0, high=9)), 0)
    window = lambda x: b.view(x(64, 9), (40, 9), (256,), 32)  # noqa: E731
    yield Case("get_rows-window", lambda x: b.get_rows(window(x), x.ids(5, high=9)), 0)


def _set_rows() -> Iterator[Case]:
    for type in (t for t in QUANTIZABLE if t not in (T.Q8_1, T.Q8_K)):
        width = 256 if type.block_size > 64 else 128
        for index in (I64, I32):
            yield Case(
                f"set_rows-{type.label}-{index.label}",
                lambda x, t=type, w=width, i=index: b.set_rows(
                    x(w, 13, type=t), x(w, 5), x.distinct(5, high=13, type=i)
                ),
                tolerance=0,
                cpu=type in CPU_WRITES,
            )
    for type in (T.Q8_0, T.Q5_0, T.Q4_0, T.IQ4_NL):
        yield Case(
            f"set_rows-zeros-{type.label}",
            lambda x, t=type: b.set_rows(
                x(64, 4, type=t), x(64, 2, scale=0.0), x.distinct(2, high=4, type=I64)
            ),
            0,
        )
    for type in (F32, F16, BF16):
        yield Case(
            f"set_rows-single-{type.label}",  # the transposed V cache
            lambda x, t=type: b.set_rows(
                x(1, 700, type=t), x(1, 300), x.distinct(300, high=700, type=I64)
            ),
            tolerance=0,
        )
    yield Case(
        "set_rows-batched",
        lambda x: b.set_rows(
            x(20, 9, 4, 2, type=F16), x(20, 5, 4, 2), x.distinct(5, 2, 2, high=9, type=I64)
        ),
        tolerance=0,
    )
    yield Case(
        "set_rows-window",  # K of one matrix that holds Q, K and V
        lambda x: b.set_rows(
            x(48, 11, type=F16),
            b.view(x(144, 3), (48, 3), (576,), 192),
            x.distinct(3, high=11, type=I64),
        ),
        tolerance=0,
    )
    yield Case(
        "set_rows-f16-source",
        lambda x: b.set_rows(x(48, 11), x(48, 3, type=F16), x.distinct(3, high=11)),
        cpu=False,
    )
    yield Case("set_rows-none", lambda x: b.set_rows(x(8, 4), x(8, 0), x.ids(0, high=4)), 0)


COPIED = (F32, F16, BF16, I32)


def _copies() -> Iterator[Case]:
    for source in COPIED:
        for target in COPIED:
            odd = I32 in (source, target) and {source, target} & {F16, BF16}
            if odd:  # nobody converts these
                continue
            leaf = (
                (lambda x: x.ids(31, 5, 3, low=-99, high=99, type=I32))
                if source == I32
                else (lambda x, s=source: x(31, 5, 3, type=s, scale=99))
            )
            case = f"{source.label}-{target.label}"
            yield Case(f"cast-{case}", lambda x, m=leaf, t=target: b.cast(m(x), t), 0)
            yield Case(
                f"cpy-permuted-{case}",
                lambda x, m=leaf, t=target: (
                    b.cpy(
                        b.permute(m(x), 1, 0, 2, 3),
                        b.view(x(8, 99, type=t), (5, 31, 3), (8 * t.type_size, 256 * t.type_size)),
                    )
                    if t != I32
                    else b.cast(b.permute(m(x), 1, 0, 2, 3), t)
                ),
                0,
            )
    for type in COPIED:
        leaf = (
            (lambda x: x.ids(12, 7, 4, high=99))
            if type == I32
            else (lambda x, t=type: x(12, 7, 4, type=t))
        )
        for axes in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)):
            name = "".join(map(str, axes))
            yield Case(
                f"cont-{type.label}-{name}",
                lambda x, m=leaf, a=axes: b.cont(b.permute(m(x), *a)),
                0,
            )
    yield Case("cont-shape", lambda x: b.cont(b.permute(x(12, 7, 4), 0, 2, 1, 3), 84, 4), 0)
    yield Case("cont-empty", lambda x: b.cont(x(0, 7)), 0)
    yield Case("cont-q4_0", lambda x: b.cont(b.permute(x(32, 7, 4, type=T.Q4_0), 0, 2, 1, 3)), 0)
    yield Case("dup", lambda x: node(Op.DUP, b.transpose(x(12, 7))), 0)
    for type in (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL):
        yield Case(f"cast-f32-{type.label}", lambda x, t=type: b.cast(x(64, 3), t), 0)
        yield Case(f"cast-{type.label}-f32", lambda x, t=type: b.cast(x(64, 3, type=t), F32), 0)


def _joins() -> Iterator[Case]:
    for dim in range(4):
        ne = [11, 5, 3, 2]
        ne[dim] += 4
        yield Case(
            f"concat-{dim}", lambda x, d=dim, n=tuple(ne): b.concat(x(11, 5, 3, 2), x(*n), d), 0
        )
    yield Case("concat-i32", lambda x: b.concat(x.ids(5, 3, high=9), x.ids(5, 2, high=9), 1), 0)
    yield Case(
        "concat-permuted",
        lambda x: b.concat(b.permute(x(6, 3, 5), 0, 2, 1, 3), x(6, 5, 2), 2),
        0,
    )
    yield Case("repeat-tiled", lambda x: b.repeat(x(6, 2, 3), x(12, 6, 3, 2)), 0)
    yield Case("repeat-row", lambda x: b.repeat(x(64), x(64, 5)), 0)
    yield Case("repeat-column", lambda x: b.repeat(x(1, 5), x(40, 5)), 0)


def _sorting() -> Iterator[Case]:
    for n in (1, 2, 9, 128, 1000):
        for descending in (False, True):
            yield Case(
                f"argsort-{n}-{descending}",
                lambda x, n=n, d=descending: b.argsort(x.shuffled(n, 4), descending=d),
                0,
            )
        k = min(n, 8)
        yield Case(
            f"top_k-{n}",
            lambda x, n=n, k=k: Tensor(
                I32, (k, 4, 1, 1), op=Op.TOP_K, src=(x.shuffled(n, 4),), params=p.TopKParams(k)
            ),
            0,
            unordered=True,
        )
    yield Case("argsort-window", lambda x: b.argsort(b.view(x.shuffled(64, 4), (40, 4), (256,))), 0)


CASES = [*_norms(), *_get_rows(), *_set_rows(), *_copies(), *_joins(), *_sorting()]
