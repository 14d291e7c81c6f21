"""Quantized weights times quantized activations.

One kernel per type for everything: decode and prefill, panels and GGUF rows (each panel is then
packed into scratch memory just before its use). The bodies are in tile.py, the layouts in
panels.py.
"""

from __future__ import annotations

from typing import Any

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
from pyggml.backends.cpu.kernels.emit import joined, tile_store, tile_zero
from pyggml.backends.cpu.kernels.repack import panel_packer
from pyggml.backends.cpu.kernels.simd import HAS_AVX512
from pyggml.backends.cpu.kernels.tile import column_operation, unit_operation
from pyggml.backends.cpu.panels import FEW_COLUMNS, GROUP, LAYOUTS, ROWS
from pyggml.dtypes import GGMLType

# Accumulators of a tile fill half of the registers: 32 of 512 bits, or 16 of 256.
TILE_ROWS, TILE_COLUMNS = (16, 8) if HAS_AVX512 else (8, 4)


def tile_product(type: GGMLType) -> Any:
    """Inline function: TILE_ROWS rows of a panel times a tile of columns.

    `w` and `halfs` are addresses as `unit_operation` takes them; columns are `step` bytes of a
    block apart; the first n_columns are stored.
    """
    layout = LAYOUTS[type]
    unit_bytes = layout.unit_bytes
    blocks_per_unit = layout.blocks_per_unit
    zeros = tile_zero(TILE_ROWS, TILE_COLUMNS)
    unit = unit_operation(type, TILE_ROWS, TILE_COLUMNS)
    finish = tile_store(TILE_ROWS, TILE_COLUMNS)

    @inline
    def product(
        w: int,
        halfs: int,
        units: int,
        y: int,
        step: int,
        out: int,
        out_step: int,
        n_rows: int,
        n_columns: int,
    ) -> None:
        acc = zeros()
        for _ in range(units):
            acc = unit(acc, w, halfs, y, step, 0, 0)
            w += unit_bytes
            halfs += unit_bytes
            y += blocks_per_unit * step
        finish(acc, out, out_step, n_rows, n_columns)

    return product


def column_product(type: GGMLType) -> Any:
    """Inline function: a panel times one column."""
    layout = LAYOUTS[type]
    unit_bytes = layout.unit_bytes
    blocks_per_unit = layout.blocks_per_unit
    parts = ROWS // TILE_ROWS
    zeros = tile_zero(TILE_ROWS, parts)
    unit = column_operation(type, TILE_ROWS)
    finish = tile_store(TILE_ROWS, parts, joined)

    @inline
    def product(w: int, units: int, y: int, step: int, out: int, n_rows: int) -> None:
        acc = zeros()
        for _ in range(units):
            acc = unit(acc, w, w, y, step, 0, 0)
            w += unit_bytes
            y += blocks_per_unit * step
        finish(acc, out, 0, n_rows, 1)

    return product


def panel_product(type: GGMLType) -> Any:
    """Inline function: the n_rows rows of a panel times columns c0 .. c1 - 1."""
    layout = LAYOUTS[type]
    column_bytes = layout.activations.nbytes
    blocks_per_unit = layout.blocks_per_unit
    group_step = GROUP * column_bytes  # a constant, unlike block_step
    one, tile = column_product(type), tile_product(type)

    @inline
    def panel_times_columns(
        w: int, units: int, n_rows: int, y: int, group: int, c0: int, c1: int, out: int, step: int
    ) -> None:
        group_bytes = units * blocks_per_unit * column_bytes * group
        block_step = group * column_bytes
        c = c0
        while c < c1:
            a = y + c // group * group_bytes + c % group * column_bytes
            o = out + c * step
            if group == GROUP and c1 - c >= FEW_COLUMNS:
                for r in range(0, n_rows, TILE_ROWS):
                    for t in range(0, min(c1 - c, GROUP), TILE_COLUMNS):
                        b, q = a + t * column_bytes, o + t * step + 4 * r
                        p, h = w + 4 * r, w + 2 * r
                        tile(p, h, units, b, group_step, q, step, n_rows - r, c1 - c - t)
                c += GROUP
            else:
                one(w, units, a, block_step, o, n_rows)
                c += 1

    return panel_times_columns


def _define(type: GGMLType) -> None:
    unit_bytes = LAYOUTS[type].unit_bytes
    pack, panel_times_columns = panel_packer(type), panel_product(type)

    def mul_mat(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_columns = param_int(node, 0), param_int(node, 1)
        planes2, planes3 = param_int(node, 2), param_int(node, 3)
        repeat2, repeat3 = param_int(node, 4), param_int(node, 5)
        units, group, block = param_int(node, 6), param_int(node, 7), param_int(node, 8)
        plane_bytes, file_blocks = param_int(node, 9), param_int(node, 10)
        in_rows = param_int(node, 11) != 0
        panel_bytes, out_step = units * unit_bytes, dst_nb(node, 1)
        n_panels = (rows + ROWS - 1) // ROWS
        i = chunk_start(n_panels * planes2 * planes3, chunk, n_chunks)
        end = chunk_start(n_panels * planes2 * planes3, chunk + 1, n_chunks)
        while i < end:
            z, first = i // n_panels, i % n_panels
            last = min(n_panels, first + end - i)
            z2, z3 = z % planes2, z // planes2
            w = src_data(node, 0) + z2 // repeat2 * src_nb(node, 0, 2)
            w += z3 // repeat3 * src_nb(node, 0, 3)
            y = src_data(node, 1) + z * plane_bytes
            out = dst_data(node) + z2 * dst_nb(node, 2) + z3 * dst_nb(node, 3)
            for c0 in range(0, n_columns, block):
                c1 = min(n_columns, c0 + block)
                for j in range(first, last):
                    n_rows = min(rows - ROWS * j, ROWS)
                    p = w + j * panel_bytes
                    if in_rows:
                        p, step = scratch(node, ith), src_nb(node, 0, 1)
                        pack(w + ROWS * j * step, step, n_rows, p, file_blocks)
                    o = out + 4 * ROWS * j
                    panel_times_columns(p, units, n_rows, y, group, c0, c1, o, out_step)
            i += last - first

    register_kernel(f"mul_mat_{type.name.lower()}", mul_mat)


for _type in LAYOUTS:
    _define(_type)
