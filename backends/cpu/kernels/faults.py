"""How a kernel says that its inputs are wrong: it raises nothing, the plan asks afterwards."""

from __future__ import annotations

from numba import int64

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.kernels.access import inline
from pyggml.backends.cpu.kernels.atomics import compare_swap
from pyggml.backends.cpu.kernels.simd import load, store

FAULTS, STEP = 8 * layout.FAULTS, 8 * layout.STEP


@inline
def report_id(node: int, id: int) -> None:
    """Note that the node read an id that names nothing; the first note of a plan stays."""
    faults = load(int64, node + FAULTS)
    if compare_swap(faults, 0, load(int64, node + STEP) + 1):
        store(faults + 8, int64(id))
