"""MUL_MAT_ID: the products of mul_mat.py and mul_mat_float.py, expert by expert (route.py).

Columns of an expert lie in groups as those of a plain product do, but their results belong to
different tokens: tiles go to scratch memory first, and from there to the addresses of a list.
"""

from __future__ import annotations

from typing import Any

from numba import float32, int64

from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_data,
    dst_nb,
    inline,
    param_int,
    register_kernel,
    scratch,
    src_data,
    src_nb,
)
from pyggml.backends.cpu.kernels.mul_mat import panel_product
from pyggml.backends.cpu.kernels.mul_mat_float import (
    COLUMNS,
    WEIGHTS,
    few_columns,
    group_product,
)
from pyggml.backends.cpu.kernels.repack import panel_packer
from pyggml.backends.cpu.kernels.route import active_expert, n_active, slot_at
from pyggml.backends.cpu.kernels.simd import f32x16, load, store
from pyggml.backends.cpu.panels import (
    FEW_COLUMNS,
    FLOAT_GROUP,
    FLOAT_ROWS,
    FLOAT_SUMS,
    GROUP,
    LAYOUTS,
    LISTED_BYTES,
    ROWS,
)
from pyggml.dtypes import GGMLType

COLUMN_BYTES = 4 * ROWS  # of a tile in scratch memory
FLOAT_COLUMN_BYTES = 4 * FLOAT_ROWS


@inline
def list_columns(
    node: int,
    route: int,
    first: int,
    count: int,
    n_used: int,
    token_bytes: int,
    x_bytes: int,
    per_token: int,
    table: int,
) -> None:
    """Where the result of each column of an expert belongs, and where its activations are if they
    have not been brought into the order of the route."""
    for c in range(count):
        slot = slot_at(route, first + c)
        token, s = slot // n_used, slot % n_used
        out = dst_data(node) + s * dst_nb(node, 1) + token * dst_nb(node, 2)
        x = src_data(node, 1) + token * token_bytes + s % per_token * x_bytes
        store(table + LISTED_BYTES * c, int64(out))
        store(table + LISTED_BYTES * c + 8, int64(x))


@inline
def result_at(table: int, c: int) -> Any:
    """Where the result of a listed column belongs."""
    return load(int64, table + LISTED_BYTES * c)


@inline
def activations_at(table: int, c: int) -> Any:
    """Where the activations of a listed column are."""
    return load(int64, table + LISTED_BYTES * c + 8)


@inline
def listed_column(table: int, c: int) -> Any:
    return activations_at(table, c), result_at(table, c)


@inline
def scatter(
    tile: int, tile_bytes: int, table: int, c0: int, c1: int, row: int, n_rows: int
) -> None:
    """Copy a tile of the listed columns c0 .. c1 - 1 to where they belong."""
    whole = n_rows // 16 * 16
    for c in range(c0, c1):
        source, out = tile + (c - c0) * tile_bytes, result_at(table, c) + 4 * row
        for r in range(0, whole, 16):
            store(out + 4 * r, load(f32x16, source + 4 * r))
        for r in range(whole, n_rows):
            store(out + 4 * r, load(float32, source + 4 * r))


def _panel_times_listed(type: GGMLType) -> Any:
    """Inline function: a panel times columns c0 .. c1 - 1 of an expert, whose activations begin
    at y, or are where the list says."""
    panel_times_columns = panel_product(type)

    @inline
    def product(
        p: int,
        units: int,
        row: int,
        n_rows: int,
        y: int,
        group: int,
        column_bytes: int,
        listed: bool,
        c0: int,
        c1: int,
        tile: int,
        table: int,
    ) -> None:
        for c in range(c0, c1, group):
            e, out, x = min(c1, c + group), tile, y + c * column_bytes
            if group == 1:
                out = result_at(table, c) + 4 * row
            if listed:
                x = activations_at(table, c)
            panel_times_columns(p, units, n_rows, x, group, 0, e - c, out, COLUMN_BYTES)
            if group != 1:
                scatter(tile, COLUMN_BYTES, table, c, e, row, n_rows)

    return product


def _define_quantized(type: GGMLType) -> None:
    """Params: rows, n_used, units, group, bytes of an expert's weights, bytes of a column of
    activations, blocks per row if the weights are rows, whether they are, columns of activations
    per token (0: they are in the order of the route), and columns at once."""
    unit_bytes = LAYOUTS[type].unit_bytes
    pack, panel_times_listed = panel_packer(type), _panel_times_listed(type)

    def mul_mat_id(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_used = param_int(node, 0), param_int(node, 1)
        units, group, expert_bytes = param_int(node, 2), param_int(node, 3), param_int(node, 4)
        column_bytes, file_blocks = param_int(node, 5), param_int(node, 6)
        in_rows, per_token = param_int(node, 7) != 0, param_int(node, 8)
        listed, at_once = per_token != 0, param_int(node, 9)
        route, panel_bytes, step = src_data(node, 2), units * unit_bytes, src_nb(node, 0, 1)
        tile = scratch(node, ith)
        packed = tile + GROUP * COLUMN_BYTES
        table = packed + panel_bytes if in_rows else packed
        n_panels = (rows + ROWS - 1) // ROWS
        n_items = n_panels * n_active(route)
        i, end = chunk_start(n_items, chunk, n_chunks), chunk_start(n_items, chunk + 1, n_chunks)
        while i < end:
            expert, first, count = active_expert(route, i // n_panels)
            j0 = i % n_panels
            j1 = min(n_panels, j0 + end - i)
            token_bytes = per_token * column_bytes
            per = max(per_token, 1)
            list_columns(node, route, first, count, n_used, token_bytes, column_bytes, per, table)
            w = src_data(node, 0) + expert * expert_bytes
            y = src_data(node, 1) + first * column_bytes
            for c0 in range(0, count, at_once):
                c1 = min(count, c0 + at_once)
                for j in range(j0, j1):
                    row, n_rows, p = ROWS * j, min(rows - ROWS * j, ROWS), w + j * panel_bytes
                    if in_rows:
                        p = packed
                        pack(w + row * step, step, n_rows, p, file_blocks)
                    panel_times_listed(
                        p, units, row, n_rows, y, group, column_bytes, listed, c0, c1, tile, table
                    )
            i += j1 - j0

    register_kernel(f"mul_mat_id_{type.name.lower()}", mul_mat_id)


def _define_float(type: GGMLType) -> None:
    """Params: rows, n_used, k, rows of activations per token, bytes of a packed column (0: none
    are packed), and rows at once. Experts with few columns read them where they are."""
    one_by_one, some_columns = few_columns(type, listed_column), group_product(type)

    def mul_mat_id(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_used, k = param_int(node, 0), param_int(node, 1), param_int(node, 2)
        per_token, column_bytes = param_int(node, 3), param_int(node, 4)
        at_once = param_int(node, 5)
        route, w_step, sums = src_data(node, 2), src_nb(node, 0, 1), scratch(node, ith)
        tile = sums + FLOAT_SUMS
        table = tile + FLOAT_GROUP * FLOAT_COLUMN_BYTES
        token_bytes, x_bytes = src_nb(node, 1, 2), src_nb(node, 1, 1)
        groups = (rows + 7) // 8
        n_items = groups * n_active(route)
        i, end = chunk_start(n_items, chunk, n_chunks), chunk_start(n_items, chunk + 1, n_chunks)
        while i < end:
            expert, first, count = active_expert(route, i // groups)
            last = min(groups, i % groups + end - i)
            r0, r1 = i % groups * 8, min(rows, 8 * last)
            list_columns(node, route, first, count, n_used, token_bytes, x_bytes, per_token, table)
            w = src_data(node, 0) + expert * src_nb(node, 0, 2)
            if column_bytes == 0 or count < FEW_COLUMNS:
                one_by_one(w, w_step, r0, r1, count, k, table)
            else:
                y = src_data(node, 3) + first * column_bytes
                for r in range(r0, r1, at_once):
                    e = min(r1, r + at_once)
                    for c in range(0, count, COLUMNS):
                        some_columns(
                            w, w_step, r, e, y, c, k, count, sums, tile, FLOAT_COLUMN_BYTES
                        )
                        c1 = min(count, c + COLUMNS)
                        scatter(tile, FLOAT_COLUMN_BYTES, table, c, c1, r, e - r)
            i += last - i % groups

    register_kernel(f"mul_mat_id_{type.name.lower()}", mul_mat_id)


for _type in LAYOUTS:
    _define_quantized(_type)
for _type in WEIGHTS:
    _define_float(_type)
