"""Loading a model: wanted tensors -> buffer types -> buffers -> data (llama_model_load)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyggml import registry
from pyggml.backend import Buffer, BufferType, Device, DeviceType, Usage, alloc_tensors
from pyggml.errors import ConfigError, ModelError, OutOfMemory
from pyggml.gguf import Gguf, GgufPart, GgufTensor, Metadata, Override, open_gguf
from pyggml.llama import architectures
from pyggml.llama.architectures import Architecture
from pyggml.llama.description import describe
from pyggml.llama.hparams import HParams
from pyggml.llama.memory_lock import MemoryLock
from pyggml.llama.placement import (
    Layout,
    Placement,
    Weight,
    cache_names,
    place,
    use_devices,
)
from pyggml.llama.placement_advice import Placed, check_capacity
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.tensor_check import check_data
from pyggml.llama.vocab import Vocab
from pyggml.llama.weights import Want, WantList, Weights
from pyggml.placeholder import PlaceholderBuffer, plan_tensors
from pyggml.tensor import Tensor, padded
from pyggml.threads import usable_cpus

log = logging.getLogger("pyggml.loader")

PAGE = 4096
MAP_ALIGNMENT = 32  # tensors that lie less well in the file are copied
NUMA_MODES = ("distribute", "isolate", "numactl")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock")
SINGLE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
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
    numa: str = ""  # of NUMA_MODES: how memory nodes are used
    placement: PlacementParams = PlacementParams()

    def __post_init__(self) -> None:
        if self.numa not in ("", *NUMA_MODES):
            raise ConfigError(f"--numa {self.numa}: one of {', '.join(NUMA_MODES)}")
        if self.load_mode not in LOAD_MODES:
            raise ConfigError(f"--load-mode {self.load_mode}: one of {', '.join(LOAD_MODES)}")

    def use_mmap(self, devices: Sequence[Device]) -> bool:
        """Whether weights may lie in the file's mapping."""
        if self.load_mode == "auto":
            return all(device.caps.mmap_support for device in devices)
        return self.load_mode in ("mmap", "mmap+mlock")

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
    placement: Placement
    weights: Weights
    buffers: list[Buffer] = field(default_factory=list)
    lock: MemoryLock = field(default_factory=MemoryLock)
    load_ms: float = 0.0
    numa: str = ""  # of NUMA_MODES
    no_alloc: bool = False  # only planned: the tensors have places, but neither memory nor data

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those in use, best first, the CPU last."""
        return self.placement.devices

    @property
    def n_cores(self) -> int:
        """Processors that this process may use."""
        return len(usable_cpus())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return self.gguf.nbytes

    @property
    def n_params(self) -> int:
        """Number of weights in the file; tied ones count once."""
        return self.gguf.n_params

    @property
    def description(self) -> str:
        """Architecture, size and type: "llama 135M Q4_1"."""
        types = [t.type for t in self.gguf.tensors.values()]
        return describe(self.metadata, self.n_params, types)

    def bytes_in(self, buffer: Buffer) -> int:
        """Bytes of a buffer of weights; of a mapping only what is used, and that once."""
        if not is_mapping(buffer):
            return buffer.size
        tensors = [t for t in self.weights.tensors.values() if t.buffer is buffer]
        return sum({t.data: t.nbytes for t in tensors}.values())

    def use_numa(self, mode: str) -> None:
        """How this model's weights and contexts use memory nodes."""
        self.numa = mode
        for device in self.devices:
            device.use_numa(mode)

    def close(self) -> None:
        """Give memory and files back."""
        self.lock.release()
        for buffer in self.buffers:
            buffer.free()
        self.gguf.close()


def is_mapping(buffer: Buffer) -> bool:
    """Whether a buffer is a part of a mapped file."""
    buft, device = buffer.buft, buffer.buft.device
    return buft is device.mapped_buffer_type() and buft is not device.buffer_type()


@dataclass(frozen=True, slots=True)
class _Placed:
    want: Want
    source: GgufTensor
    tensor: Tensor
    buft: BufferType


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open file and what it says of its model, wherever that will lie."""

    gguf: Gguf
    metadata: Metadata
    arch: Architecture
    hparams: HParams
    vocab: Vocab


def open_model(
    path: str | Path, overrides: Sequence[Override] = (), *, allow_no_data: bool = False
) -> ModelFile:
    """Open and read everything but the tensors. Raises GgufError, ModelError."""
    gguf = open_gguf(path, allow_no_data=allow_no_data)
    try:
        with _about(gguf):
            metadata = gguf.metadata.with_overrides(overrides)
            arch = architectures.find(metadata.get_str("general.architecture"))
            hp, vocab = arch.hparams(metadata), Vocab.from_metadata(metadata)
            return ModelFile(gguf, metadata, arch, hp, vocab)
    except BaseException:
        gguf.close()
        raise


def load_model(
    source: str | Path | ModelFile,
    params: ModelParams | None = None,
    progress: Progress | None = None,
    *,
    devices: Sequence[Device] | None = None,
    no_alloc: bool = False,
) -> Model:
    """Open, check and place everything on the wanted ones of `devices` (None: all there are).

    With `no_alloc` nothing is read but the header, which may be all there is: buffers are
    placeholders of the size that loading would take. An open file may be given, if `params` has the
    overrides it was opened with; it belongs to the model then.

    Raises GgufError, ModelError, ConfigError or OutOfMemory, and LoadCancelled if `progress` asks
    for it; then nothing stays open or allocated.
    """
    start = time.perf_counter()
    params = params or ModelParams()
    chosen = use_devices(params.placement, devices or registry.devices())
    file = source
    if not isinstance(file, ModelFile):
        file = open_model(file, params.overrides, allow_no_data=no_alloc)
    try:
        with _about(file.gguf):
            placed, model = _describe(file, params, chosen)
        model.no_alloc = no_alloc
        model.use_numa(params.numa)
        _Loading(model, params, placed, progress or (lambda share: True)).run()
    except BaseException:
        file.gguf.close()
        raise
    model.load_ms = 1e3 * (time.perf_counter() - start)
    return model


@contextmanager
def _about(gguf: Gguf) -> Iterator[None]:
    """Let errors of a model name its file."""
    try:
        yield
    except ModelError as e:
        if str(gguf.path) in str(e):
            raise
        raise ModelError(f"{gguf.path}: {e}") from e


def _describe(
    file: ModelFile, params: ModelParams, devices: tuple[Device, ...]
) -> tuple[list[_Placed], Model]:
    """The model without its data, and where each tensor is to go."""
    hp = file.hparams
    found = _match(file.gguf, hp.arch, file.arch.weights(hp))
    weights = [Weight(want, tensor, source.name) for want, source, tensor in found]
    layout = Layout(params.repack, params.use_mmap(devices))
    placement = place(params.placement, devices, hp, weights, layout)
    bufts = placement.weights
    placed = [_Placed(want, source, t, bufts[want.name]) for want, source, t in found]
    tensors = Weights({p.want.name: p.tensor for p in placed}, hp.n_layer)
    return placed, Model(file.gguf, file.metadata, file.arch, hp, file.vocab, placement, tensors)


# ---------------------------------------------------------------- which tensors
def _match(gguf: Gguf, arch: str, want_list: WantList) -> list[tuple[Want, GgufTensor, Tensor]]:
    """The file's tensor for every want, with its shape checked."""
    found = []
    wants = [want for want in want_list if not (want.unless and want.unless in gguf.tensors)]
    unknown = gguf.tensors.keys() - {want.name for want in wants}
    unknown -= {want.duplicate_of for want in wants}
    ignored = {name for name in unknown if name.startswith(tuple(want_list.ignored))}
    unknown -= ignored
    for name in sorted(ignored):
        size = gguf.tensors[name].nbytes
        log.warning("model has unused tensor %s (size = %d bytes) -- ignoring", name, size)
    for want in wants:
        source = gguf.tensors.get(want.name)
        if source is None and want.duplicate_of:
            source = gguf.tensors.get(want.duplicate_of)
        if source is not None:
            found.append((want, source, _new_tensor(want, source)))
        elif want.required:
            raise ModelError(
                f"tensor {want.name!r} is missing, which the architecture {arch!r} needs: "
                f"the model is of another kind, or a variant that is not supported{_list(unknown)}"
            )
    if unknown:
        raise ModelError(
            f"{len(unknown)} tensors are unknown to the architecture {arch!r}: the model is of "
            f"another kind, or a variant that is not supported{_list(unknown)}"
        )
    return found


def _list(unknown: Set[str]) -> str:
    if not unknown:
        return ""
    names = ", ".join(sorted(unknown)[:4])
    hint = ""
    if any(SINGLE_EXPERT.fullmatch(name) for name in unknown):
        hint = "\nthere is one tensor per expert, as in files of 2023: convert the model again"
    return f"\nunknown tensors: {names}{', ...' if len(unknown) > 4 else ''}{hint}"


def _new_tensor(want: Want, source: GgufTensor) -> Tensor:
    if source.ne != padded(want.ne):
        raise ModelError(
            f"tensor {source.name!r} has wrong shape; "
            f"expected {_shape(want.ne)}, got {_shape(source.ne[: source.n_dims])}"
        )
    return Tensor(source.type, source.ne, name=want.name)


def _shape(ne: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, ne)) + "]"


# ---------------------------------------------------------------- their data
class _Loading:
    """One pass over the file."""

    def __init__(
        self, model: Model, params: ModelParams, placed: Sequence[_Placed], progress: Progress
    ) -> None:
        self.model = model
        self.params = params
        self.placed = placed
        self.progress = progress
        self.use_mmap = params.use_mmap(model.devices)
        self.total = sum(p.source.nbytes for p in placed) or 1
        self.done = 0
        self.alloc = plan_tensors if model.no_alloc else alloc_tensors
        self.checked: set[str] = set()  # names in the file
        self.copied: list[str] = []  # what was written into each layout of the CPU's own

    def run(self) -> None:
        """Give every tensor its data. Whatever goes wrong, nothing stays allocated."""
        try:
            self._load()
        except BaseException:
            self.model.close()
            raise

    def _load(self) -> None:
        self.model.placement.report(cache_names(self.model.hparams))
        if not self.model.no_alloc:
            weights = [Placed(p.want.name, p.want.layer, p.tensor, p.buft) for p in self.placed]
            check_capacity(self.model.placement, weights)
        self._map([p for p in self.placed if self._can_map(p)])
        self._copy([p for p in self.placed if not self._can_map(p)])
        for buffer in self.model.buffers:
            buffer.set_usage(Usage.WEIGHTS)
            size = self.model.bytes_in(buffer) / 1048576
            log.info("%12s model buffer size = %8.2f MiB", buffer.name, size)
        if self.model.no_alloc:
            return
        log.info("repacking: %s", "; ".join(self.copied) or self._why_in_rows())
        if self.params.use_mlock:
            self._lock()

    def _why_in_rows(self) -> str:
        where = "the file's mapping" if any(map(self._can_map, self.placed)) else "plain memory"
        if not self.params.repack:
            return f"off, rows are read from {where}"
        placement = self.model.placement
        pinned = any(d.host_buffer_type() for d in placement.gpus)
        hint = "" if placement.params.no_host or not pinned else " (--no-host lets the CPU repack)"
        return f"no weight is, rows are read from {where}{hint}"

    def _can_map(self, p: _Placed) -> bool:
        device = p.buft.device
        is_plain = device.caps.buffer_from_host_ptr and p.buft is device.buffer_type()
        return self.use_mmap and is_plain and p.source.offset % MAP_ALIGNMENT == 0

    def _map(self, placed: Sequence[_Placed]) -> None:
        """Let tensors lie in the file's mapping."""
        for buft, part in dict.fromkeys((p.buft, p.source.part) for p in placed):
            mine = [p for p in placed if p.buft is buft and p.source.part == part]
            file = self.model.gguf.parts[part]
            first = min(p.source.offset for p in mine)
            size = max(p.source.offset + p.source.nbytes for p in mine) - first
            buffer = self._wrap(buft.device, file, first, size)
            self.model.buffers.append(buffer)
            for p in mine:
                p.tensor.buffer = buffer
                p.tensor.data = buffer.base + p.source.offset - first
                buffer.init_tensor(p.tensor)
                self._finish(p)

    def _wrap(self, device: Device, file: GgufPart, first: int, size: int) -> Buffer:
        """A part of the file's mapping as a buffer."""
        if self.model.no_alloc:
            return PlaceholderBuffer(device.mapped_buffer_type(), size)
        buffer = device.buffer_from_host_ptr(file.address(first), size, file)
        assert buffer is not None
        return buffer

    def _allocate(self, buft: BufferType, tensors: Sequence[Tensor]) -> Buffer | None:
        try:
            return self.alloc(tensors, buft)
        except OutOfMemory as e:
            raise OutOfMemory(f"the weights do not fit: {e}\n{self._way_out(buft)}") from e

    def _way_out(self, buft: BufferType) -> str:
        """What helps if a buffer type has no room for its weights."""
        if buft.device.type != DeviceType.CPU:
            return "what helps: fewer --gpu-layers, experts on the CPU (--n-cpu-moe)"
        if buft is not buft.device.buffer_type():
            return "what helps: --no-repack leaves them in the mapped file, or a smaller model"
        mapped = "" if self.use_mmap else "--load-mode mmap leaves them in the file, or "
        return f"what helps: {mapped}a smaller model"

    def _copy(self, placed: Sequence[_Placed]) -> None:
        """Allocate one buffer per buffer type and write the data, biggest tensors first.

        Memory of other devices first: while they are filled the host has most room.
        """
        bufts = sorted(dict.fromkeys(p.buft for p in placed), key=lambda b: (b.is_host, b.name))
        for buft in bufts:
            mine = [p for p in placed if p.buft is buft]
            buffer = self._allocate(buft, [p.tensor for p in mine])
            if buffer is not None:
                self.model.buffers.append(buffer)
            if self.model.no_alloc:
                continue
            for part in {p.tensor.buffer for p in mine}:
                if part is not None:
                    part.prepare()
            start = time.perf_counter()
            for p in sorted(mine, key=lambda p: -p.source.nbytes):
                self._write(p)
                self._finish(p)
            if not buft.is_host and buft is not buft.device.buffer_type():
                self.copied.append(_cost(buft, mine, time.perf_counter() - start))

    def _write(self, p: _Placed) -> None:
        part = self.model.gguf.parts[p.source.part]
        buffer = p.tensor.buffer
        assert buffer is not None
        if self.use_mmap:
            buffer.set(p.tensor, self.model.gguf.data(p.source.name))
            # the copy is what will be read: the mapped pages need not stay in memory
            part.advise_dont_need(p.source.offset, p.source.nbytes)
            return
        data = bytearray(p.source.nbytes)
        part.read_into(p.source.offset, data)
        buffer.set(p.tensor, memoryview(data))

    def _finish(self, p: _Placed) -> None:
        if self.model.no_alloc:
            return
        wanted = p.want.checked or self.params.check_tensors
        if wanted and p.source.name not in self.checked:
            self.checked.add(p.source.name)
            check_data(self.model.gguf, p.source)
        self.done += p.source.nbytes
        if not self.progress(min(1.0, self.done / self.total)):
            raise LoadCancelled

    def _lock(self) -> None:
        """Weights in memory of the host; of a mapping only what lies there."""
        mapped = [p for p in self.placed if self._can_map(p)]
        for start, size in _runs([p.tensor for p in mapped]):
            self.model.lock.lock(start, size)
        copied = [p for p in self.placed if not self._can_map(p) and _is_host(p.buft)]
        for buffer in dict.fromkeys(p.tensor.buffer for p in copied):
            if buffer is not None:
                self.model.lock.lock(buffer.base, buffer.size)


def _is_host(buft: BufferType) -> bool:
    """Whether it is memory of the host, readable in the plain layout or not."""
    return buft.is_host or buft.device.type == DeviceType.CPU


def _runs(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(address, size) of memory that tensors take, those without a page between them as one."""
    runs: list[tuple[int, int]] = []
    for start, size in sorted((t.data or 0, t.nbytes) for t in tensors):
        first, length = runs[-1] if runs else (start, 0)
        if runs and start - first - length < PAGE:
            runs[-1] = first, max(length, start + size - first)
        else:
            runs.append((start, size))
    return runs


def _cost(buft: BufferType, placed: Sequence[_Placed], seconds: float) -> str:
    """How many tensors, and how fast they were brought into the layout of a buffer type."""
    nbytes = sum(p.source.nbytes for p in placed)
    return (
        f"{len(placed)} tensors into {buft.name}, {nbytes / 1048576:.2f} MiB in {seconds:.3f} s, "
        f"{nbytes / max(seconds, 1e-9) / 1e9:.1f} GB/s"
    )
