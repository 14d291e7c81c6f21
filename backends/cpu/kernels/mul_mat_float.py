"""F32, F16 and BF16 weights times F32 activations.

The order of addition is the same everywhere: value k of a row goes to lane k mod 8 of one vector,
by fma in the order of k; at the end the lanes are added as ((0+4)+(2+6)) + ((1+5)+(3+7)). Values
past the end of a row count as 0.

Activations are read where they are, one column at a time, or from groups of FLOAT_GROUP columns
that `pack_columns` has laid side by side: block by block of 8 values, padded with zeros.
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
    src_data,
    src_nb,
    src_ne,
)
from pyggml.backends.cpu.kernels.emit import (
    V,
    first_lanes,
    load_masked,
    load_vector,
    tile_operation,
    tile_store,
    tile_zero,
)
from pyggml.backends.cpu.kernels.quantize import row_address
from pyggml.backends.cpu.kernels.simd import (
    HAS_AVX512,
    I32,
    I64,
    Vec,
    f32x8,
    half_to_float,
    load,
    load_f16,
    prefetch,
    store,
    zero,
)
from pyggml.backends.cpu.panels import FLOAT_GROUP
from pyggml.dtypes import GGMLType

# With 512-bit vectors each holds two rows.
LANES = 16 if HAS_AVX512 else 8
VECTORS = 4  # of weights in a tile
ROWS = VECTORS * LANES // 8
COLUMNS = 6 if HAS_AVX512 else 3
BLOCK = 32  # bytes of 8 packed values
LINE = 64  # bytes of a cache line
AHEAD = 1024  # bytes from what is multiplied to what is fetched

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


def _step_operation(type: GGMLType, columns: int, masked: bool) -> Any:
    """Operation (acc, weights, bytes between rows, last row, activations, bytes between columns,
    values): 8 values of each row times each column; `values` counts them if masked."""
    elem, widen = WEIGHTS[type]
    vec, y_vec = Vec(elem, 8), Vec("f32", 8)

    def emit(b: Any, acc: list[V], args: Sequence[Any]) -> list[V]:
        w, w_step, last, y, y_step, values = args
        mask = first_lanes(b, 8, b.trunc(values, I32)) if masked else None
        xs = []
        for c in range(columns):
            x = _load(b, y_vec, b.add(y, b.mul(y_step, ir.Constant(I64, c))), mask)
            xs.append(x.concat(x) if LANES == 16 else x)
        result = list(acc)
        per_vector = LANES // 8
        for i in range(VECTORS):  # one vector of weights at a time: registers are scarce
            at_rows = range(per_vector * i, per_vector * (i + 1))
            parts = [_load(b, vec, _row(b, w, w_step, last, r), mask) for r in at_rows]
            v = widen(parts[0].concat(parts[1]) if LANES == 16 else parts[0])
            for c, x in enumerate(xs):
                result[c * VECTORS + i] = v.fma(x, acc[c * VECTORS + i])
        return result

    return tile_operation(LANES, VECTORS * columns, emit)


def _row(b: Any, w: Any, step: Any, last: Any, r: int) -> Any:
    index = ir.Constant(I64, r)
    index = b.select(b.icmp_signed("<", index, last), index, last)
    return b.add(w, b.mul(index, step))


def _load(b: Any, vec: Vec, address: Any, mask: Any) -> V:
    if mask is None:
        return load_vector(b, vec, address)
    return load_masked(b, vec, address, mask)


def _sums(acc: list[V]) -> list[V]:
    """Accumulators to one vector of row sums per column."""
    return [_row_sums(acc[i : i + VECTORS]) for i in range(0, len(acc), VECTORS)]


def _row_sums(vectors: list[V]) -> V:
    """Sums of the lanes of each row, one lane per row; halves of 128 bits stay apart."""
    if LANES == 16:
        low, high = range(8), range(8, 16)
        vectors = [v.pick(half) for v in vectors for half in (low, high)]
    n = len(vectors)
    # row r and row r + n/2 share a vector from here on
    half = n // 2
    four = [
        vectors[r].pick([0, 1, 2, 3, 8, 9, 10, 11], vectors[r + half])
        + vectors[r].pick([4, 5, 6, 7, 12, 13, 14, 15], vectors[r + half])
        for r in range(half)
    ]
    two = [
        four[r].pick([0, 1, 8, 9, 4, 5, 12, 13], four[r + 1])
        + four[r].pick([2, 3, 10, 11, 6, 7, 14, 15], four[r + 1])
        for r in range(0, half, 2)
    ]
    if n == 8:
        return two[0].pick([0, 2, 8, 10, 4, 6, 12, 14], two[1]) + two[0].pick(
            [1, 3, 9, 11, 5, 7, 13, 15], two[1]
        )
    return two[0].pick([0, 2, 4, 6]) + two[0].pick([1, 3, 5, 7])


# ---------------------------------------------------------------- kernels
def float_tile(type: GGMLType, columns: int) -> Any:
    """Inline function that computes a tile of ROWS rows and `columns` columns over all of k."""
    zeros = tile_zero(LANES, VECTORS * columns)
    step = _step_operation(type, columns, False)
    rest = _step_operation(type, columns, True)
    finish = tile_store(LANES, VECTORS * columns, _sums)
    w_bytes = 8 * type.type_size
    per_line = LINE // type.type_size

    @inline
    def tile(
        w: int,
        w_step: int,
        n_rows: int,
        y: int,
        y_step: int,
        y_next: int,
        k: int,
        out: int,
        out_step: int,
        n_columns: int,
    ) -> None:
        acc, last = zeros(), n_rows - 1
        done = 0
        if columns == 1:
            # several rows at once are more streams than the hardware follows by itself
            for i in range(k // per_line):
                # past the end of these rows come those of the next tile
                ahead = w + AHEAD + (0 if i * LINE + AHEAD < w_step else (ROWS - 1) * w_step)
                for r in range(n_rows):
                    prefetch(ahead + r * w_step)
                for _ in range(per_line // 8):
                    acc = step(acc, w, w_step, last, y, y_step, 0)
                    w += w_bytes
                    y += y_next
            done = k // per_line * per_line
        for _ in range((k - done) // 8):
            acc = step(acc, w, w_step, last, y, y_step, 0)
            w += w_bytes
            y += y_next
        if k % 8 != 0:
            acc = rest(acc, w, w_step, last, y, y_step, k % 8)
        finish(acc, out, out_step, n_rows, n_columns)

    return tile


def _columns_product(type: GGMLType) -> Any:
    """Inline function: rows times columns c0 .. c1 - 1, which are y_step bytes apart or, if that
    is 0, packed."""
    one_column, tile = float_tile(type, 1), float_tile(type, COLUMNS)

    @inline
    def product(
        w: int,
        w_step: int,
        n_rows: int,
        y: int,
        y_step: int,
        k: int,
        c0: int,
        c1: int,
        out: int,
        out_step: int,
    ) -> None:
        if y_step != 0:
            for c in range(c0, c1):
                x, o = y + c * y_step, out + c * out_step
                one_column(w, w_step, n_rows, x, 0, BLOCK, k, o, 0, 1)
            return
        column_bytes = (k + 7) // 8 * BLOCK
        for c in range(c0, c1, COLUMNS):
            x = y + c // FLOAT_GROUP * FLOAT_GROUP * column_bytes + c % FLOAT_GROUP * BLOCK
            o = out + c * out_step
            tile(w, w_step, n_rows, x, BLOCK, FLOAT_GROUP * BLOCK, k, o, out_step, c1 - c)

    return product


def _define(type: GGMLType) -> None:
    some_columns = _columns_product(type)

    def mul_mat(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_columns, k = param_int(node, 0), param_int(node, 1), param_int(node, 2)
        planes2, planes3 = param_int(node, 3), param_int(node, 4)
        repeat2, repeat3 = param_int(node, 5), param_int(node, 6)
        block = param_int(node, 7)
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
            for c0 in range(0, n_columns, block):
                c1 = min(n_columns, c0 + block)
                for r in range(8 * first, min(rows, 8 * last), ROWS):
                    n_rows = min(rows - r, ROWS)
                    some_columns(
                        w + r * w_step, w_step, n_rows, y, y_step, k, c0, c1, out + 4 * r, out_step
                    )
            i += last - first

    register_kernel(f"mul_mat_{type.name.lower()}", mul_mat)


for _type in WEIGHTS:
    _define(_type)


# ---------------------------------------------------------------- activations
@graph_kernel
def pack_columns(node: int, ith: int, chunk: int, n_chunks: int) -> None:
    """F32 rows to groups of columns; params: columns per plane, planes, bytes per plane."""
    n_columns, planes, plane_bytes = param_int(node, 0), param_int(node, 1), param_int(node, 2)
    k = src_ne(node, 0, 0)
    group_bytes = (k + 7) // 8 * BLOCK * FLOAT_GROUP
    padded = (n_columns + FLOAT_GROUP - 1) // FLOAT_GROUP * FLOAT_GROUP
    start = chunk_start(padded * planes, chunk, n_chunks)
    for i in range(start, chunk_start(padded * planes, chunk + 1, n_chunks)):
        z, c = i // padded, i % padded
        out = dst_data(node) + z * plane_bytes
        out += c // FLOAT_GROUP * group_bytes + c % FLOAT_GROUP * BLOCK
        whole = 0
        if c < n_columns:
            x = row_address(node, z * n_columns + c)
            whole = k // 8
            for b in range(whole):
                store(out + b * FLOAT_GROUP * BLOCK, load(f32x8, x + BLOCK * b))
        for b in range(whole, (k + 7) // 8):
            store(out + b * FLOAT_GROUP * BLOCK, zero(f32x8))
        if c < n_columns:
            for j in range(8 * whole, k):
                o = out + whole * FLOAT_GROUP * BLOCK + 4 * (j % 8)
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
