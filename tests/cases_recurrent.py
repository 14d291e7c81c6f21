"""Cases of what layers with a recurrent state compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from op_case import Case, Leafs

from pyggml import build as b
from pyggml.tensor import Tensor


def _ssm_conv() -> Iterator[Case]:
    for n_kernel, n_channels, n_tokens, n_seqs in (
        *((4, 96, 1, 1), (4, 96, 1, 3), (4, 37, 11, 2)),
        *((3, 8, 100, 1), (7, 5, 2, 4), (1, 6, 3, 1), (4, 48, 33, 2), (4, 21, 8, 1)),
    ):
        shape = (n_kernel, n_channels, n_tokens, n_seqs)
        yield Case(
            f"ssm_conv-{'x'.join(map(str, shape))}",
            lambda x, k=n_kernel, c=n_channels, t=n_tokens, s=n_seqs: b.ssm_conv(
                x(k - 1 + t, c, s), x(k, c)
            ),
        )
    yield Case("ssm_conv-none", lambda x: b.ssm_conv(x(3, 5, 2), x(4, 5)))


def delta_net(
    x: Leafs,
    n: int,
    heads: tuple[int, int],
    n_tokens: int,
    n_seqs: int,
    *,
    per_key: bool = False,
    shared: bool = False,
    n_snapshots: int = 1,
) -> Tensor:
    """heads: of q and k, of v; shared: q and k are the same for all sequences.

    Keys have unit length: with longer ones the rule diverges.
    """
    n_head_k, n_head = heads
    q = b.l2_norm(x(n, n_head_k, n_tokens, 1 if shared else n_seqs), 1e-6)
    k = b.l2_norm(x(n, n_head_k, n_tokens, 1 if shared else n_seqs), 1e-6)
    v = x(n, n_head, n_tokens, n_seqs)
    gates = x.rng.uniform(-3, 0, (n_seqs, n_tokens, n_head, n if per_key else 1))
    beta = x.rng.uniform(0, 1, (n_seqs, n_tokens, n_head, 1))
    gate, beta = (x.given(a.astype(np.float32)) for a in (gates, beta))
    return b.gated_delta_net(q, k, v, gate, beta, x(n, n, n_head, n_seqs), n_snapshots)


def _gated_delta_net() -> Iterator[Case]:
    def case(name: str, *shape: object, **options: object) -> Case:
        make = lambda x: delta_net(x, *shape, **options)  # type: ignore[arg-type]  # noqa: E731
        return Case(f"gated_delta_net-{name}", make, 1e-12, since="0.26")

    yield case("one", 128, (2, 2), 1, 1)
    yield case("one-sequences", 64, (2, 6), 1, 5)
    yield case("prompt", 64, (2, 4), 100, 1)
    yield case("sequences", 32, (3, 6), 17, 3)
    yield case("narrow", 16, (1, 1), 7, 2)
    yield case("odd", 37, (1, 3), 9, 2)
    yield case("keys", 64, (2, 4), 12, 2, per_key=True)
    yield case("keys-odd", 21, (1, 2), 5, 1, per_key=True)
    yield case("shared", 32, (2, 2), 5, 4, shared=True)
    yield case("snapshots", 32, (2, 4), 9, 2, n_snapshots=4)
    yield case("snapshots-few-tokens", 37, (1, 2), 2, 2, n_snapshots=4)
    yield Case(
        "gated_delta_net-windows",  # q, k and v as parts of one row, as models have them
        lambda x: _windows(x, x(2 * 16 * 2 + 16 * 4, 9, 3)),
        1e-12,
        since="0.26",
    )


def _windows(x: Leafs, mixed: Tensor) -> Tensor:
    def heads(n_head: int, offset: int) -> Tensor:
        return b.view(mixed, (16, n_head, 9, 3), (64, 512, 512 * 9), 4 * offset)

    gates = x.rng.uniform(-1, 0, (3, 9, 4, 1)).astype(np.float32)
    q, k, v = b.l2_norm(heads(2, 0), 1e-6), b.l2_norm(heads(2, 32), 1e-6), heads(4, 64)
    return b.gated_delta_net(q, k, v, x.given(gates), x(1, 4, 9, 3), x(16, 16, 4, 3))


CASES = [*_ssm_conv(), *_gated_delta_net()]
