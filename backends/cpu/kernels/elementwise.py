"""Kernels of functions of single elements: one small kernel per function, rows as chunks."""

from __future__ import annotations

from typing import Any

from numba import float32

from pyggml.backends.cpu.kernels import functions as f
from pyggml.backends.cpu.kernels.access import (
    chunk_start,
    dst_ne,
    param_float,
    param_int,
    register_kernel,
    src_ne,
)
from pyggml.backends.cpu.kernels.emit import V
from pyggml.backends.cpu.kernels.quantize import ROW_QUANTIZERS
from pyggml.backends.cpu.kernels.rows import Row, dst_row, src_row
from pyggml.backends.cpu.kernels.simd import load

ZERO = float32(0)


# ---------------------------------------------------------------- one operand
def _map_kernel(name: str, row: Row) -> None:
    """dst = function(src; four float parameters)"""
    apply = row.operation()

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        p, q = param_float(node, 0), param_float(node, 1)
        r, s = param_float(node, 2), param_float(node, 3)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            apply(dst_row(node, i), src_row(node, 0, i), 0, n, p, q, r, s)

    register_kernel(name, kernel)


def _one(function: f.Function) -> Row:
    return Row(lambda x, c: function(x[0]))


for _name, _function in f.UNARY.items():
    _map_kernel(f"unary_{_name}", _one(_function))
_map_kernel("unary_xielu", Row(lambda x, c: f.xielu(x[0], *c)))
_map_kernel("sqr", Row(lambda x, c: x[0] * x[0], unroll=4))
_map_kernel("sqrt", _one(f.sqrt))
_map_kernel("scale", Row(lambda x, c: f.mad(x[0], c[0], c[1]), unroll=4))
_map_kernel("clamp", Row(lambda x, c: f.at_most(f.at_least(x[0], c[0]), c[1]), unroll=4))
_map_kernel("fill", Row(lambda x, c: c[0], sources=(), unroll=4))


# ---------------------------------------------------------------- two operands, broadcast
def _binary_kernel(name: str, function: Any) -> None:
    """dst = function(a, b); b's rows are as long as a's, one element, or repeat in it."""
    rows_of = Row(lambda x, c: function(*x), sources=("f32", "f32"), unroll=2).operation()
    with_scalar = Row(lambda x, c: function(x[0], c[0]), unroll=2).operation()

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        part = src_ne(node, 1, 0)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            d, a, b = dst_row(node, i), src_row(node, 0, i), src_row(node, 1, i)
            if part == 1:
                with_scalar(d, a, 0, n, load(float32, b), ZERO, ZERO, ZERO)
            else:
                for j in range(0, n, part):
                    rows_of(d + 4 * j, a + 4 * j, b, part, ZERO, ZERO, ZERO, ZERO)

    register_kernel(name, kernel)


_binary_kernel("add", lambda a, b: a + b)
_binary_kernel("sub", lambda a, b: a - b)
_binary_kernel("mul", lambda a, b: a * b)
_binary_kernel("div", f.divide)


# ---------------------------------------------------------------- gated activations
def _limited(x: list[V], limit: V) -> tuple[V, V]:
    gate = f.at_most(x[0], limit)
    return gate, f.at_most(f.at_least(x[1], -limit), limit)


def _swiglu_oai(x: list[V], c: list[V]) -> V:
    gate, up = _limited(x, c[1])
    return f.sigmoid_times(gate, c[0]) * (up + f.const(up, 1.0))


def _swiglu_clamp(x: list[V], c: list[V]) -> V:
    gate, up = _limited(x, c[1])
    return f.silu(gate) * up


def _glu_kernels(name: str, emit: Any) -> None:
    """dst = activation(gate) * up; with a suffix: and its columns for products (quantize.py).

    Parameters: alpha, limit, byte offsets of gate and up in their rows. Sources: gate, up (the
    same tensor if its rows hold both).
    """
    apply = Row(emit, sources=("f32", "f32")).operation()
    for suffix, quantize_row in ROW_QUANTIZERS.items():
        _glu_kernel(name + suffix, apply, quantize_row)


def _glu_kernel(name: str, apply: Any, quantize_row: Any) -> None:

    def kernel(node: int, ith: int, chunk: int, n_chunks: int) -> None:
        n, rows = dst_ne(node, 0), dst_ne(node, 1) * dst_ne(node, 2) * dst_ne(node, 3)
        alpha, limit = param_float(node, 0), param_float(node, 1)
        gate_offset, up_offset = param_int(node, 2), param_int(node, 3)
        for i in range(chunk_start(rows, chunk, n_chunks), chunk_start(rows, chunk + 1, n_chunks)):
            gate, up = src_row(node, 0, i) + gate_offset, src_row(node, 1, i) + up_offset
            d = dst_row(node, i)
            apply(d, gate, up, n, alpha, limit, ZERO, ZERO)
            quantize_row(node, i, rows, d, n)

    register_kernel(name, kernel)


# By the names of GluOp.
GATED = {
    "reglu": f.relu,
    "geglu": f.gelu,
    "swiglu": f.silu,
    "geglu_erf": f.gelu_erf,
    "geglu_quick": f.gelu_quick,
}
for _name, _gate in GATED.items():
    _glu_kernels(f"glu_{_name}", lambda x, c, gate=_gate: gate(x[0]) * x[1])
_glu_kernels("glu_swiglu_oai", _swiglu_oai)
_glu_kernels("glu_swiglu_clamp", _swiglu_clamp)
