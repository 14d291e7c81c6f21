"""Asks devices whether they can use a weight that lies in a buffer type (llama.cpp's probe)."""

from __future__ import annotations

from pyggml import build
from pyggml.backend import BufferType, Device, Usage
from pyggml.dtypes import GGMLType
from pyggml.ops import Op
from pyggml.params import RopeParams
from pyggml.tensor import Tensor, new_tensor

PROBE_BATCH = 512
_Question = tuple[Device, BufferType, Op, GGMLType, tuple[int, ...]]


class _ProbeBuffer:
    """Says "my tensors are weights of this type" without any memory."""

    def __init__(self, buft: BufferType) -> None:
        self.buft = buft
        self.usage = Usage.WEIGHTS


class Support:
    """Answers, each found out once. `n_used`: experts per token."""

    def __init__(self, n_used: int = 1) -> None:
        self.n_used = n_used
        self._known: dict[_Question, bool] = {}

    def __call__(self, device: Device, buft: BufferType, op: Op, tensor: Tensor) -> bool:
        key = (device, buft, op, tensor.type, tensor.ne)
        if key not in self._known:
            weight = Tensor(tensor.type, tensor.ne, name=tensor.name)
            weight.buffer = _ProbeBuffer(buft)  # type: ignore[assignment]  # only asked for its type
            self._known[key] = device.supports_op(_probe(op, weight, self.n_used))
        return self._known[key]


def _probe(op: Op, w: Tensor, n_used: int) -> Tensor:
    """The operation on operands of typical shape."""
    f32, i32 = build.F32, build.I32
    if op == Op.GET_ROWS:
        return build.get_rows(w, new_tensor(i32, PROBE_BATCH))
    if op == Op.MUL_MAT:
        return build.mul_mat(w, new_tensor(f32, w.ne[0], PROBE_BATCH, w.ne[2], w.ne[3]))
    if op in (Op.MUL_MAT_ID, Op.ADD_ID):
        ids = new_tensor(i32, n_used, PROBE_BATCH)
        x = new_tensor(f32, w.ne[0], n_used, PROBE_BATCH)
        return build.mul_mat_id(w, x, ids) if op == Op.MUL_MAT_ID else build.add_id(x, w, ids)
    if op == Op.ROPE:
        n_dims = 2 * w.ne[0]
        a = new_tensor(f32, n_dims, 1, PROBE_BATCH)
        return build.rope_ext(a, new_tensor(i32, PROBE_BATCH), w, RopeParams(n_dims))
    if op == Op.SOFT_MAX:
        return build.soft_max_ext(new_tensor(f32, PROBE_BATCH, 1, w.ne[0]), None, 1.0, sinks=w)
    if op == Op.SSM_CONV:
        return build.ssm_conv(new_tensor(f32, w.ne[0] - 1 + PROBE_BATCH, w.ne[1]), w)
    assert op in (Op.MUL, Op.ADD), op
    combine = build.mul if op == Op.MUL else build.add
    return combine(new_tensor(f32, *w.ne), w)
