"""The reference device: host memory, nodes run one after the other through NumPy."""

import functools

import numpy as np

from pyggml import backend
from pyggml.backend import NO_LIMIT, DeviceType, Memory, Status
from pyggml.backends.reference.memory import INTEGERS, bytes_at, write
from pyggml.backends.reference.ops_matmul import mul_mat, mul_mat_id, mul_mat_id_cold
from pyggml.backends.reference.table import REFERENCE, Run
from pyggml.graph import Graph
from pyggml.ops import Op, TensorFlag
from pyggml.quants import DEQUANTIZABLE, QUANTIZABLE
from pyggml.quants_base import Bytes
from pyggml.tensor import Tensor

READABLE = frozenset((*DEQUANTIZABLE, *INTEGERS))
WRITABLE = frozenset((*QUANTIZABLE, *INTEGERS))


class RefBuffer(backend.Buffer):
    """A NumPy array."""

    def __init__(self, buft: "RefBufferType", size: int) -> None:
        self.buft = buft
        self.size = size
        self._owner = np.zeros(size + buft.alignment, np.uint8)
        self.base = backend.pad(self._owner.ctypes.data, buft.alignment)

    def _bytes(self, tensor: Tensor, offset: int, size: int) -> Bytes:
        assert tensor.data is not None
        start = tensor.data + offset - self._owner.ctypes.data
        return self._owner[start : start + size]

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self._bytes(tensor, offset, data.nbytes)[:] = np.frombuffer(data, np.uint8)

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        np.frombuffer(out, np.uint8)[:] = self._bytes(tensor, offset, out.nbytes)

    def copy(self, src: Tensor, dst: Tensor) -> bool:
        buffer = backend.buffer_of(src)
        if buffer is None or not buffer.buft.is_host or src.data is None:
            return False
        self._bytes(dst, 0, src.nbytes)[:] = bytes_at(src.data, src.nbytes)
        return True

    def clear(self, value: int = 0) -> None:
        self._owner[:] = value


class RefBufferType(backend.BufferType):
    """Host memory."""

    name = "REF"
    is_host = True

    def __init__(self, device: "RefDevice") -> None:
        self.device = device

    def alloc_buffer(self, size: int) -> RefBuffer:
        return RefBuffer(self, size)


class RefDevice(backend.Device):
    """Runs every operation of the reference table.

    With `quantize_activations` products round their activations as ggml's CPU does.
    """

    name = "REF"
    description = "NumPy reference"
    type = DeviceType.CPU

    def __init__(self, *, quantize_activations: bool = False) -> None:
        self._buft = RefBufferType(self)
        self.table: dict[Op, Run] = dict(REFERENCE)
        if quantize_activations:
            self.table |= {
                Op.MUL_MAT: functools.partial(mul_mat, quantize_activations=True),
                Op.MUL_MAT_ID: functools.partial(mul_mat_id, quantize_activations=True),
                Op.MUL_MAT_ID_COLD: functools.partial(mul_mat_id_cold, quantize_activations=True),
            }

    def memory(self) -> Memory:
        return Memory(NO_LIMIT, NO_LIMIT)

    def init_backend(self) -> "RefBackend":
        return RefBackend(self)

    def buffer_type(self) -> RefBufferType:
        return self._buft

    def supports_op(self, node: Tensor) -> bool:
        if backend.is_noop(node):
            return True
        sources = all(s is None or s.type in READABLE for s in node.src)
        return node.op in self.table and node.type in WRITABLE and sources

    def supports_buft(self, buft: backend.BufferType) -> bool:
        return buft.is_host


class RefBackend(backend.Backend):
    """Node after node; whatever NumPy warns of is part of the definition (inf, NaN)."""

    name = "REF"

    def __init__(self, device: RefDevice) -> None:
        self.device = device
        self.table = device.table

    def graph_compute(self, graph: Graph) -> Status:
        with np.errstate(all="ignore"):
            for node in graph.nodes:
                if TensorFlag.COMPUTE in node.flags and not backend.is_noop(node):
                    self.run(node)
        return Status.SUCCESS

    def run(self, node: Tensor) -> None:
        """Compute one node whose sources are ready."""
        if node.is_empty:
            return
        values = self.table[node.op](node)
        if values is not None:
            write(node, values)
