"""One matrix product on the CPU backend, beside what the machine can do at most."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml import build, quants, registry
from pyggml.backend import alloc_tensors, tensor_set
from pyggml.backends.cpu.buffers import panel_layout
from pyggml.backends.cpu.calibrate import last_cache_bytes
from pyggml.backends.cpu.device import CpuBackend, CpuDevice
from pyggml.backends.cpu.probe import Probe
from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError, UserError
from pyggml.graph import build_graph, next_uid
from pyggml.tensor import Tensor, new_tensor
from pyggml.threads import ThreadParams
from pyggml.tools.bench_measure import Round, timed
from pyggml.tools.bench_modes import OP
from pyggml.tools.bench_tasks import Parameter, chosen, layouts, one_of, two_numbers

TYPES = (GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16)
SHAPES = ((4096, 4096, 1), (4096, 4096, 512))
EXPERTS = "8,2"

DECODE_COLUMNS = 8  # up to this many, weights are to come from memory
CACHE_SHARE = 4  # times the size of the last cache
MAX_COPIES = 1024
MIN_SAMPLE_NS = 5_000_000  # short, so that many fall between what else the machine does
RANDOM_VALUES = 1 << 18  # weights that are drawn; then they repeat


@dataclass(frozen=True, slots=True)
class OpTask:
    """One row: `rows` x `k` weights times `columns` columns of activations."""

    op: str
    type: GGMLType
    rows: int
    k: int
    columns: int
    threads: ThreadParams
    repack: bool = True
    n_experts: int = 1
    n_used: int = 1  # experts of a column

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.k}x{self.columns}"

    @property
    def experts(self) -> str:
        """Used and all, of MUL_MAT_ID."""
        return f"{self.n_used}/{self.n_experts}" if self.op == "mul_mat_id" else ""

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.k * self.columns * self.n_used

    @property
    def matrix_bytes(self) -> int:
        """Of all experts, as in a file."""
        return self.type.row_size(self.k) * self.rows * self.n_experts


# ---------------------------------------------------------------- what is asked for
def op_tasks(values: Mapping[str, Any], threads: Sequence[ThreadParams]) -> list[OpTask]:
    """The product of the lists, threads innermost; raises UserError."""
    OP.check(values)
    op = values["op"]
    if op == "mul_mat" and "op_experts" in values:
        raise ConfigError("--experts are those of --op mul_mat_id: mul_mat has none")
    parse_type = one_of(_types(), any_case=True)
    types = chosen(Parameter("op_types", "--types", parse_type, TYPES), values)
    shapes: Sequence[tuple[int, int, int]] = chosen(
        Parameter("op_shapes", "--shapes", _shapes, SHAPES), values
    )
    experts = _experts(values.get("op_experts", EXPERTS)) if op == "mul_mat_id" else (1, 1)
    found = []
    for type, shape, r, t in itertools.product(types, shapes, layouts(values), threads):
        if shape[1] % type.block_size:
            raise ConfigError(
                f"--shapes {'x'.join(map(str, shape))}: a row of {type.label} holds a multiple of "
                f"{type.block_size} values, not {shape[1]}"
            )
        found.append(OpTask(op, type, *shape, t, r, *experts))
    return found


def cpu_device() -> CpuDevice:
    """The device whose kernels are measured."""
    for device in registry.devices():
        if isinstance(device, CpuDevice):
            return device
    raise UserError("--op: the CPU backend is not among the devices; --list-devices lists them")


def _types() -> dict[str, GGMLType]:
    """Types of weights that can be multiplied, by name."""
    device = cpu_device()
    return {t.label: t for t in GGMLType if _can_multiply(device, t)}


def _can_multiply(device: CpuDevice, type: GGMLType) -> bool:
    weights = new_tensor(type, type.block_size, 8)
    return device.supports_op(build.mul_mat(weights, new_tensor(build.F32, type.block_size, 1)))


def _shapes(flag: str, text: str) -> list[tuple[int, int, int]]:
    found = []
    for shape in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape.strip())
        if match is None or "0" in match.groups():
            raise ConfigError(
                f"{flag} {shape.strip()}: it must be MxKxN, as in 4096x4096x1: "
                "rows of weights, values per row, columns of activations"
            )
        found.append((int(match[1]), int(match[2]), int(match[3])))
    return found


def _experts(text: str) -> tuple[int, int]:
    found = two_numbers(text)
    if found is None or not 1 <= found[1] <= found[0]:
        raise ConfigError(f"--experts {text}: all experts and those of a column, as in {EXPERTS}")
    return found


# ---------------------------------------------------------------- the operation
def random_bytes(type: GGMLType, rows: int, k: int) -> npt.NDArray[np.uint8]:
    """Valid rows; only the first ones are drawn."""
    random, drawn = np.random.default_rng(0), max(1, min(rows, RANDOM_VALUES // k))
    raw: npt.NDArray[np.uint8]
    if type in quants.QUANTIZABLE:
        raw = quants.quantize(random.standard_normal((drawn, k), np.float32), type)
    else:
        # without these bits no field can be read as an infinite or undefined half
        raw = np.frombuffer(random.bytes(drawn * type.row_size(k)), np.uint8) & np.uint8(0x3B)
    return np.resize(raw.reshape(-1), rows * type.row_size(k))


def _random_experts(random: np.random.Generator, task: OpTask) -> npt.NDArray[np.int32]:
    """Different experts for each column: [columns, n_used]."""
    all_experts = np.tile(np.arange(task.n_experts, dtype=np.int32), (task.columns, 1))
    return np.ascontiguousarray(random.permuted(all_experts, axis=1)[:, : task.n_used])


class Operation:
    """A graph of one product per copy of the weights, each with its own activations."""

    def __init__(self, task: OpTask, device: CpuDevice, cache: int) -> None:
        self.task, self._backend = task, CpuBackend(device, task.threads.n_threads)
        self.n_copies = 1
        if task.columns <= DECODE_COLUMNS:
            wanted = -(-CACHE_SHARE * cache // task.matrix_bytes)
            self.n_copies = max(1, min(MAX_COPIES, wanted))
        random = np.random.default_rng(1)
        self._ids = [_random_experts(random, task) for _ in range(self.n_copies)]
        ne = (task.k, task.rows, task.n_experts)
        weights = [new_tensor(task.type, *ne) for _ in range(self.n_copies)]
        self.repacked = task.repack and panel_layout(weights[0]) is not None
        buft = device.extra_buffer_types()[0] if self.repacked else device.buffer_type()
        self._nodes = [self._product(w) for w in weights]
        self._graph = build_graph(self._nodes)
        self._graph.uid = next_uid()  # so that its plan is made once
        known = set(weights)
        rest = [t for t in (*self._graph.leafs, *self._graph.nodes) if t not in known]
        self._memory = [alloc_tensors(weights, buft), alloc_tensors(rest, device.buffer_type())]
        self._fill(weights)
        self.use_threads(task.threads)

    def _product(self, weights: Tensor) -> Tensor:
        task = self.task
        if task.op == "mul_mat":
            return build.mul_mat(weights, new_tensor(build.F32, task.k, task.columns))
        x = new_tensor(build.F32, task.k, task.n_used, task.columns)
        return build.mul_mat_id(weights, x, new_tensor(build.I32, task.n_used, task.columns))

    def _fill(self, weights: Sequence[Tensor]) -> None:
        task = self.task
        raw = random_bytes(task.type, task.rows * task.n_experts, task.k)
        random = np.random.default_rng(2)
        for w, node, ids in zip(weights, self._nodes, self._ids, strict=True):
            tensor_set(w, raw.data)
            x = node.src[1]
            assert x is not None
            values = random.standard_normal(math.prod(x.ne), np.float32)
            tensor_set(x, values.data.cast("B"))
            if len(node.src) > 2 and node.src[2] is not None:
                tensor_set(node.src[2], ids.reshape(-1).data.cast("B"))

    @property
    def weight_bytes(self) -> float:
        """That one product reads, as in a file."""
        used = [len(np.unique(ids)) for ids in self._ids]
        return self.task.matrix_bytes / self.task.n_experts * sum(used) / len(used)

    def use_threads(self, threads: ThreadParams) -> None:
        """How the next runs use the cores."""
        self._backend.set_threads(threads)
        self._backend.prepare(self._graph)

    def run(self, times: int = 1) -> int:
        """Nanoseconds of all products, `times` times."""
        start = time.perf_counter_ns()
        for _ in range(times):
            self._backend.graph_compute(self._graph)
        return time.perf_counter_ns() - start

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._backend.close()
        for buffer in self._memory:
            if buffer is not None:
                buffer.free()


# ---------------------------------------------------------------- measuring
@dataclass(frozen=True, slots=True)
class OpResult:
    """Rounds of four samples: the operation, reading, float and int8 arithmetic."""

    task: OpTask
    repacked: bool
    n_copies: int
    weight_bytes: float
    rounds: Sequence[Round]
    n_products: int  # of a sample of the operation
    amounts: tuple[int, int, int]  # bytes, operations, operations

    @property
    def samples_us(self) -> list[float]:
        return [samples[0].ns / 1e3 / self.n_products for samples in self.rounds]

    def peak(self, which: int) -> float:
        """The highest rate of any round, in G per second: 0 reading, 1 floats, 2 int8."""
        return self.amounts[which] / min(samples[1 + which].ns for samples in self.rounds)


def op_results(tasks: Sequence[OpTask], repetitions: int, *, warm_up: bool) -> Iterator[OpResult]:
    """One after the other, as they are measured; weights are made once for all threads."""
    device, cache = cpu_device(), last_cache_bytes()
    probes: dict[ThreadParams, Probe] = {}
    try:
        for _, group in itertools.groupby(tasks, key=_without_threads):
            mine = list(group)
            operation = Operation(mine[0], device, cache)
            try:
                for task in mine:
                    probe = probes.get(task.threads)
                    if probe is None:
                        probe = Probe(device, task.threads, CACHE_SHARE * cache)
                        probes[task.threads] = probe
                    operation.use_threads(task.threads)
                    times = _times(operation) if warm_up else 1
                    take = partial(_take, operation, times, probe)
                    rounds = [take() for _ in range(repetitions)]
                    yield _result(task, operation, rounds, times, probe)
            finally:
                operation.close()
    finally:
        for probe in probes.values():
            probe.close()


def _without_threads(task: OpTask) -> tuple[object, ...]:
    return task.type, task.shape, task.repack


def _times(operation: Operation) -> int:
    """Runs that make a sample long enough for the clock; the first one warms up."""
    operation.run()
    return max(1, -(-MIN_SAMPLE_NS // operation.run()))


def _take(operation: Operation, times: int, probe: Probe) -> Round:
    runs = (partial(operation.run, times), probe.read.run, probe.fma.run, probe.dot.run)
    return tuple(timed(run) for run in runs)


def _result(
    task: OpTask, operation: Operation, rounds: Sequence[Round], times: int, probe: Probe
) -> OpResult:
    return OpResult(
        task,
        operation.repacked,
        operation.n_copies,
        operation.weight_bytes,
        rounds,
        times * operation.n_copies,
        (probe.read.amount, probe.fma.amount, probe.dot.amount),
    )
