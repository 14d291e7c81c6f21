"""The CPU's buffer types: plain memory, mapped files, and repacked weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pyggml.backend import Buffer, BufferType, Usage, buffer_of
from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.library import KernelLibrary, usable_cores
from pyggml.backends.cpu.lowering import find_lowering
from pyggml.backends.cpu.memory import (
    ALIGNMENT,
    Bytes,
    aligned_words,
    as_bytes,
    at_address,
    reserve,
    zero,
)
from pyggml.backends.cpu.panels import LAYOUTS, ROWS, PanelLayout
from pyggml.backends.cpu.pool import ENTRY_POINTS, Pool, Words
from pyggml.errors import OutOfMemory
from pyggml.ops import Op
from pyggml.tensor import Tensor
from pyggml.threads import Cpus

if TYPE_CHECKING:
    from pyggml.backends.cpu.device import CpuDevice


FEW_ITEMS = 32  # less work than waking threads takes


class _MemoryBuffer(Buffer):
    """What owns memory of the process."""

    def __init__(self, buft: BufferType, memory: Bytes) -> None:
        self.buft = buft
        self._memory: Bytes | None = memory
        self.base = memory.ctypes.data
        self.size = memory.nbytes

    def clear(self, value: int = 0) -> None:
        assert self._memory is not None
        if value:
            self._memory.fill(value)
        else:
            zero(self._memory)

    def free(self) -> None:
        self._memory = None


class HostBuffer(_MemoryBuffer):
    """Memory that every thread of the process can read and write."""

    def __init__(self, buft: BufferType, memory: Bytes, owner: object = None) -> None:
        super().__init__(buft, memory)
        self._owner = owner

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        at_address(_address(tensor) + offset, data.nbytes)[:] = as_bytes(data)

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        as_bytes(out)[:] = at_address(_address(tensor) + offset, out.nbytes)

    def copy(self, src: Tensor, dst: Tensor) -> bool:
        source = buffer_of(src)
        if source is None or not source.buft.is_host:
            return False
        ctypes.memmove(_address(dst), _address(src), src.nbytes)
        return True

    def free(self) -> None:
        super().free()
        self._owner = None


def _address(tensor: Tensor) -> int:
    assert tensor.data is not None
    return tensor.data


class HostBufferType(BufferType):
    """Plain memory, provided by the system page by page when it is first touched."""

    alignment = ALIGNMENT
    is_host = True

    def __init__(self, name: str, device: CpuDevice) -> None:
        self.name = name
        self.device = device

    def alloc_buffer(self, size: int) -> Buffer:
        return HostBuffer(self, _reserve(self, size))


def _reserve(buft: BufferType, size: int, *, huge: bool = False) -> Bytes:
    """Memory for a buffer; OutOfMemory tells what is free."""
    free = buft.device.memory().free
    try:
        if size > free:
            raise MemoryError
        return reserve(size, huge=huge)
    except (MemoryError, OSError, OverflowError) as e:
        missing = f", {_mib(size - free)} are missing" if size > free else ""
        raise OutOfMemory(
            f"a {buft.name} buffer of {_mib(size)} does not fit into memory: "
            f"{_mib(free)} are free{missing}"
        ) from e


def _mib(nbytes: int) -> str:
    return f"{nbytes / 1048576:.1f} MiB"


# ---------------------------------------------------------------- repacked weights
class RepackBufferType(BufferType):
    """Weights of products in panels of rows (panels.py)."""

    name = "CPU_REPACK"
    alignment = ALIGNMENT

    def __init__(self, device: CpuDevice) -> None:
        self.device: CpuDevice = device

    def alloc_buffer(self, size: int) -> Buffer:
        # a token reads all of it: with small pages, looking up addresses costs up to 15 % of that
        return RepackBuffer(self, _reserve(self, size, huge=True))

    def alloc_size(self, tensor: Tensor) -> int:
        panel = panel_layout(tensor)
        if panel is None:
            return tensor.nbytes
        return tensor.ne[2] * panel.matrix_bytes(tensor.ne[0], tensor.ne[1])

    def supports_op(self, node: Tensor) -> bool:
        """Products whose first source, and no other, lies here."""
        weights = node.src[0]
        if weights is None or panel_layout(weights) is None:
            return False
        if any(s is not None and is_repacked(s) for s in node.src[1:]):
            return False
        matrix = node.op == Op.MUL_MAT and weights.ne[2] == 1
        experts = node.op in (Op.MUL_MAT_ID, Op.MUL_MAT_ID_COLD)
        return (matrix or experts) and find_lowering(node) is not None


def panel_layout(tensor: Tensor) -> PanelLayout | None:
    """The layout a weight, or a stack of experts, takes when repacked; None if it cannot be."""
    ne = tensor.ne
    fits = not tensor.is_empty and ne[3] == 1
    if not fits or tensor.is_view or not tensor.is_contiguous:
        return None
    return LAYOUTS.get(tensor.type) if ne[0] % tensor.type.block_size == 0 else None


def is_repacked(tensor: Tensor) -> bool:
    """Whether the tensor lies in a buffer of panels."""
    buffer = buffer_of(tensor)
    return buffer is not None and isinstance(buffer.buft, RepackBufferType)


class RepackBuffer(_MemoryBuffer):
    """Memory of panels: written tensor by tensor, read only by product kernels."""

    buft: RepackBufferType

    def __init__(self, buft: RepackBufferType, memory: Bytes) -> None:
        super().__init__(buft, memory)
        self._kernels = set(ENTRY_POINTS)  # what the tensors here will need
        # while tensors are being written
        self._workers: _PoolWorkers | _SpreadWorkers | None = None

    def init_tensor(self, tensor: Tensor) -> None:
        panel = panel_layout(tensor)
        assert panel is not None, f"{tensor!r} cannot be repacked"
        tensor.extra = panel
        name = tensor.type.name.lower()
        product = "mul_mat" if tensor.ne[2] == 1 else "mul_mat_id"
        self._kernels |= {f"repack_{name}", f"{product}_{name}", panel.activations.kernel}

    def prepare(self) -> None:
        self.buft.device.library.addresses(sorted(self._kernels))

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        assert offset == 0 and data.nbytes == tensor.nbytes, "panels are written as a whole"
        self.set_from_address(tensor, as_bytes(data).ctypes.data)

    def set_from_address(self, tensor: Tensor, address: int) -> None:
        """Repack a tensor whose rows, as in the file, start at an address."""
        panel = tensor.extra
        assert isinstance(panel, PanelLayout) and tensor.data is not None
        # all at once, so that what is not compiled yet is compiled in parallel
        addresses = self.buft.device.library.addresses(sorted(self._kernels))
        code = addresses[f"repack_{tensor.type.name.lower()}"]
        node = aligned_words(layout.WORDS)
        node[layout.DST] = tensor.data
        node[layout.SRC : layout.SRC + layout.OPERAND_WORDS] = (address, *tensor.ne, *tensor.nb)
        blocks = tensor.ne[0] // tensor.type.block_size
        params = (*tensor.ne[1:3], blocks, panel.panel_bytes(tensor.ne[0]))
        node[layout.PARAMS : layout.PARAMS + len(params)] = params
        self._ready_workers().run(code, node, -(-tensor.ne[1] // ROWS) * tensor.ne[2])

    def _ready_workers(self) -> _PoolWorkers | _SpreadWorkers:
        if self._workers is None:
            device = self.buft.device
            groups = device.numa.groups() if device.numa is not None else ()
            self._workers = _SpreadWorkers(groups) if groups else _PoolWorkers(device.library)
        return self._workers

    def set_usage(self, usage: Usage) -> None:
        """All is written now."""
        super().set_usage(usage)
        self._stop()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        raise AssertionError(f"{tensor!r} is repacked: its rows cannot be read back")

    def free(self) -> None:
        self._stop()
        super().free()


class _PoolWorkers:
    """The threads of graphs: they wait in compiled code from one tensor to the next."""

    def __init__(self, library: KernelLibrary) -> None:
        self._n_threads = usable_cores()
        self._pool = Pool(self._n_threads, library)
        self._plan = aligned_words(2 * layout.WORDS)  # one step, and the end

    def run(self, code: int, node: Words, n_items: int) -> None:
        """All chunks of a kernel; returns when they are done."""
        alone = n_items < FEW_ITEMS
        self._plan[: layout.WORDS] = node
        self._plan[layout.KERNEL] = code
        self._plan[layout.N_CHUNKS] = 1 if alone else min(n_items, 4 * self._n_threads)
        self._pool.run(self._plan, 1 if alone else self._n_threads)

    def close(self) -> None:
        self._pool.close()


class _SpreadWorkers:
    """Threads on several memory nodes, which take turns."""

    def __init__(self, groups: Sequence[Cpus]) -> None:
        """`groups`: sets of CPUs whose threads take chunks in turn, so that the pages of chunk i
        come to lie near group i modulo their number."""
        from concurrent.futures import ThreadPoolExecutor

        self._n_threads = usable_cores()
        self._executors = [
            ThreadPoolExecutor(len(cpus), initializer=_stay_on, initargs=(cpus,)) for cpus in groups
        ]

    def run(self, code: int, node: Words, n_items: int) -> None:
        """All chunks of a kernel; returns when they are done."""
        i32 = ctypes.c_int32
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, i32, i32, i32)(code)
        n_chunks = min(n_items, 4 * max(self._n_threads, len(self._executors)))
        running = [
            self._executors[chunk % len(self._executors)].submit(
                kernel, node.ctypes.data, 0, chunk, n_chunks
            )
            for chunk in range(n_chunks)
        ]
        for future in running:
            future.result()

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown()


def _stay_on(cpus: Cpus) -> None:
    """Keep the calling thread on some CPUs; where that is refused its pages lie anywhere."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
