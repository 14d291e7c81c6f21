"""Inner loops of attention over one block of keys, as single operations for Numba.

Each sum has one order whatever the number of query rows: scores add up channel by channel, outputs
key by key. So the result of a query does not depend on what else is in its tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from pyggml.backends.cpu.attention import BLOCK, HEAD
from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.emit import V, at, first_lanes, or_last, repeated
from pyggml.backends.cpu.kernels.rows import (
    LANE,
    LANES,
    MAX,
    STORED,
    SUM,
    Stored,
    element,
    fold_lanes,
    running_sums,
    steps,
)
from pyggml.backends.cpu.kernels.simd import (
    F32,
    HAS_AVX512,
    I32,
    I64,
    Typed,
    intrinsic,
    load_ir,
    prefetch_ir,
    typed,
)

ROWS = 4  # query rows whose sums are in registers
VECTORS = 4 if HAS_AVX512 else 2  # and vectors of each row
FLOAT = STORED["f32"]

# A row's record: maximum, sum, factor of the latest block; from HEAD bytes on, its output.
MAXIMUM, TOTAL, FACTOR = 0, 4, 8
# Below every score. Minus infinity as the maximum of a row without visible keys would give NaN.
NOTHING = -1e30


def _number(value: int) -> Any:
    return ir.Constant(I64, value)


def _load(b: Any, address: Any) -> V:
    return FLOAT.load(b, address, LANES)


def _scalar(b: Any, address: Any) -> V:
    """A float from memory in every lane."""
    return repeated(b, LANE, load_ir(b, address, F32))


def _store_scalar(b: Any, address: Any, value: Any) -> None:
    b.store(value, b.inttoptr(address, F32.as_pointer()), align=4)


def operation(emit: Callable[[Any, Any], Any]) -> Any:
    """An operation of six addresses or counts."""

    def eight(_: Any, p: Any, q: Any, r: Any, s: Any, t: Any, u: Any) -> Typed:
        i = types.intp
        return typed(types.void(i, i, i, i, i, i), emit)

    return intrinsic(eight)


# ---------------------------------------------------------------- keys
def transposed(rows: list[V]) -> list[V]:
    """LANES vectors: lane j of vector i becomes lane i of vector j."""
    rows, m = list(rows), 1
    while m < LANES:
        for i in range(LANES):
            if not i & m:
                x, y = rows[i], rows[i | m]
                rows[i] = x.pick([LANES + (j ^ m) if j & m else j for j in range(LANES)], y)
                rows[i | m] = x.pick([LANES + j if j & m else j ^ m for j in range(LANES)], y)
        m *= 2
    return rows


def transpose_keys(kind: Stored) -> Any:
    """Operation (target, keys, bytes per key, channels, keys, -): float32, [channels][BLOCK].

    The last key is repeated up to the end of the block.
    """

    def emit(b: Any, args: Any) -> None:
        target, keys, step, n_channels, n_keys, _ = args
        last = b.sub(n_keys, _number(1))

        def tile(first: Any, e: Any, n: Any, count: int) -> None:
            rows = []
            for i in range(LANES):
                key = or_last(b, b.add(first, _number(i)), last)
                place = element(b, b.add(keys, b.mul(key, step)), e, kind.size)
                # of the next block: keys of one head are apart, which no hardware follows
                prefetch_ir(b, b.add(place, b.mul(step, _number(BLOCK))))
                rows.append(kind.load(b, place, LANES, n))
            to = b.add(target, b.mul(b.add(b.mul(e, _number(BLOCK)), first), _number(4)))
            for j, v in enumerate(transposed(rows)[:count]):
                v.store(at(b, to, 4 * BLOCK * j))

        with steps(b, _number(0), _number(BLOCK), LANES) as first:
            whole = b.and_(n_channels, _number(-LANES))
            with steps(b, _number(0), whole, LANES) as e:
                tile(first, e, None, LANES)
            if LANES > 8:  # channels are a multiple of 8
                with b.if_then(b.icmp_signed("<", whole, n_channels)):
                    tile(first, whole, ir.Constant(I32, 8), 8)

    return operation(emit)


# ---------------------------------------------------------------- scores and outputs
def _for_rows(b: Any, n_rows: Any, tile: Callable[[Any, int], None]) -> None:
    """tile(first row, number of rows) with ROWS rows at a time, then the remaining ones."""
    whole = b.and_(n_rows, _number(-ROWS))
    with steps(b, _number(0), whole, ROWS) as r:
        tile(r, ROWS)
    rest = b.sub(n_rows, whole)
    for count in range(1, ROWS):
        with b.if_then(b.icmp_signed("==", rest, _number(count))):
            tile(whole, count)


def _multiply(
    b: Any,
    rows: tuple[Any, Any],
    n: Any,
    columns: tuple[Any, Any],
    sums: Any,
    kind: Stored = FLOAT,
    ahead: Any = None,
) -> None:
    """sums[row][vector] += rows[row, i] * columns[i, vector] over i < n.

    rows: address and bytes from row to row; columns: address and bytes from i to i + 1, of a type
    of which what lies `ahead` bytes further is asked for.
    """
    count = len(sums)
    with steps(b, _number(0), n, 1) as i:
        column = b.add(columns[0], b.mul(i, columns[1]))
        places = [at(b, column, kind.size * LANES * k) for k in range(len(sums[0]))]
        for place in places if ahead is not None else ():
            prefetch_ir(b, b.add(place, ahead))
        vectors = [kind.load(b, place, LANES) for place in places]
        for row in range(count):
            start = b.add(rows[0], b.mul(rows[1], _number(row)))
            factor = _scalar(b, element(b, start, i, 4))
            for total, v in zip(sums[row], vectors, strict=True):
                b.store(f.mad(factor, v, V(b, LANE, b.load(total))).value, total)


def _scores(b: Any, args: Any) -> None:
    """Operation (scores [rows][BLOCK], queries [rows][channels], keys [channels][BLOCK], channels,
    rows, -)."""
    scores, queries, keys, n_channels, n_rows, _ = args
    row_bytes = b.mul(n_channels, _number(4))

    def tile(first: Any, count: int) -> None:
        start = b.add(queries, b.mul(first, row_bytes))
        out = b.add(scores, b.mul(first, _number(4 * BLOCK)))
        with steps(b, _number(0), _number(BLOCK), VECTORS * LANES) as key:
            sums = [running_sums(b, VECTORS) for _ in range(count)]
            column = element(b, keys, key, 4)
            _multiply(b, (start, row_bytes), n_channels, (column, _number(4 * BLOCK)), sums)
            for row in range(count):
                for k, total in enumerate(sums[row]):
                    to = at(b, element(b, out, key, 4), 4 * (BLOCK * row + LANES * k))
                    V(b, LANE, b.load(total)).store(to)

    _for_rows(b, n_rows, tile)


scores_of_block = operation(_scores)


def output_operation(kind: Stored, *, in_place: bool = False) -> Any:
    """Operation (records, bytes per record, probabilities [rows][BLOCK], values [keys][channels],
    channels (a multiple of LANES), sizes): output * factor + probabilities . values.

    Sizes: rows in the lowest 8 bits, keys in the next 24, bytes per key above. Values that are in
    their place in the cache ask for those of the next block.
    """

    def emit(b: Any, args: Any) -> None:
        records, step, probabilities, values, n_channels, sizes = args
        n_rows, value_bytes = b.and_(sizes, _number(255)), b.lshr(sizes, _number(32))
        n_keys = b.and_(b.lshr(sizes, _number(8)), _number((1 << 24) - 1))
        ahead = b.mul(value_bytes, _number(BLOCK)) if in_place else None

        def tile(first: Any, count: int) -> None:
            start = b.add(records, b.mul(first, step))
            p = b.add(probabilities, b.mul(first, _number(4 * BLOCK)))
            wide = b.and_(n_channels, _number(-VECTORS * LANES))
            for begin, end, n in ((_number(0), wide, VECTORS), (wide, n_channels, 1)):
                with steps(b, begin, end, n * LANES) as c:
                    sums = _scaled_outputs(b, start, step, c, (count, n))
                    columns = element(b, values, c, kind.size), value_bytes
                    _multiply(b, (p, _number(4 * BLOCK)), n_keys, columns, sums, kind, ahead)
                    for row in range(count):
                        record = b.add(start, b.mul(step, _number(row)))
                        out = element(b, at(b, record, HEAD), c, 4)
                        for k, total in enumerate(sums[row]):
                            V(b, LANE, b.load(total)).store(at(b, out, 4 * LANES * k))

        _for_rows(b, n_rows, tile)

    return operation(emit)


def _scaled_outputs(
    b: Any, start: Any, step: Any, channel: Any, shape: tuple[int, int]
) -> list[list[Any]]:
    """The outputs so far of some rows, times the factors of their latest block."""
    count, n = shape
    sums = [running_sums(b, n) for _ in range(count)]
    for row in range(count):
        record = b.add(start, b.mul(step, _number(row)))
        factor = _scalar(b, at(b, record, FACTOR))
        out = element(b, at(b, record, HEAD), channel, 4)
        for k, total in enumerate(sums[row]):
            b.store((_load(b, at(b, out, 4 * LANES * k)) * factor).value, total)
    return sums


# ---------------------------------------------------------------- softmax of a block
def _probabilities(b: Any, args: Any) -> None:
    """Operation (record, scores, mask (F16) or 0, keys, scale, slope, softcap or 0).

    Turns the scores of one row into e**(score - maximum) and brings the record up to date.
    """
    record, scores, mask, n_keys, scale, slope, cap = args
    scale, slope, cap = (repeated(b, LANE, x) for x in (scale, slope, cap))
    n_vectors = BLOCK // LANES
    for k in range(n_vectors):
        address = at(b, scores, 4 * LANES * k)
        (_load(b, address) * scale).store(address)
    has_cap = b.fcmp_ordered("!=", args[6], ir.Constant(F32, 0.0))
    with b.if_then(has_cap), steps(b, _number(0), _number(BLOCK), LANES) as i:
        address = element(b, scores, i, 4)
        (f.tanh(_load(b, address)) * cap).store(address)
    nothing = ir.Constant(LANE.ir, [float("-inf")] * LANES)
    with (
        b.if_then(b.icmp_signed("!=", mask, _number(0))),
        steps(b, _number(0), n_keys, LANES) as i,
    ):
        rest = b.trunc(b.sub(n_keys, i), I32)
        bias = STORED["f16"].load(b, element(b, mask, i, 2), LANES, rest)
        address = element(b, scores, i, 4)
        (_load(b, address) + bias * slope).store(address)
    vectors = []
    for k in range(n_vectors):
        rest = b.trunc(b.sub(n_keys, _number(LANES * k)), I32)
        score = _load(b, at(b, scores, 4 * LANES * k))
        visible = first_lanes(b, LANES, rest)
        vectors.append(V(b, LANE, b.select(visible, score.value, nothing)))
    old = load_ir(b, at(b, record, MAXIMUM), F32)
    top = MAX.combine(b, fold_lanes(b, MAX, [v.value for v in vectors]), old)
    shift = repeated(b, LANE, top)
    vectors = [f.exp(v - shift) for v in vectors]
    for k, v in enumerate(vectors):
        v.store(at(b, scores, 4 * LANES * k))
    change = repeated(b, LANE, b.fsub(old, top))
    factor = b.extract_element(f.exp(change).value, ir.Constant(I32, 0))
    total = load_ir(b, at(b, record, TOTAL), F32)
    total = b.fadd(b.fmul(total, factor), fold_lanes(b, SUM, [v.value for v in vectors]))
    for offset, value in ((MAXIMUM, top), (TOTAL, total), (FACTOR, factor)):
        _store_scalar(b, at(b, record, offset), value)


@intrinsic
def probabilities_of_block(
    _: Any, record: Any, scores: Any, mask: Any, n: Any, scale: Any, slope: Any, cap: Any
) -> Typed:
    i, x = types.intp, types.float32
    return typed(types.void(i, i, i, i, x, x, x), _probabilities)
