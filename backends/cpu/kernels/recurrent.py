"""Kernels of layers with a recurrent state: the causal convolution and the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import float32, types

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    dst_nb,
    dst_ne,
    graph_kernel,
    inline,
    param_float,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.attention_tiles import transposed
from pyggml.backends.cpu.kernels.emit import V, or_last, repeated
from pyggml.backends.cpu.kernels.rows import (
    LANE,
    LANES,
    STORED,
    SUM,
    Row,
    element,
    fold_lanes,
    for_lanes,
    running_sums,
    steps,
)
from pyggml.backends.cpu.kernels.simd import (
    F32,
    I32,
    I64,
    Typed,
    call_ir,
    intrinsic,
    load,
    load_ir,
    store,
    typed,
)

ZERO = float32(0)
ROWS = 4  # rows of a state that pass over the tokens together: they share q and k
FLOAT = STORED["f32"]

copy_row = Row(lambda x, c: x[0], unroll=4).operation()
exponentials = Row(lambda x, c: f.exp(x[0])).operation()


def _read(b: Any, address: Any, i: Any, rest: Any) -> V:
    return FLOAT.load(b, element(b, address, i, 4), LANES, rest)


# ---------------------------------------------------------------- convolution
FEW = 8  # tokens that are computed one by one


@intrinsic
def multiply_add(_: Any, x: Any, y: Any, z: Any) -> Typed:
    """x * y + z of single numbers, rounded as `mad` rounds lanes."""

    def emit(b: Any, a: Any) -> Any:
        return call_ir(b, "llvm.fma.f32", F32, a) if f.HAS_FMA else b.fadd(b.fmul(*a[:2]), a[2])

    return typed(types.float32(types.float32, types.float32, types.float32), emit)


def _conv_tile(b: Any, args: Any) -> None:
    """Operation (x, bytes per channel, kernel, bytes per channel, length of the kernel, out, bytes
    per token, channels, tokens): up to LANES tokens of as many channels.

    The lanes of a channel are tokens; they are exchanged before they are stored.
    """
    x, x_step, kernel, kernel_step, length, out, out_step, n_channels, n_tokens = args
    lanes, one = ir.Constant(I64, LANES), ir.Constant(I64, 1)
    last = b.sub(n_channels, one)
    rows = []
    for c in range(LANES):
        channel = or_last(b, ir.Constant(I64, c), last)
        rows.append((b.add(x, b.mul(channel, x_step)), b.add(kernel, b.mul(channel, kernel_step))))

    def tile(tokens: Any, channels: Any) -> None:
        sums = running_sums(b, LANES)
        with steps(b, ir.Constant(I64, 0), length, 1) as j:
            for total, (values, weights) in zip(sums, rows, strict=True):
                weight = repeated(b, LANE, load_ir(b, element(b, weights, j, 4), F32, 4))
                value = _read(b, values, j, tokens)
                b.store(f.mad(weight, value, V(b, LANE, b.load(total))).value, total)
        for t, v in enumerate(transposed([V(b, LANE, b.load(total)) for total in sums])):
            address = b.add(out, b.mul(out_step, ir.Constant(I64, t)))
            if tokens is None:
                FLOAT.store(b, address, v, channels)
            else:
                with b.if_then(b.icmp_signed("<", ir.Constant(I64, t), n_tokens)):
                    FLOAT.store(b, address, v, channels)

    is_whole = b.icmp_signed("==", b.add(n_channels, n_tokens), b.add(lanes, lanes))
    with b.if_else(is_whole) as (whole, part):
        with whole:
            tile(None, None)
        with part:
            tile(b.trunc(n_tokens, I32), b.trunc(n_channels, I32))


@intrinsic
def conv_tile(
    _: Any, x: Any, xs: Any, k: Any, ks: Any, length: Any, out: Any, step: Any, c: Any, n: Any
) -> Typed:
    return typed(types.void(*[types.intp] * 9), _conv_tile)


@inline
def conv_few(node: int, x: int, kernel: int, out: int, n_channels: int) -> None:
    """All tokens of some channels, one by one."""
    for t in range(dst_ne(node, 1)):
        for c in range(n_channels):
            total = ZERO
            for j in range(src_ne(node, 1, 0)):
                value = load(float32, x + c * src_nb(node, 0, 1) + 4 * (t + j))
                weight = load(float32, kernel + c * src_nb(node, 1, 1) + 4 * j)
                total = multiply_add(weight, value, total)
            store(out + 4 * c + t * dst_nb(node, 1), total)


@graph_kernel
def ssm_conv(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """dst[i, t, s] = sum over j of x[t + j, i, s] * kernel[j, i]; an item is LANES channels."""
    n_channels, n_tokens, n_kernel = dst_ne(node, 0), dst_ne(node, 1), src_ne(node, 1, 0)
    blocks = (n_channels + LANES - 1) // LANES
    items = blocks * dst_ne(node, 2)
    for i in range(chunk_start(items, chunk, n_chunks), chunk_start(items, chunk + 1, n_chunks)):
        first, seq = i % blocks * LANES, i // blocks
        count = min(LANES, n_channels - first)
        x = src_data(node, 0) + first * src_nb(node, 0, 1) + seq * src_nb(node, 0, 2)
        kernel = src_data(node, 1) + first * src_nb(node, 1, 1)
        out = dst_data(node) + 4 * first + seq * dst_nb(node, 2)
        if n_tokens < FEW:
            conv_few(node, x, kernel, out, count)
        else:
            for t in range(0, n_tokens, LANES):
                conv_tile(
                    *(x + 4 * t, src_nb(node, 0, 1), kernel, src_nb(node, 1, 1), n_kernel),
                    *(out + t * dst_nb(node, 1), dst_nb(node, 1), count),
                    min(LANES, n_tokens - t),
                )


# ---------------------------------------------------------------- gated delta rule
# (index of a vector's first element, elements left of it if it is the last) -> pairs to multiply
Pairs = Callable[[Any, Any], Iterator[tuple[V, V]]]


def _products(b: Any, count: int, n: Any, pairs: Pairs) -> list[Any]:
    """`count` inner products over n elements, each in one chain per lane."""
    sums = running_sums(b, count)

    def add(i: Any, rest: Any) -> None:
        for total, (x, y) in zip(sums, pairs(i, rest), strict=True):
            b.store(f.mad(x, y, V(b, LANE, b.load(total))).value, total)

    for_lanes(b, n, add)
    return [fold_lanes(b, SUM, [b.load(total)]) for total in sums]


def _delta_rows(count: int, per_key: bool) -> Any:
    """Operation (rows, k, q, v, outputs, n, decay, gate, beta, scale): one token of some rows.

    Each row, n key channels long, belongs to one value channel. It decays by e**gate, or by the
    factors at `decay`; then v minus its product with k, times beta, is added along k. Its product
    with q is the output. A row's result does not depend on the number of rows.
    """

    def emit(b: Any, args: Any) -> None:
        rows, k, q, v, out, n, decay, gate, beta, scale = args
        row_bytes = b.mul(n, ir.Constant(I64, 4))
        starts = [b.add(rows, b.mul(row_bytes, ir.Constant(I64, r))) for r in range(count)]
        one_decay = None if per_key else f.exp(repeated(b, LANE, gate))

        def decayed(i: Any, rest: Any) -> list[V]:
            factor = one_decay or _read(b, decay, i, rest)
            return [_read(b, start, i, rest) * factor for start in starts]

        def recall(i: Any, rest: Any) -> Iterator[tuple[V, V]]:
            key = _read(b, k, i, rest)
            return ((row, key) for row in decayed(i, rest))

        changes = []
        for r, known in enumerate(_products(b, count, n, recall)):
            value = load_ir(b, element(b, v, ir.Constant(I64, r), 4), F32, 4)
            changes.append(repeated(b, LANE, b.fmul(b.fsub(value, known), beta)))

        def learn(i: Any, rest: Any) -> Iterator[tuple[V, V]]:
            key, query = _read(b, k, i, rest), _read(b, q, i, rest)
            for start, row, change in zip(starts, decayed(i, rest), changes, strict=True):
                new = f.mad(key, change, row)
                FLOAT.store(b, element(b, start, i, 4), new, rest)
                yield new, query

        for r, product in enumerate(_products(b, count, n, learn)):
            target = b.inttoptr(element(b, out, ir.Constant(I64, r), 4), F32.as_pointer())
            b.store(b.fmul(product, scale), target, align=4)

    i, x = types.intp, types.float32

    def rows_of_token(
        _: Any, rows: Any, k: Any, q: Any, v: Any, o: Any, n: Any, d: Any, g: Any, beta: Any, s: Any
    ) -> Typed:
        return typed(types.void(i, i, i, i, i, i, i, x, x, x), emit)

    return intrinsic(rows_of_token)


@inline
def keep_rows(target: int, source: int, n: int) -> None:
    copy_row(target, source, 0, n, ZERO, ZERO, ZERO, ZERO)


@inline
def operand_row(node: int, s: int, head: int, token: int, seq: int) -> Any:
    """Address of a row of source s, a literal: [n, n_head, n_tokens, n_seqs]."""
    address = src_data(node, s) + head * src_nb(node, s, 1) + token * src_nb(node, s, 2)
    return address + seq * src_nb(node, s, 3)


def _delta_kernel(name: str, per_key: bool) -> None:
    """Sources: q, k, v, gate, beta, state. Parameters: snapshots, 1 / sqrt(n).

    An item is ROWS rows of a head's state. They are computed in the place of the latest snapshot.
    """
    many, one = _delta_rows(ROWS, per_key), _delta_rows(1, per_key)

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, n_head = src_ne(node, 2, 0), src_ne(node, 2, 1)
        n_tokens, n_seqs = src_ne(node, 2, 2), src_ne(node, 2, 3)
        n_head_k, n_share = src_ne(node, 0, 1), n_seqs // src_ne(node, 0, 3)
        n_snapshots, scale = param_int(node, 0), param_float(node, 1)
        snapshots = dst_data(node) + 4 * n * n_head * n_tokens * n_seqs
        snapshot_bytes = 4 * n * n * n_head * n_seqs
        decay = scratch(node, ith)
        blocks = (n + ROWS - 1) // ROWS
        items = blocks * n_head * n_seqs
        for i in range(
            chunk_start(items, chunk, n_chunks), chunk_start(items, chunk + 1, n_chunks)
        ):
            first, head, seq = i % blocks * ROWS, i // blocks % n_head, i // (blocks * n_head)
            n_rows = min(ROWS, n - first)
            old = src_data(node, 5) + first * src_nb(node, 5, 1) + head * src_nb(node, 5, 2)
            old += seq * src_nb(node, 5, 3)
            rows = snapshots + 4 * n * (first + n * (head + n_head * seq))
            for r in range(n_rows):
                keep_rows(rows + 4 * n * r, old + r * src_nb(node, 5, 1), n)
            for t in range(n_tokens):
                q = operand_row(node, 0, head % n_head_k, t, seq // n_share)
                k = operand_row(node, 1, head % n_head_k, t, seq // n_share)
                v = operand_row(node, 2, head, t, seq) + 4 * first
                gate = operand_row(node, 3, head, t, seq)
                beta = load(float32, operand_row(node, 4, head, t, seq))
                out = dst_data(node) + 4 * (n * (head + n_head * (t + n_tokens * seq)) + first)
                if per_key:
                    exponentials(decay, gate, 0, n, ZERO, ZERO, ZERO, ZERO)
                g = load(float32, gate)
                if n_rows == ROWS:
                    many(rows, k, q, v, out, n, decay, g, beta, scale)
                else:
                    for r in range(n_rows):
                        row, at = rows + 4 * n * r, 4 * r
                        one(row, k, q, v + at, out + at, n, decay, g, beta, scale)
                later = n_tokens - 1 - t
                if later > 0 and later < n_snapshots:
                    keep_rows(rows + later * snapshot_bytes, rows, n_rows * n)

    register_kernel(name, kernel)


_delta_kernel("gated_delta_net", per_key=False)
_delta_kernel("gated_delta_net_keys", per_key=True)
