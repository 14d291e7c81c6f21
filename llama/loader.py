"""Loading a model: wanted tensors -> buffer types -> buffers -> data (llama_model_load)."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyggml import registry
from pyggml.backend import Buffer, BufferType, Device, Usage, alloc_tensors
from pyggml.errors import ConfigError, ModelError
from pyggml.gguf import Gguf, GgufTensor, Metadata, Override, open_gguf
from pyggml.llama import architectures
from pyggml.llama.architectures import Architecture
from pyggml.llama.description import describe
from pyggml.llama.hparams import HParams
from pyggml.llama.memory_lock import MemoryLock
from pyggml.llama.placement import select_buffer_type
from pyggml.llama.tensor_check import check_data
from pyggml.llama.vocab import Vocab
from pyggml.llama.weights import Want, Weights
from pyggml.tensor import Tensor, padded

log = logging.getLogger("pyggml.loader")

LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock")
Progress = Callable[[float], bool]  # share of the bytes that is loaded -> False cancels


class LoadCancelled(Exception):
    """The progress callback asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """How a model is loaded (llama_model_params)."""

    load_mode: str = "auto"
    repack: bool = True
    check_tensors: bool = False
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        if self.load_mode not in LOAD_MODES:
            raise ConfigError(f"--load-mode {self.load_mode}: one of {', '.join(LOAD_MODES)}")

    @property
    def use_mmap(self) -> bool:
        return self.load_mode in ("auto", "mmap", "mmap+mlock")

    @property
    def use_mlock(self) -> bool:
        return self.load_mode.endswith("mlock")


@dataclass(slots=True)
class Model:
    """A loaded model: numbers, vocabulary and placed weights."""

    gguf: Gguf
    metadata: Metadata
    arch: Architecture
    hparams: HParams
    vocab: Vocab
    devices: tuple[Device, ...]  # best first, the CPU last
    weights: Weights
    buffers: list[Buffer] = field(default_factory=list)
    lock: MemoryLock = field(default_factory=MemoryLock)
    load_ms: float = 0.0

    @property
    def n_cores(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return self.gguf.nbytes

    @property
    def n_params(self) -> int:
        """Number of weights in the file; tied ones count once."""
        return sum(math.prod(t.ne) for t in self.gguf.tensors.values())

    @property
    def description(self) -> str:
        """Architecture, size and type: "llama 135M Q4_1"."""
        types = [t.type for t in self.gguf.tensors.values()]
        return describe(self.metadata, self.n_params, types)

    def close(self) -> None:
        """Give memory and files back."""
        self.lock.release()
        for buffer in self.buffers:
            buffer.free()
        self.gguf.close()


def load_model(
    path: str | Path, params: ModelParams | None = None, progress: Progress | None = None
) -> Model:
    """Open, check and place everything; raises GgufError, ModelError or OutOfMemory."""
    start = time.perf_counter()
    params = params or ModelParams()
    gguf = open_gguf(path)
    try:
        model = _load(gguf, params, progress or (lambda share: True))
    except BaseException:
        gguf.close()
        raise
    model.load_ms = 1e3 * (time.perf_counter() - start)
    return model


def _load(gguf: Gguf, params: ModelParams, progress: Progress) -> Model:
    metadata = gguf.metadata.with_overrides(params.overrides)
    arch = architectures.find(metadata.get_str("general.architecture"))
    hp = arch.hparams(metadata)
    vocab = Vocab.from_metadata(metadata)
    devices = tuple(registry.devices())
    placed = [
        _Placed(want, source, tensor, select_buffer_type(devices, want, tensor, params.repack))
        for want, source, tensor in _match(gguf, arch.weights(hp))
    ]
    tensors = {p.want.name: p.tensor for p in placed}
    model = Model(gguf, metadata, arch, hp, vocab, devices, Weights(tensors, hp.n_layer))
    _Loading(model, params, placed, progress).run()
    return model


# ---------------------------------------------------------------- which tensors
def _match(gguf: Gguf, wants: Iterable[Want]) -> list[tuple[Want, GgufTensor, Tensor]]:
    """The file's tensor for every want, with its shape checked."""
    found = []
    unused = set(gguf.tensors)
    for want in wants:
        source = gguf.tensors.get(want.name)
        if source is None and want.duplicate_of:
            source = gguf.tensors.get(want.duplicate_of)
        if source is None:
            if want.required:
                raise ModelError(
                    f"{gguf.path}: tensor {want.name!r} is missing: the file is incomplete, or "
                    "its architecture is a variant that is not supported"
                )
            continue
        unused.discard(source.name)
        found.append((want, source, _new_tensor(gguf, want, source)))
    if unused:
        names = ", ".join(sorted(unused)[:4])
        raise ModelError(
            f"{gguf.path}: {len(unused)} tensors of the file are unknown to its architecture: "
            f"{names}{', ...' if len(unused) > 4 else ''}"
        )
    return found


def _new_tensor(gguf: Gguf, want: Want, source: GgufTensor) -> Tensor:
    if source.ne != padded(want.ne):
        raise ModelError(
            f"{gguf.path}: tensor {source.name!r} has wrong shape; "
            f"expected {_shape(want.ne)}, got {_shape(source.ne[: source.n_dims])}"
        )
    return Tensor(source.type, source.ne, name=want.name)


def _shape(ne: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, ne)) + "]"


# ---------------------------------------------------------------- their data
@dataclass(frozen=True, slots=True)
class _Placed:
    want: Want
    source: GgufTensor
    tensor: Tensor
    buft: BufferType


class _Loading:
    """One pass over the file."""

    def __init__(
        self, model: Model, params: ModelParams, placed: Sequence[_Placed], progress: Progress
    ) -> None:
        self.model = model
        self.params = params
        self.placed = placed
        self.progress = progress
        self.total = sum(p.source.nbytes for p in placed) or 1
        self.done = 0

    def run(self) -> None:
        mapped, copied = [], []
        for p in self.placed:
            (mapped if self._can_map(p.buft) else copied).append(p)
        if mapped:
            self._map(mapped)
        self._copy(copied)
        for buffer in self.model.buffers:
            buffer.set_usage(Usage.WEIGHTS)
            log.info("%12s model buffer size = %8.2f MiB", buffer.name, buffer.size / 1048576)
        if self.params.use_mlock:
            self._lock()

    def _can_map(self, buft: BufferType) -> bool:
        device = buft.device
        can = device.caps.buffer_from_host_ptr and buft is device.buffer_type()
        return self.params.use_mmap and can

    def _map(self, placed: Sequence[_Placed]) -> None:
        """Let tensors lie in the file's mapping."""
        buffers: dict[int, Buffer] = {}
        for p in placed:
            part = self.model.gguf.parts[p.source.part]
            if p.source.part not in buffers:
                device = p.buft.device
                buffer = device.buffer_from_host_ptr(part.address(0), part.size, part)
                assert buffer is not None
                buffers[p.source.part] = buffer
            p.tensor.buffer = buffers[p.source.part]
            p.tensor.data = part.address(p.source.offset)
            p.tensor.buffer.init_tensor(p.tensor)
            self._finish(p)
        self.model.buffers += buffers.values()

    def _copy(self, placed: Sequence[_Placed]) -> None:
        """Allocate one buffer per buffer type and write the data, biggest tensors first."""
        for buft in dict.fromkeys(p.buft for p in placed):
            mine = [p for p in placed if p.buft is buft]
            buffer = alloc_tensors([p.tensor for p in mine], buft)
            if buffer is not None:
                self.model.buffers.append(buffer)
            for p in sorted(mine, key=lambda p: -p.source.nbytes):
                self._write(p)
                self._finish(p)

    def _write(self, p: _Placed) -> None:
        part = self.model.gguf.parts[p.source.part]
        buffer = p.tensor.buffer
        assert buffer is not None
        if self.params.use_mmap:
            buffer.set(p.tensor, self.model.gguf.data(p.source.name))
            # the copy is what will be read: the mapped pages need not stay in memory
            part.advise_dont_need(p.source.offset, p.source.nbytes)
            return
        data = bytearray(p.source.nbytes)
        part.read_into(p.source.offset, data)
        buffer.set(p.tensor, memoryview(data))

    def _finish(self, p: _Placed) -> None:
        if self.params.check_tensors:
            check_data(self.model.gguf, p.source)
        self.done += p.source.nbytes
        if not self.progress(min(1.0, self.done / self.total)):
            raise LoadCancelled

    def _lock(self) -> None:
        for buffer in self.model.buffers:
            self.model.lock.lock(buffer.base, buffer.size)
