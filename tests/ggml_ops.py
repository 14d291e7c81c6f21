"""Real ggml as a backend: computes our graphs, in place, on tensors in host memory.

Every tensor of a graph becomes a ggml_tensor with the same address, strides, operation and
parameters; ggml's CPU code then runs the graph.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from pyggml import params as p
from pyggml.graph import Graph
from pyggml.ops import Op
from pyggml.tensor import Tensor


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml 0.20 to 0.26."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_uint8 * 64),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class Plan(ctypes.Structure):
    """struct ggml_cplan; room at the end for fields of later versions."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
        ("room", ctypes.c_uint8 * 64),
    ]


# ---------------------------------------------------------------- parameters
def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _rope(r: p.RopeParams) -> bytes:
    numbers = (r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow)
    head = _ints(0, r.n_dims, r.mode, 0, r.n_ctx_orig)
    return head + _floats(*numbers) + _ints(*r.sections, r.n_offs)


# How ggml packs each record into its 64 bytes; sub-operations are found by name.
PACK: dict[type, Callable[[Any], bytes]] = {
    p.NormParams: lambda r: _floats(r.eps),
    p.ScaleParams: lambda r: _floats(r.scale, r.bias),
    p.ClampParams: lambda r: _floats(r.low, r.high),
    p.FillParams: lambda r: _floats(r.value),
    p.UnaryParams: lambda r: _floats(*r.xielu),
    p.GluParams: lambda r: _ints(r.swapped) + _floats(r.alpha, r.limit),
    p.MulMatParams: lambda r: _ints(r.precision),
    p.SoftMaxParams: lambda r: _floats(r.scale, r.max_bias),
    p.FlashAttnParams: lambda r: _floats(r.scale, r.max_bias, r.logit_softcap) + _ints(r.precision),
    p.RopeParams: _rope,
    p.ViewParams: lambda r: struct.pack("<Q", r.offset),
    p.PermuteParams: lambda r: _ints(*r.axes),
    p.ConcatParams: lambda r: _ints(r.dim),
    p.SortParams: lambda r: _ints(r.descending),
    p.TopKParams: lambda r: _ints(r.k),
    p.DeltaNetParams: lambda r: _ints(r.n_snapshots),
}


class Missing(Exception):
    """This version of ggml has no such operation or type."""


# ---------------------------------------------------------------- the backend
class GgmlBackend:
    """Runs graphs with the ggml inside a loaded library."""

    def __init__(self, base: ctypes.CDLL, cpu: ctypes.CDLL, *, n_threads: int = 2) -> None:
        self.base, self.cpu, self.n_threads = base, cpu, n_threads
        base.ggml_init.restype = ctypes.c_void_p
        base.ggml_init.argtypes = [InitParams]
        base.ggml_free.argtypes = [ctypes.c_void_p]
        base.ggml_new_tensor.restype = ctypes.c_void_p
        base.ggml_new_tensor.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        base.ggml_new_graph.restype = ctypes.c_void_p
        base.ggml_new_graph.argtypes = [ctypes.c_void_p]
        base.ggml_build_forward_expand.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        for name in ("ggml_op_name", "ggml_unary_op_name", "ggml_glu_op_name", "ggml_type_name"):
            getattr(base, name).restype = ctypes.c_char_p
        base.ggml_version.restype = ctypes.c_char_p
        cpu.ggml_graph_plan.restype = Plan
        cpu.ggml_graph_plan.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        cpu.ggml_graph_compute.argtypes = [ctypes.c_void_p, ctypes.POINTER(Plan)]
        cpu.ggml_cpu_init()
        self.version: str = base.ggml_version().decode()

    @cache  # noqa: B019 - the backends of a test run live as long as it does
    def ids(self, kind: str) -> dict[str, int]:
        """Numbers of this version by name: "op", "unary_op" or "glu_op"."""
        # asking for a number beyond the last would read past ggml's table
        n_glu = 6 if self.version.startswith("0.20.") else 7
        count = {"op": Op.GLU + 1, "unary_op": 22, "glu_op": n_glu}[kind]
        last = "GLU" if kind == "op" else ""
        found: dict[str, int] = {}
        for i in range(count):
            found[getattr(self.base, f"ggml_{kind}_name")(i).decode()] = i
            if last in found:
                break
        return found

    def _id(self, kind: str, name: str) -> int:
        ids = self.ids(kind)
        if name not in ids:
            raise Missing(f"ggml {self.version} has no {name}")
        return ids[name]

    def _params(self, t: Tensor) -> bytes:
        packed = PACK[type(t.params)](t.params) if t.params else b""
        if isinstance(t.params, p.UnaryParams):
            packed = _ints(self._id("unary_op", t.op_desc)) + packed
        if isinstance(t.params, p.GluParams):
            packed = _ints(self._id("glu_op", t.op_desc)) + packed
        return packed.ljust(64, b"\0")

    def _op(self, t: Tensor) -> int:
        return 0 if t.op == Op.NONE else self._id("op", t.op.name)

    def _convert(self, ctx: int, t: Tensor, known: dict[Tensor, int]) -> None:
        ne = (ctypes.c_int64 * 4)(*t.ne)
        known[t] = self.base.ggml_new_tensor(ctx, t.type, 4, ne)
        g = GgmlTensor.from_address(known[t])
        g.nb[:] = t.nb
        g.op = self._op(t)
        g.op_params[:] = self._params(t)
        g.data = t.data
        for i, source in enumerate(t.src):
            if source is not None:
                g.src[i] = known[source]
        if t.op == Op.CPY and len(t.src) == 1:  # a cast names itself as the target
            g.src[1] = known[t]
        if t.view_src is not None:
            g.view_src, g.view_offs = known[t.view_src], t.view_offs

    def graph_compute(self, graph: Graph) -> None:
        """Compute all nodes; their memory and that of the leafs must be host memory."""
        ctx = self.base.ggml_init(InitParams(1 << 20, None, True))
        try:
            known: dict[Tensor, int] = {}
            for t in (*graph.leafs, *graph.nodes):
                self._convert(ctx, t, known)
            g = self.base.ggml_new_graph(ctx)
            for t in graph.nodes:
                self.base.ggml_build_forward_expand(g, known[t])
            plan = self.cpu.ggml_graph_plan(g, self.n_threads, None)
            work = np.empty(plan.work_size + 64, np.uint8)
            plan.work_data = work.ctypes.data
            assert self.cpu.ggml_graph_compute(g, ctypes.byref(plan)) == 0
        finally:
            self.base.ggml_free(ctx)
