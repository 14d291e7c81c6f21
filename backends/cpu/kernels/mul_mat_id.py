"""MUL_MAT_ID: the products of mul_mat.py and mul_mat_float.py, expert by expert (route.py)."""

from __future__ import annotations

from typing import Any

from numba import float32

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
from pyggml.backends.cpu.kernels.mul_mat_float import COLUMN_ROWS, WEIGHTS, float_column
from pyggml.backends.cpu.kernels.repack import panel_packer
from pyggml.backends.cpu.kernels.route import active_expert, n_active, slot_at, source_row
from pyggml.backends.cpu.kernels.simd import load, store
from pyggml.backends.cpu.panels import GROUP, LAYOUTS, ROWS
from pyggml.dtypes import GGMLType

COLUMN_BYTES = 4 * ROWS  # of a tile in scratch memory


@inline
def out_address(node: int, slot: int, n_used: int) -> Any:
    """The column of the result that belongs to token * n_used + slot."""
    return dst_data(node) + slot % n_used * dst_nb(node, 1) + slot // n_used * dst_nb(node, 2)


@inline
def scatter(
    node: int,
    route: int,
    position: int,
    n_columns: int,
    n_used: int,
    row: int,
    n_rows: int,
    tile: int,
) -> None:
    """Copy the columns of a tile to where they belong."""
    for c in range(n_columns):
        out = out_address(node, slot_at(route, position + c), n_used) + 4 * row
        for r in range(n_rows):
            store(out + 4 * r, load(float32, tile + c * COLUMN_BYTES + 4 * r))


def _define_quantized(type: GGMLType) -> None:
    """Params: rows, n_used, units, group, bytes of an expert's weights, bytes of a column of
    activations, blocks per row if the weights are rows, whether they are, and columns of
    activations per token; 0: they are in the order of the route."""
    unit_bytes = LAYOUTS[type].unit_bytes
    pack, panel_times_columns = panel_packer(type), panel_product(type)

    def mul_mat_id(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_used = param_int(node, 0), param_int(node, 1)
        units, group, expert_bytes = param_int(node, 2), param_int(node, 3), param_int(node, 4)
        column_bytes, file_blocks = param_int(node, 5), param_int(node, 6)
        in_rows, per_token = param_int(node, 7) != 0, param_int(node, 8)
        route, panel_bytes, step = src_data(node, 2), units * unit_bytes, src_nb(node, 0, 1)
        tile = scratch(node, ith)
        n_panels = (rows + ROWS - 1) // ROWS
        start = chunk_start(n_panels * n_active(route), chunk, n_chunks)
        for i in range(start, chunk_start(n_panels * n_active(route), chunk + 1, n_chunks)):
            expert, first, count = active_expert(route, i // n_panels)
            j = i % n_panels
            n_rows = min(rows - ROWS * j, ROWS)
            w = src_data(node, 0) + expert * expert_bytes
            p = w + j * panel_bytes
            if in_rows:
                p = tile + GROUP * COLUMN_BYTES
                pack(w + ROWS * j * step, step, n_rows, p, file_blocks)
            for c in range(0, count, group):
                c0, c1, y = c, min(count, c + group), src_data(node, 1) + first * column_bytes
                if per_token != 0:
                    c0, c1 = 0, 1
                    row = source_row(route, first + c, n_used, per_token)
                    y = src_data(node, 1) + row * column_bytes
                out = tile
                if group == 1:
                    out = out_address(node, slot_at(route, first + c), n_used) + 4 * ROWS * j
                out -= c0 * COLUMN_BYTES
                panel_times_columns(p, units, n_rows, y, group, c0, c1, out, COLUMN_BYTES)
                if group != 1:
                    scatter(node, route, first + c, c1 - c0, n_used, ROWS * j, n_rows, tile)

    register_kernel(f"mul_mat_id_{type.name.lower()}", mul_mat_id)


def _define_float(type: GGMLType) -> None:
    """Params: rows, n_used, k, rows of activations per token; columns one by one."""
    one_column = float_column(type)

    def mul_mat_id(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_used = param_int(node, 0), param_int(node, 1)
        k, per_token = param_int(node, 2), param_int(node, 3)
        route, w_step = src_data(node, 2), src_nb(node, 0, 1)
        groups = (rows + COLUMN_ROWS - 1) // COLUMN_ROWS
        start = chunk_start(groups * n_active(route), chunk, n_chunks)
        for i in range(start, chunk_start(groups * n_active(route), chunk + 1, n_chunks)):
            expert, first, count = active_expert(route, i // groups)
            r = i % groups * COLUMN_ROWS
            w = src_data(node, 0) + expert * src_nb(node, 0, 2) + r * w_step
            for c in range(count):
                slot = slot_at(route, first + c)
                x = src_data(node, 1) + slot // n_used * src_nb(node, 1, 2)
                x += slot % n_used % per_token * src_nb(node, 1, 1)
                out = out_address(node, slot, n_used) + 4 * r
                one_column(w, w_step, min(rows - r, COLUMN_ROWS), x, k, out, 4)

    register_kernel(f"mul_mat_id_{type.name.lower()}", mul_mat_id)


for _type in LAYOUTS:
    _define_quantized(_type)
for _type in WEIGHTS:
    _define_float(_type)
