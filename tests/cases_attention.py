"""Cases of softmax, rotary positions and attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from op_case import BF16, F16, F32, Case, Leafs, Make

from pyggml import build as b
from pyggml import params as p
from pyggml.dtypes import GGMLType
from pyggml.ops import RopeMode
from pyggml.tensor import Tensor

T = GGMLType


def _soft_max() -> Iterator[Case]:
    def case(name: str, a: Make, mask: Make | None = None, **options: float) -> Case:
        sinks = bool(options.pop("sinks", 0))

        def make(x: Leafs) -> Tensor:
            scores = a(x)
            return b.soft_max_ext(
                scores,
                mask(x) if mask else None,
                options.get("scale", 1.0),
                options.get("max_bias", 0.0),
                x(scores.ne[2]) if sinks else None,
            )

        return Case(f"soft_max-{name}", make)

    for n in (1, 7, 64, 300, 1031):
        yield case(f"row{n}", lambda x, n=n: x(n, 3, 2, scale=4))
    for type in (F32, F16):
        yield case(
            f"mask-{type.label}",
            lambda x: x(45, 7, 6, 2, scale=4),
            lambda x, t=type: x.mask(45, 7, 1, 2, type=t),
            scale=0.125,
        )
    yield case("mask-rows", lambda x: x(45, 7, 6), lambda x: x.mask(45, 12, 3), scale=0.5)
    yield case("alibi", lambda x: x(45, 7, 12), lambda x: x.mask(45, 7), max_bias=8.0)
    yield case("sinks", lambda x: x(45, 7, 6), lambda x: x.mask(45, 7), sinks=1)
    yield case("sinks-only", lambda x: x(45, 7, 6, scale=3), sinks=1)
    yield case("spread", lambda x: x(200, 3, scale=300))
    yield case("empty", lambda x: x(8, 0))
    hidden = lambda x: x.given(np.full((3, 8), -np.inf, np.float32))  # noqa: E731
    yield case("nothing-visible", lambda x: x(8, 3), hidden)


def _rope_case(
    name: str, a: Make, positions: Make, params: p.RopeParams, **options: float | str
) -> Case:
    factors = bool(options.pop("factors", 0))

    def make(x: Leafs) -> Tensor:
        values = x.rng.uniform(0.5, 4, params.n_dims).astype(np.float32)
        return b.rope_ext(a(x), positions(x), x.given(values) if factors else None, params)

    return Case(f"rope-{name}", make, **options)


YARN = {"n_ctx_orig": 4096, "freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}


def _rope() -> Iterator[Case]:
    case, rope = _rope_case, p.RopeParams
    heads = lambda x: x(64, 5, 7, 2)  # noqa: E731
    halfs = lambda x: x(64, 5, 7, type=F16)  # noqa: E731
    # heads of a matrix that holds Q, K and V
    window = lambda x: b.view(x(96 * 5, 7), (64, 5, 7), (384, 1920), 64)  # noqa: E731
    pos = lambda x: x.ids(7, high=4000)  # noqa: E731
    far = lambda x: x.ids(7, low=130_000, high=262_144)  # noqa: E731
    four = lambda x: x.ids(28, high=500)  # noqa: E731
    for name, mode in {"normal": RopeMode.NORMAL, "neox": RopeMode.NEOX}.items():
        yield case(name, heads, pos, rope(64, mode))
        yield case(f"{name}-partial", heads, pos, rope(40, mode))
        yield case(f"{name}-far", heads, far, rope(64, mode, freq_base=1e6))
        yield case(f"{name}-yarn", heads, pos, rope(64, mode, **YARN))
        yield case(f"{name}-scaled", heads, pos, rope(64, mode, freq_scale=0.125))
        yield case(f"{name}-factors", heads, pos, rope(64, mode), factors=1)
        yield case(f"{name}-f16", halfs, pos, rope(64, mode), tolerance=1e-7, ggml=1e-7)
        yield case(f"{name}-offset", heads, pos, rope(32, mode, n_offs=16), since="0.26")
        yield case(f"{name}-window", window, pos, rope(64, mode))
    sections = (8, 12, 12, 0)
    for name, mode in {"mrope": RopeMode.MROPE, "imrope": RopeMode.IMROPE}.items():
        yield case(name, heads, four, rope(64, mode, sections=sections))
        yield case(f"{name}-yarn", heads, four, rope(64, mode, sections=sections, **YARN))
    vision = rope(32, RopeMode.VISION, sections=(16, 16, 0, 0))
    yield case("vision", heads, four, vision)


FLASH_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    # head size of K, of V, queries, keys, heads, heads of K and V
    "decode": (64, 64, 1, 37, 9, 3),
    "decode-long": (64, 64, 1, 700, 4, 1),
    "decode-mha": (80, 80, 1, 129, 3, 3),
    "tile": (64, 64, 33, 150, 6, 2),
    "batch": (128, 128, 5, 64, 8, 2),
    "one-key": (64, 64, 1, 1, 2, 2),
    "small": (16, 8, 3, 20, 2, 1),
    "narrow": (40, 72, 4, 70, 2, 1),
    "mla": (576, 512, 3, 70, 16, 1),
    "gemma": (256, 256, 9, 90, 4, 1),
    "two-keys": (192, 128, 2, 2, 4, 2),
}


def _flash_case(
    name: str,
    shape: tuple[int, int, int, int, int, int],
    *,
    kv: GGMLType | tuple[GGMLType, GGMLType] = F16,
    n_seq: int = 1,
    masked: bool = True,
    window: int = 0,
    cached: bool = False,
    sinks: bool = False,
    tolerance: float = 1e-12,
    **options: float,
) -> Case:
    dk, dv, n_batch, n_kv, n_head, n_head_kv = shape

    def heads(x: Leafs, d: int, n: int, h: int, type: GGMLType = F32) -> Tensor:
        return (
            b.permute(x(d, h, n, n_seq, type=type), 0, 2, 1, 3)
            if cached
            else x(d, n, h, n_seq, type=type)
        )

    def make(x: Leafs) -> Tensor:
        q = heads(x, dk, n_batch, n_head)
        kinds = kv if isinstance(kv, tuple) else (kv, kv)
        k, v = (heads(x, d, n_kv, n_head_kv, t) for d, t in zip((dk, dv), kinds, strict=True))
        mask = x.mask(n_kv, n_batch, 1, n_seq, window=window) if masked else None
        params = p.FlashAttnParams(**{"scale": dk**-0.5, **options})
        return b.flash_attn_ext(q, k, v, mask, params, x(n_head) if sinks else None)

    return Case(f"flash-{name}", make, tolerance, ggml=2e-5)


def _flash() -> Iterator[Case]:
    case = _flash_case
    for name, shape in FLASH_SHAPES.items():
        yield case(name, shape)
        yield case(f"{name}-f32", shape, kv=F32)
    tile = FLASH_SHAPES["tile"]
    for name in ("decode-long", "tile"):
        shape = FLASH_SHAPES[name]
        yield case(f"{name}-cached", shape, cached=True)
        yield case(f"{name}-unmasked", shape, masked=False)
        yield case(f"{name}-window", shape, window=25)
        yield case(f"{name}-softcap", shape, logit_softcap=20.0, scale=4.0)
        yield case(f"{name}-sinks", shape, sinks=True)
        yield case(f"{name}-alibi", shape, max_bias=8.0)
        yield case(f"{name}-sequences", shape, n_seq=2)
        yield case(f"{name}-sharp", shape, scale=30.0, tolerance=1e-10)
    for type in (BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.IQ4_NL):
        yield case(f"tile-{type.label}", tile, kv=type)
    for types in (
        *((T.Q8_0, T.Q8_0), (T.Q4_0, T.Q5_1), (T.IQ4_NL, F16), (BF16, T.Q4_1), (F32, T.Q5_0)),
        *((T.Q5_0, T.IQ4_NL), (F16, BF16), (T.Q4_1, F32), (T.Q5_1, T.Q4_0)),
    ):
        name = "-".join(t.label for t in types)
        yield case(f"decode-long-{name}", FLASH_SHAPES["decode-long"], kv=types)


CASES = [*_soft_max(), *_rope(), *_flash()]
