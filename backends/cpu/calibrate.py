"""How fast this machine is, measured with the kernels and threads that run graphs.

Each rate is measured when somebody first asks for it (a few hundredths of a second) and kept in
the cache folder of the kernels, whose name is a digest of their sources and of the processor. What
was measured while others kept the machine busy is measured again later; the better number counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyggml import build
from pyggml.backend import BufferType, alloc_tensors
from pyggml.backends.cpu.buffers import panel_layout
from pyggml.backends.cpu.memory import at_address
from pyggml.backends.cpu.plan import kernel_names
from pyggml.backends.cpu.pool import ENTRY_POINTS
from pyggml.backends.cpu.probe import KERNELS, Probe
from pyggml.cost import Rates, node_cost
from pyggml.dtypes import GGMLType
from pyggml.graph import build_graph, next_uid
from pyggml.params import FlashAttnParams
from pyggml.tensor import Tensor, new_tensor
from pyggml.threads import ThreadParams, usable_cpus

if TYPE_CHECKING:
    from pyggml.backends.cpu.device import CpuDevice

FILL = 0x2E  # as a half, a float and an exponent of any format: a normal number
K = 4096  # values of a row of weights
ROWS, COLUMNS = 512, 128  # of a product with many columns
KEYS, QUERIES, HEAD, HEADS = 1024, 64, 128, 16
SMALL_NODES = 256
LATENCY = "node_latency"
AGAIN = 600  # seconds after which something is measured again if the machine was busy
_LITTLE = 1 << 20  # bytes, where memory is not what is measured
RUNS = 3  # of which the fastest counts
CACHES = 3  # times the last level of cache: weights are to come from memory
LEAST_BYTES, MOST_BYTES = 64 << 20, 256 << 20
USUAL_CACHE = 32 << 20  # bytes, where the system does not tell
CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def last_cache_bytes() -> int:
    """Size of the last level of cache."""
    sizes = [f.read_text().strip() for f in CACHE.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=USUAL_CACHE)


def cpu_rates(device: CpuDevice, threads: ThreadParams) -> Rates:
    """The rates of the machine with so many threads."""
    measured = _Measured(device, threads)
    measured.expect(())
    value = measured.value
    return Rates(
        gbs=value("read_gbs", measured.reading),
        gflops=value("gflops", measured.floats),
        attention_gflops=value("attention_gflops", measured.attention),
        gbs_of=_PerType(measured, "vector", repacked=False),
        gflops_of=_PerType(measured, "product", repacked=False),
        repacked_gbs_of=_PerType(measured, "vector", repacked=True),
        repacked_gflops_of=_PerType(measured, "product", repacked=True),
        node_latency=value(LATENCY, measured.latency),
        measured=True,
        expect=measured.expect,
    )


class _PerType(Mapping[GGMLType, float]):
    """The rates of products by the type of their weights."""

    def __init__(self, measured: _Measured, kind: str, *, repacked: bool) -> None:
        self._measured = measured
        self._kind = kind
        self._repacked = repacked
        self._types = [t for t in GGMLType if measured.multiplies(t, repacked)]

    def __getitem__(self, type: GGMLType) -> float:
        if type not in self._types:
            raise KeyError(type)
        measured, repacked = self._measured, self._repacked
        name = _name(self._kind, type, repacked)
        measure = measured.vector if self._kind == "vector" else measured.product
        return measured.value(name, lambda: measure(type, repacked))

    def __contains__(self, type: object) -> bool:
        return type in self._types

    def __iter__(self) -> Iterator[GGMLType]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)


def _name(kind: str, type: GGMLType, repacked: bool) -> str:
    return f"{kind}_{'repacked_' * repacked}{type.label}"


class _Measured:
    """Numbers by name: those in the file of this machine, and new ones."""

    def __init__(self, device: CpuDevice, threads: ThreadParams) -> None:
        self._device = device
        self._threads = threads
        self._path = _file(device, threads)
        self._known = _read(self._path)

    def value(self, name: str, measure: Callable[[], float]) -> float:
        """What is known, or else is measured now and kept."""
        busy = f"busy {name}"  # when it was measured, if the machine was not quiet
        if name in self._known and time.time() - self._known.get(busy, time.time()) < AGAIN:
            return self._known[name]
        new = measure()
        better = min if name == LATENCY else max
        self._known[name] = better(new, self._known.get(name, new))
        self._known.pop(busy, None)
        if not _is_quiet():
            self._known[busy] = time.time()
        others = {n: v for n, v in _read(self._path).items() if n.removeprefix("busy ") != name}
        self._known = others | self._known  # another process may have added some
        _write(self._path, self._known)
        return self._known[name]

    def expect(self, types: Collection[GGMLType]) -> None:
        """Compile at once what measuring products with such weights takes, and all else."""
        nodes: list[Tensor] = []
        if LATENCY not in self._known:
            nodes += [_attention(), *_row_of_small_nodes()[-1:]]
        for type in types:
            known = _name("product", type, repacked=False) in self._known
            if not known and self.multiplies(type, repacked=False):
                nodes += [_vector(type), _product(type)]
        if nodes:
            names = {*ENTRY_POINTS, *KERNELS}
            for node in nodes:
                names |= kernel_names(build_graph([node]), self._threads.n_threads)
            self._device.library.addresses(names)

    def multiplies(self, type: GGMLType, repacked: bool) -> bool:
        """Whether weights of a type, in rows or in panels, can be multiplied."""
        if K % type.block_size:
            return False
        weights = new_tensor(type, K, ROWS)
        if repacked:
            return panel_layout(weights) is not None
        return self._device.supports_op(build.mul_mat(weights, new_tensor(build.F32, K, 1)))

    # ------------------------------------------------------------ what is measured
    def reading(self) -> float:
        """GB/s of plain reading."""
        with self._probe(_sample_bytes()) as probe:
            return probe.read.amount / probe.read.run()

    def floats(self) -> float:
        """GFLOP/s of multiply-adds in registers."""
        with self._probe(_LITTLE) as probe:
            return probe.fma.amount / probe.fma.run()

    @contextlib.contextmanager
    def _probe(self, nbytes: int) -> Iterator[Probe]:
        probe = Probe(self._device, self._threads, nbytes)
        try:
            yield probe
        finally:
            probe.close()

    def vector(self, type: GGMLType, repacked: bool) -> float:
        """GB/s of the weights in a product with one column."""
        node = _vector(type)
        return 1e-9 * node_cost(node).weight_bytes / self._seconds([node], repacked)

    def product(self, type: GGMLType, repacked: bool) -> float:
        """GFLOP/s of a product with many columns."""
        node = _product(type)
        return 1e-9 * node_cost(node).flops / self._seconds([node], repacked)

    def attention(self) -> float:
        """GFLOP/s of the attention of a prompt."""
        node = _attention()
        return 1e-9 * node_cost(node).flops / self._seconds([node])

    def latency(self) -> float:
        """Seconds from one small node to the next."""
        return self._seconds(_row_of_small_nodes()[-1:]) / SMALL_NODES

    # ------------------------------------------------------------ how
    def _seconds(self, results: list[Tensor], repacked: bool = False) -> float:
        """Of a graph, after a first run; its weights (the first source) may be repacked."""
        from pyggml.backends.cpu.device import CpuBackend

        device = self._device
        graph = build_graph(results)
        graph.uid = next_uid()  # so that its plan is made once
        weights = [results[0].src[0]] if repacked else []
        rest = [t for t in (*graph.leafs, *graph.nodes) if t not in weights]
        buffers = [_filled(rest, device.buffer_type())]
        if repacked:
            buffers.append(_filled([w for w in weights if w], device.extra_buffer_types()[0]))
        backend = CpuBackend(device, self._threads.n_threads)
        backend.set_threads(self._threads)
        try:
            backend.prepare(graph)
            backend.graph_compute(graph)
            return min(_timed(lambda: backend.graph_compute(graph)) for _ in range(RUNS))
        finally:
            backend.close()


# ---------------------------------------------------------------- graphs
def _vector(type: GGMLType) -> Tensor:
    rows = max(ROWS, _sample_bytes() // type.row_size(K) // ROWS * ROWS)
    return build.mul_mat(new_tensor(type, K, rows), new_tensor(build.F32, K, 1))


def _product(type: GGMLType) -> Tensor:
    return build.mul_mat(new_tensor(type, K, ROWS), new_tensor(build.F32, K, COLUMNS))


def _attention() -> Tensor:
    q = new_tensor(build.F32, HEAD, QUERIES, HEADS)
    k, v = (new_tensor(GGMLType.F16, HEAD, KEYS, HEADS) for _ in range(2))
    return build.flash_attn_ext(q, k, v, None, FlashAttnParams(HEAD**-0.5))


def _row_of_small_nodes() -> list[Tensor]:
    nodes = [new_tensor(build.F32, K)]
    while len(nodes) <= SMALL_NODES:
        nodes.append(build.scale(nodes[-1], 1.0))
    return nodes


def _is_quiet() -> bool:
    """Whether others leave the processor alone."""
    try:
        return os.getloadavg()[0] < 0.5 + len(usable_cpus()) / 4
    except (OSError, AttributeError):
        return True


def _filled(tensors: list[Tensor], buft: BufferType) -> object:
    """A buffer for the tensors (kept alive by them) full of ordinary numbers."""
    buffer = alloc_tensors(tensors, buft)
    assert buffer is not None
    # panels are made of the same fields as blocks: any bytes that are numbers there will do
    at_address(buffer.base, buffer.size)[:] = FILL
    return buffer


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _sample_bytes() -> int:
    return min(MOST_BYTES, max(LEAST_BYTES, CACHES * last_cache_bytes()))


# ---------------------------------------------------------------- the file
def _file(device: CpuDevice, threads: ThreadParams) -> Path:
    """Named by the machine and its threads, beside the kernels of its processor."""
    said = (device.description, device.memory().total >> 30, sorted(threads.cpus or ()))
    digest = hashlib.sha256(repr(said).encode()).hexdigest()[:12]
    return device.library.folder() / f"rates-{digest}-t{threads.n_threads}.json"


def _read(path: Path) -> dict[str, float]:
    """What was measured before; nothing if it cannot be read."""
    try:
        found = json.loads(path.read_text())
        return {str(name): float(value) for name, value in found.items() if float(value) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: Mapping[str, float]) -> None:
    with contextlib.suppress(OSError):  # then it is measured again next time
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1, sort_keys=True))
        part.replace(path)
