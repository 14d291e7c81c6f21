"""Runs single matrix products on the CPU backend, and the exact integer model they follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from op_case import random_blocks

from pyggml import build, quants
from pyggml.backend import alloc_tensors, tensor_get, tensor_set
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.panels import LAYOUTS
from pyggml.dtypes import GGMLType
from pyggml.graph import build_graph
from pyggml.tensor import Tensor, new_tensor

Floats = NDArray[np.float32]
F32 = GGMLType.F32


class Products:
    """A device and a backend whose products can be asked for as arrays."""

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.device = device or CpuDevice()
        self.backend = CpuBackend(self.device, 2)

    def leaf(self, data: NDArray[Any], type: GGMLType, *ne: int, repack: bool = False) -> Tensor:
        """A tensor with these bytes, repacked if asked."""
        t = new_tensor(type, *ne)
        device = self.device
        alloc_tensors([t], device.extra_buffer_types()[0] if repack else device.buffer_type())
        tensor_set(t, memoryview(np.ascontiguousarray(data)).cast("B"))
        return t

    def compute(self, result: Tensor, n_threads: int = 2) -> Floats:
        """Allocate what has no memory, run, and read: [ne3, ne2, ne1, ne0]."""
        graph = build_graph([result])
        owner = alloc_tensors([*graph.leafs, *graph.nodes], self.device.buffer_type())
        self.backend.set_n_threads(n_threads)
        self.backend.graph_compute(graph)
        out = np.empty(result.ne[::-1], np.float32)
        tensor_get(result, memoryview(out.reshape(-1).view(np.uint8)))
        del owner
        return out

    def product(
        self, raw: NDArray[Any], type: GGMLType, x: Floats, *, repack: bool = False, **options: int
    ) -> Floats:
        """x [n, k] times the rows of the raw weights: [n, rows]."""
        n, k = x.shape
        rows = raw.nbytes // type.row_size(k)
        weights = self.leaf(raw, type, k, rows, repack=repack)
        result = build.mul_mat(weights, self.leaf(x, F32, k, n))
        return self.compute(result, **options)[0, 0]


def random_weights(type: GGMLType, rows: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Normally distributed rows in a type; random blocks where there is no quantizer."""
    rng = np.random.default_rng(seed)
    if type not in quants.QUANTIZABLE:
        return random_blocks(rng, type, rows * k // type.block_size).reshape(rows, -1)
    values = rng.standard_normal((rows, k), np.float32)
    return quants.quantize(values, type)


def random_columns(n: int, k: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, k), np.float32)


def rounded(x: Floats, block: int) -> Floats:
    """Activations as the int8 formats keep them: d * q with d = largest / 127 per block."""
    blocks = x.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    q = np.rint(blocks * inverse)
    return (q.astype(np.float64) * (largest * np.float32(1 / 127))).reshape(x.shape)


def expected(raw: NDArray[np.uint8], type: GGMLType, x: Floats) -> NDArray[np.float64]:
    """The product in float64 of the weights' values and the rounded activations."""
    rows = raw.nbytes // type.row_size(x.shape[1])
    weights = quants.dequantize(raw, type).reshape(rows, -1).astype(np.float64)
    y = rounded(x, LAYOUTS[type].activations.values) if type in LAYOUTS else x
    return y.astype(np.float64) @ weights.T
