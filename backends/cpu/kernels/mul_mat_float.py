"""F32, F16 and BF16 weights times F32 activations.

The order of addition is the same everywhere: value k of a row goes to lane k mod 16 of one vector,
by fma in the order of k; at the end the lanes are folded: 8 and 8, 4 and 4, 2 and 2, 1 and 1.
Values past the end of a row count as 0.

Activations are read where they are, one column at a time, or from groups of FLOAT_GROUP columns
that `pack_columns` has laid side by side: block by block of 16 values, padded with zeros. Many
columns are computed in pieces of FLOAT_PIECE values, whose sums wait in scratch memory, so that
a group's piece stays in the first-level cache while some rows of weights pass, and these rows stay
in the second-level cache while all columns pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import float32

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    graph_kernel,
    inline,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.emit import (
    V,
    at,
    first_lanes,
    load_masked,
    load_vector,
    or_last,
    tile_load,
    tile_operation,
    tile_save,
    tile_store,
    tile_zero,
)
from pyggml.backends.cpu.kernels.quantize import column_source, padded_columns, row_address
from pyggml.backends.cpu.kernels.simd import (
    HAS_AVX2,
    HAS_AVX512,
    I32,
    I64,
    LINE,
    Vec,
    f32x16,
    half_to_float,
    load,
    load_f16,
    store,
    zero,
)
from pyggml.backends.cpu.panels import FLOAT_GROUP, FLOAT_PIECE
from pyggml.dtypes import GGMLType

LANES = 16
# Sums of a tile of many columns fill the registers: of 512, 256 or 128 bits.
ROWS, COLUMNS = (4, 6) if HAS_AVX512 else (2, 3) if HAS_AVX2 else (1, 3)
COLUMN_ROWS = 4  # of a tile of one column
BLOCK = 64  # bytes of 16 packed values
SUMS_BYTES = ROWS * COLUMNS * 4 * LANES

Widen = Callable[[V], V]


# ---------------------------------------------------------------- bodies
def _f32(w: V) -> V:
    return w


def _f16(w: V) -> V:
    vec = Vec("f32", w.vec.lanes)
    return V(w.b, vec, half_to_float(w.b, w.value))


def _bf16(w: V) -> V:
    wide = Vec("i32", w.vec.lanes)
    bits = V(w.b, wide, w.b.zext(w.value, wide.ir)) << 16
    return bits.cast("f32")


WEIGHTS: dict[GGMLType, tuple[str, Widen]] = {
    GGMLType.F32: ("f32", _f32),
    GGMLType.F16: ("f16", _f16),
    GGMLType.BF16: ("i16", _bf16),
}


def _step_operation(
    type: GGMLType, rows: int, columns: int, *, blocks: int = 1, masked: bool = False
) -> Any:
    """Operation (acc, weights, bytes between rows, last row, activations, bytes between columns,
    values): blocks of 16 values of each row times each column; `values` counts them if masked."""
    elem, widen = WEIGHTS[type]
    vec, y_vec = Vec(elem, LANES), Vec("f32", LANES)

    def emit(b: Any, acc: list[V], args: Sequence[Any]) -> list[V]:
        w, w_step, last, y, y_step, values = args
        mask = first_lanes(b, LANES, b.trunc(values, I32)) if masked else None
        columns_at = [b.add(y, b.mul(y_step, ir.Constant(I64, c))) for c in range(columns)]
        xs = [
            [_load(b, y_vec, at(b, a, BLOCK * i), mask) for a in columns_at] for i in range(blocks)
        ]
        result = list(acc)
        for r in range(rows):  # one vector of weights at a time: registers are scarce
            row = b.add(w, b.mul(or_last(b, ir.Constant(I64, r), last), w_step))
            for i in range(blocks):
                v = widen(_load(b, vec, at(b, row, LANES * type.type_size * i), mask))
                for c, x in enumerate(xs[i]):
                    result[c * rows + r] = v.fma(x, result[c * rows + r])
        return result

    return tile_operation(LANES, rows * columns, emit)


def _load(b: Any, vec: Vec, address: Any, mask: Any) -> V:
    if mask is None:
        return load_vector(b, vec, address)
    return load_masked(b, vec, address, mask)


def _column_sums(rows: int) -> Callable[[list[V]], list[V]]:
    """Function: accumulators to one vector of row sums per column."""
    return lambda acc: [_row_sums(acc[i : i + rows]) for i in range(0, len(acc), rows)]


def _row_sums(vectors: list[V]) -> V:
    """The sum of the lanes of each vector (1, 2 or 4 of them), one lane per vector."""
    for n in (8, 4):
        vectors = [v.pick(range(n)) + v.pick(range(n, 2 * n)) for v in vectors]
    if len(vectors) == 1:
        pairs = vectors[0].pick([0, 1]) + vectors[0].pick([2, 3])
        return pairs.pick([0]) + pairs.pick([1])
    twos = [
        v.pick([0, 1, 4, 5], w) + v.pick([2, 3, 6, 7], w)
        for v, w in zip(vectors[::2], vectors[1::2], strict=True)
    ]
    if len(twos) == 1:
        return twos[0].pick([0, 2]) + twos[0].pick([1, 3])
    return twos[0].pick([0, 2, 4, 6], twos[1]) + twos[0].pick([1, 3, 5, 7], twos[1])


# ---------------------------------------------------------------- kernels
def few_columns(type: GGMLType, column_at: Any) -> Any:
    """Inline function: rows r0 .. r1 - 1 times some columns where they are, one after the other.

    Inline column_at(place, c): where the activations of column c are, and where its result goes.
    """
    one_column = _float_column(type)

    @inline
    def product(w: int, w_step: int, r0: int, r1: int, n_columns: int, k: int, place: Any) -> None:
        # each row of a tile is in another part of the rows, so that the tile reads few long
        # streams: the hardware follows these
        part = (r1 - r0 + COLUMN_ROWS - 1) // COLUMN_ROWS
        for r in range(part):
            n_rows = (r1 - r0 - r + part - 1) // part
            p = w + (r0 + r) * w_step
            for c in range(n_columns):
                x, out = column_at(place, c)
                one_column(p, part * w_step, n_rows, x, k, out + 4 * (r0 + r), 4 * part)

    return product


def _float_column(type: GGMLType) -> Any:
    """Inline function: up to COLUMN_ROWS rows, w_step bytes apart, times one column; results are
    out_step bytes apart."""
    blocks = LINE // (LANES * type.type_size)
    zeros = tile_zero(LANES, COLUMN_ROWS)
    line = _step_operation(type, COLUMN_ROWS, 1, blocks=blocks)
    step = _step_operation(type, COLUMN_ROWS, 1)
    rest = _step_operation(type, COLUMN_ROWS, 1, masked=True)
    finish = tile_store(LANES, COLUMN_ROWS, _column_sums(1))
    w_bytes = LANES * type.type_size

    @inline
    def column(w: int, w_step: int, n_rows: int, y: int, k: int, out: int, out_step: int) -> None:
        acc, last = zeros(), n_rows - 1
        n_lines = k // (LANES * blocks)
        for _ in range(n_lines):
            acc = line(acc, w, w_step, last, y, 0, 0)
            w += LINE
            y += BLOCK * blocks
        for _ in range(k // LANES - n_lines * blocks):
            acc = step(acc, w, w_step, last, y, 0, 0)
            w += w_bytes
            y += BLOCK
        if k % LANES != 0:
            acc = rest(acc, w, w_step, last, y, 0, k % LANES)
        finish(acc, out, out_step, 1, n_rows)

    return column


def _float_tile(type: GGMLType) -> Any:
    """Inline function: ROWS rows times COLUMNS packed columns, values k0 .. k1 - 1 of k.

    The sums so far come from `sums` and, before the end of k, go there.
    """
    restore, save = tile_load(LANES, ROWS * COLUMNS), tile_save(LANES, ROWS * COLUMNS)
    zeros = tile_zero(LANES, ROWS * COLUMNS)
    step = _step_operation(type, ROWS, COLUMNS)
    rest = _step_operation(type, ROWS, COLUMNS, masked=True)
    finish = tile_store(LANES, ROWS * COLUMNS, _column_sums(ROWS))
    w_bytes, y_bytes = LANES * type.type_size, FLOAT_GROUP * BLOCK

    @inline
    def tile(
        w: int,
        w_step: int,
        n_rows: int,
        y: int,
        k0: int,
        k1: int,
        k: int,
        sums: int,
        out: int,
        out_step: int,
        n_columns: int,
    ) -> None:
        acc, last = zeros(), n_rows - 1
        if k0 > 0:
            acc = restore(sums)
        w += k0 // LANES * w_bytes
        y += k0 // LANES * y_bytes
        for _ in range((k1 - k0) // LANES):
            acc = step(acc, w, w_step, last, y, BLOCK, 0)
            w += w_bytes
            y += y_bytes
        if k1 < k:
            save(acc, sums)
            return
        if k % LANES != 0:
            acc = rest(acc, w, w_step, last, y, BLOCK, k % LANES)
        finish(acc, out, out_step, n_rows, n_columns)

    return tile


def group_product(type: GGMLType) -> Any:
    """Inline function: rows r0 .. r1 - 1, at most FLOAT_ROWS, times the packed columns c .. and the
    following, COLUMNS of n_columns at most; `c` is a multiple of COLUMNS."""
    tile = _float_tile(type)

    @inline
    def product(
        w: int,
        w_step: int,
        r0: int,
        r1: int,
        y: int,
        c: int,
        k: int,
        n_columns: int,
        sums: int,
        out: int,
        out_step: int,
    ) -> None:
        column_bytes = (k + LANES - 1) // LANES * BLOCK
        x = y + c // FLOAT_GROUP * FLOAT_GROUP * column_bytes + c % FLOAT_GROUP * BLOCK
        for k0 in range(0, k, FLOAT_PIECE):
            k1 = min(k, k0 + FLOAT_PIECE)
            for r in range(r0, r1, ROWS):
                p, o, s = w + r * w_step, out + 4 * (r - r0), sums + (r - r0) // ROWS * SUMS_BYTES
                tile(p, w_step, min(r1 - r, ROWS), x, k0, k1, k, s, o, out_step, n_columns - c)

    return product


@inline
def _equally_apart(place: tuple[int, int, int, int], c: int) -> tuple[int, int]:
    y, y_step, out, out_step = place
    return y + c * y_step, out + c * out_step


def _define(type: GGMLType) -> None:
    one_by_one, some_columns = few_columns(type, _equally_apart), group_product(type)

    def mul_mat(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_columns, k = param_int(node, 0), param_int(node, 1), param_int(node, 2)
        planes2, planes3 = param_int(node, 3), param_int(node, 4)
        repeat2, repeat3 = param_int(node, 5), param_int(node, 6)
        at_once = param_int(node, 7)
        y_step, y_nb2, y_nb3 = param_int(node, 8), param_int(node, 9), param_int(node, 10)
        out_step, out_nb2, out_nb3 = param_int(node, 11), param_int(node, 12), param_int(node, 13)
        w_step = src_nb(node, 0, 1)
        groups = (rows + 7) // 8
        i = chunk_start(groups * planes2 * planes3, chunk, n_chunks)
        end = chunk_start(groups * planes2 * planes3, chunk + 1, n_chunks)
        while i < end:
            z, first = i // groups, i % groups
            last = min(groups, first + end - i)
            z2, z3 = z % planes2, z // planes2
            w = src_data(node, 0) + z2 // repeat2 * src_nb(node, 0, 2)
            w += z3 // repeat3 * src_nb(node, 0, 3)
            y = src_data(node, 1) + z2 * y_nb2 + z3 * y_nb3
            out = dst_data(node) + z2 * out_nb2 + z3 * out_nb3
            r0, r1 = 8 * first, min(rows, 8 * last)
            if y_step != 0:
                one_by_one(w, w_step, r0, r1, n_columns, k, (y, y_step, out, out_step))
            else:
                sums = scratch(node, ith)
                for r in range(r0, r1, at_once):
                    e = min(r1, r + at_once)
                    for c in range(0, n_columns, COLUMNS):
                        o = out + c * out_step + 4 * r
                        some_columns(w, w_step, r, e, y, c, k, n_columns, sums, o, out_step)
            i += last - first

    register_kernel(f"mul_mat_{type.name.lower()}", mul_mat)


for _type in WEIGHTS:
    _define(_type)


# ---------------------------------------------------------------- activations
@graph_kernel
def pack_columns(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F32 rows to groups of columns; params: columns per plane, planes, bytes per plane, and for
    routed columns: rows per token of the result, and of source 0. Source 1, if there is one, tells
    which row each column takes (route.py)."""
    n_columns, planes, plane_bytes = param_int(node, 0), param_int(node, 1), param_int(node, 2)
    k, route = src_ne(node, 0, 0), src_data(node, 1)
    n_used, per_token = param_int(node, 3), param_int(node, 4)
    blocks = (k + LANES - 1) // LANES
    group_bytes = blocks * BLOCK * FLOAT_GROUP
    padded = padded_columns(route, n_columns, FLOAT_GROUP)
    start = chunk_start(padded * planes, chunk, n_chunks)
    end = chunk_start(padded * planes, chunk + 1, n_chunks)
    for i in range(start, end):
        x = column_source(node, route, i, end, n_columns, padded, n_used, per_token)
        c = i % padded
        out = dst_data(node) + i // padded * plane_bytes
        out += c // FLOAT_GROUP * group_bytes + c % FLOAT_GROUP * BLOCK
        whole = k // LANES if x != 0 else 0
        for b in range(whole):
            store(out + b * FLOAT_GROUP * BLOCK, load(f32x16, x + BLOCK * b))
        for b in range(whole, blocks):
            store(out + b * FLOAT_GROUP * BLOCK, zero(f32x16))
        if x != 0:
            for j in range(LANES * whole, k):
                o = out + whole * FLOAT_GROUP * BLOCK + 4 * (j % LANES)
                store(o, load(float32, x + 4 * j))


@graph_kernel
def widen_f16(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F16 rows to packed F32 rows."""
    k = src_ne(node, 0, 0)
    n_rows = src_ne(node, 0, 1) * src_ne(node, 0, 2) * src_ne(node, 0, 3)
    start = chunk_start(n_rows, chunk, n_chunks)
    for i in range(start, chunk_start(n_rows, chunk + 1, n_chunks)):
        x, out = row_address(node, i), dst_data(node) + 4 * k * i
        for j in range(k):
            store(out + 4 * j, load_f16(x + 2 * j))
