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
from pyggml.backends.cpu.kernels.emit import tile_store, tile_zero
from pyggml.backends.cpu.kernels.repack import panel_packer
from pyggml.backends.cpu.kernels.simd import HAS_AVX512
from pyggml.backends.cpu.kernels.tile import unit_operation
from pyggml.backends.cpu.panels import FEW_COLUMNS, GROUP, LAYOUTS
from pyggml.dtypes import GGMLType

# Accumulators of a tile fill half of the registers: 32 of 512 bits, or 16 of 256.
TILE_ROWS, TILE_COLUMNS = (16, 8) if HAS_AVX512 else (8, 4)
PAIR = 16  # rows of two panels, the unit of sharing work


def tile_product(type: GGMLType, columns: int) -> Any:
    """Inline function: two panels from w and w2 times a tile of columns that are `step` bytes of
    a block apart; the first n_columns are stored."""
    layout = LAYOUTS[type]
    unit_bytes = layout.nbytes
    blocks_per_unit = layout.values // layout.activations.values
    zeros = tile_zero(TILE_ROWS, columns)
    unit = unit_operation(type, TILE_ROWS, columns)
    finish = tile_store(TILE_ROWS, columns)

    @inline
    def product(
        w: int,
        w2: int,
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
            acc = unit(acc, w, w2, y, step, 0, 0)
            w += unit_bytes
            w2 += unit_bytes
            y += blocks_per_unit * step
        finish(acc, out, out_step, n_rows, n_columns)

    return product


def pair_product(type: GGMLType) -> Any:
    """Inline function: up to 16 rows of two neighbouring panels times columns c0 .. c1 - 1."""
    layout = LAYOUTS[type]
    unit_bytes, column_bytes = layout.nbytes, layout.activations.nbytes
    blocks_per_unit = layout.values // layout.activations.values
    group_step = GROUP * column_bytes  # a constant, unlike block_step
    one, tile = tile_product(type, 1), tile_product(type, TILE_COLUMNS)

    @inline
    def pair_of_panels(
        w: int, units: int, n_rows: int, y: int, group: int, c0: int, c1: int, out: int, step: int
    ) -> None:
        panel_bytes = units * unit_bytes
        group_bytes = units * blocks_per_unit * column_bytes * group
        block_step = group * column_bytes
        for r in range(0, n_rows, TILE_ROWS):
            p = w + r // 8 * panel_bytes
            p2 = p + panel_bytes if r + 8 < n_rows else p
            c = c0
            while c < c1:
                a = y + c // group * group_bytes + c % group * column_bytes
                o = out + 4 * r + c * step
                if group == GROUP and c1 - c >= FEW_COLUMNS:
                    for t in range(0, min(c1 - c, GROUP), TILE_COLUMNS):
                        b, q = a + t * column_bytes, o + t * step
                        tile(p, p2, units, b, group_step, q, step, n_rows - r, c1 - c - t)
                    c += GROUP
                else:
                    one(p, p2, units, a, block_step, o, 0, n_rows - r, 1)
                    c += 1

    return pair_of_panels


def _define(type: GGMLType) -> None:
    unit_bytes = LAYOUTS[type].nbytes
    pack, pair_of_panels = panel_packer(type), pair_product(type)

    def mul_mat(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        rows, n_columns = param_int(node, 0), param_int(node, 1)
        planes2, planes3 = param_int(node, 2), param_int(node, 3)
        repeat2, repeat3 = param_int(node, 4), param_int(node, 5)
        units, group, block = param_int(node, 6), param_int(node, 7), param_int(node, 8)
        plane_bytes, file_blocks = param_int(node, 9), param_int(node, 10)
        in_rows = param_int(node, 11) != 0
        panel_bytes, out_step = units * unit_bytes, dst_nb(node, 1)
        pairs = (rows + PAIR - 1) // PAIR
        i = chunk_start(pairs * planes2 * planes3, chunk, n_chunks)
        end = chunk_start(pairs * planes2 * planes3, chunk + 1, n_chunks)
        while i < end:
            z, first = i // pairs, i % pairs
            last = min(pairs, first + end - i)
            z2, z3 = z % planes2, z // planes2
            w = src_data(node, 0) + z2 // repeat2 * src_nb(node, 0, 2)
            w += z3 // repeat3 * src_nb(node, 0, 3)
            y = src_data(node, 1) + z * plane_bytes
            out = dst_data(node) + z2 * dst_nb(node, 2) + z3 * dst_nb(node, 3)
            for c0 in range(0, n_columns, block):
                c1 = min(n_columns, c0 + block)
                for j in range(first, last):
                    n_rows = min(rows - PAIR * j, PAIR)
                    p = w + 2 * j * panel_bytes
                    if in_rows:
                        step, p = src_nb(node, 0, 1), scratch(node, ith)
                        for r in range(0, n_rows, 8):
                            source = w + (PAIR * j + r) * step
                            panel = p + r // 8 * panel_bytes
                            pack(source, step, min(n_rows - r, 8), panel, file_blocks)
                    pair_of_panels(p, units, n_rows, y, group, c0, c1, out + 4 * PAIR * j, out_step)
            i += last - first

    register_kernel(f"mul_mat_{type.name.lower()}", mul_mat)


for _type in LAYOUTS:
    _define(_type)
