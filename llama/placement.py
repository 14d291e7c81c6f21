"""Which buffer type each weight goes to (llama.cpp's buffer-type lists and support probe)."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml import build
from pyggml.backend import BufferType, Device, DeviceType, Usage
from pyggml.errors import ModelError
from pyggml.llama.weights import Want
from pyggml.ops import Op
from pyggml.params import RopeParams
from pyggml.tensor import Tensor, new_tensor

PROBE_BATCH = 512


def select_buffer_type(
    devices: Sequence[Device], want: Want, tensor: Tensor, repack: bool
) -> BufferType:
    """The first buffer type in which the operation that uses the tensor can run."""
    for device, buft in _cpu_list(devices, repack):
        if _supports(device, buft, want.op, tensor):
            return buft
    raise ModelError(
        f"tensor {tensor.name!r} is {tensor.type.label}, which no device can use for "
        f"{want.op.name}: convert the model to another type"
    )


def _cpu_list(devices: Sequence[Device], repack: bool) -> list[tuple[Device, BufferType]]:
    """Extra layouts of the CPU first, then its plain memory."""
    cpus = [d for d in devices if d.type == DeviceType.CPU]
    extra = [(d, b) for d in cpus for b in d.extra_buffer_types()] if repack else []
    return extra + [(d, d.buffer_type()) for d in cpus]


class _ProbeBuffer:
    """Says "my tensors are weights of this type" without any memory."""

    def __init__(self, buft: BufferType) -> None:
        self.buft = buft
        self.usage = Usage.WEIGHTS


def _supports(device: Device, buft: BufferType, op: Op, tensor: Tensor) -> bool:
    weight = Tensor(tensor.type, tensor.ne, name=tensor.name)
    weight.buffer = _ProbeBuffer(buft)  # type: ignore[assignment]  # only asked for its type
    return device.supports_op(_probe(op, weight))


def _probe(op: Op, w: Tensor) -> Tensor:
    """The operation on operands of typical shape."""
    f32, i32 = build.F32, build.I32
    if op == Op.GET_ROWS:
        return build.get_rows(w, new_tensor(i32, PROBE_BATCH))
    if op == Op.MUL_MAT:
        return build.mul_mat(w, new_tensor(f32, w.ne[0], PROBE_BATCH, w.ne[2], w.ne[3]))
    if op in (Op.MUL_MAT_ID, Op.ADD_ID):
        ids = new_tensor(i32, 1, PROBE_BATCH)
        x = new_tensor(f32, w.ne[0], 1, PROBE_BATCH)
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
