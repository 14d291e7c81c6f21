"""How results of tests look: llama-bench's fields and columns, and those of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyggml.tools.bench_measure import (
    MAX_FOREIGN,
    Round,
    Side,
    Summary,
    foreign_text,
    n_disturbed,
    summaries,
)
from pyggml.tools.bench_output import BUILD, Column, Field, Layout, Samples
from pyggml.tools.bench_placement import SHOWN, short
from pyggml.tools.bench_tasks import FLASH_ATTN_NUMBERS, Grid, Task, varied
from pyggml.version import __version__


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured, or with simulated cards: what was modelled."""

    cpu_info: str
    gpu_info: str = ""
    backends: str = "CPU"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was measured with."""

    type: str
    size: int  # bytes
    n_params: int


@dataclass(frozen=True, slots=True)
class Result:
    """One finished task: rounds of one side, or of two in a comparison."""

    task: Task
    model: ModelInfo
    machine: Machine
    test_time: str  # UTC, ISO 8601
    rounds: Sequence[Round]
    reference: str = ""  # what it was compared with
    peaks: Sequence[int] = ()  # bytes of resident memory, per side

    @property
    def sides(self) -> list[Summary]:
        return summaries(self.rounds, self.task.n_tokens)

    @property
    def mine(self) -> Summary:
        return self.sides[0]

    @property
    def other(self) -> Summary:
        return self.sides[1]

    @property
    def ratio(self) -> float:
        """Of the medians; above 1 pyggml is faster."""
        return self.mine.median / self.other.median


def layout(
    grid: Grid,
    reference: Side | None = None,
    *,
    has_memory: bool = False,
    simulated: bool = False,
) -> Layout[Result]:
    """The layout of a run; with a `reference` that of a comparison."""
    fields, samples = list(FIELDS), list(SAMPLES)
    columns = compared_columns(grid) if reference else plain_columns(grid, simulated)
    if reference:
        fields += COMPARED_FIELDS
        samples += COMPARED_SAMPLES
    if has_memory:
        n_sides = 2 if reference else 1
        fields += PEAK_FIELDS[:n_sides]
        columns += PEAK_COLUMNS[:n_sides]
    return Layout("llama_bench", fields, columns, samples, lambda: footer(reference, simulated))


def footer(reference: Side | None, simulated: bool = False) -> str:
    """What was measured; only a run tells the version of some references."""
    if simulated:
        return f"{MODELLED}\n{BUILD}"
    return f"{LEGEND}\n{BUILD}, llama.cpp: {reference.version}" if reference else BUILD


# ---------------------------------------------------------------- fields
# llama-bench's in its order; those that do not apply have the values it has for them
FIELDS: Sequence[Field[Result]] = (
    Field("build_commit", str, lambda r: __version__),
    Field("build_number", int, lambda r: 0),
    Field("cpu_info", str, lambda r: r.machine.cpu_info),
    Field("gpu_info", str, lambda r: r.machine.gpu_info),
    Field("backends", str, lambda r: r.machine.backends),
    Field("model_filename", str, lambda r: r.task.model),
    Field("model_type", str, lambda r: r.model.type),
    Field("model_size", int, lambda r: r.model.size),
    Field("model_n_params", int, lambda r: r.model.n_params),
    Field("n_batch", int, lambda r: r.task.n_batch),
    Field("n_ubatch", int, lambda r: r.task.n_ubatch),
    Field("n_threads", int, lambda r: r.task.n_threads),
    Field("cpu_mask", str, lambda r: r.task.mask),
    Field("cpu_strict", bool, lambda r: bool(r.task.cpu_strict)),
    Field("poll", int, lambda r: r.task.poll),
    Field("type_k", str, lambda r: r.task.type_k),
    Field("type_v", str, lambda r: r.task.type_v),
    Field("n_gpu_layers", int, lambda r: r.task.n_gpu_layers),
    Field("n_cpu_moe", int, lambda r: r.task.n_cpu_moe),
    Field("split_mode", str, lambda r: r.task.split_mode),
    Field("main_gpu", int, lambda r: r.task.main_gpu),
    Field("no_kv_offload", bool, lambda r: r.task.no_kv_offload),
    Field("flash_attn", int, lambda r: FLASH_ATTN_NUMBERS[r.task.flash_attn]),
    Field("devices", str, lambda r: r.task.devices),
    Field("tensor_split", str, lambda r: r.task.tensor_split),
    Field("tensor_buft_overrides", str, lambda r: r.task.overrides),
    Field("load_mode", str, lambda r: r.task.load_mode),
    Field("lazy_mode", str, lambda r: "auto"),
    Field("embeddings", bool, lambda r: False),
    Field("no_op_offload", int, lambda r: int(r.task.no_op_offload)),
    Field("no_host", bool, lambda r: r.task.no_host),
    Field("repack", bool, lambda r: r.task.repack),
    Field("fit_target", int, lambda r: 0),
    Field("fit_min_ctx", int, lambda r: 0),
    Field("n_prompt", int, lambda r: r.task.n_prompt),
    Field("n_gen", int, lambda r: r.task.n_gen),
    Field("n_depth", int, lambda r: r.task.n_depth),
    Field("test_time", str, lambda r: r.test_time),
    Field("avg_ns", int, lambda r: r.mine.mean_ns),
    Field("stddev_ns", int, lambda r: r.mine.deviation_ns),
    Field("avg_ts", float, lambda r: r.mine.mean),
    Field("stddev_ts", float, lambda r: r.mine.deviation),
)
SAMPLES: Sequence[Samples[Result]] = (
    Samples("samples_ns", lambda r: r.mine.samples_ns),
    Samples("samples_ts", lambda r: r.mine.rates),
)
COMPARED_FIELDS: Sequence[Field[Result]] = (
    Field("median_ts", float, lambda r: r.mine.median),
    Field("llama_cpp", str, lambda r: r.reference),
    Field("llama_cpp_avg_ts", float, lambda r: r.other.mean),
    Field("llama_cpp_stddev_ts", float, lambda r: r.other.deviation),
    Field("llama_cpp_median_ts", float, lambda r: r.other.median),
    Field("ratio", float, lambda r: r.ratio),
    Field("foreign", str, lambda r: foreign_text(r.rounds)),
    Field("n_disturbed", int, lambda r: n_disturbed(r.rounds)),
)
COMPARED_SAMPLES: Sequence[Samples[Result]] = (
    Samples("llama_cpp_samples_ns", lambda r: r.other.samples_ns),
    Samples("llama_cpp_samples_ts", lambda r: r.other.rates),
)
PEAK_FIELDS: Sequence[Field[Result]] = (
    Field("peak_rss", int, lambda r: r.peaks[0]),
    Field("llama_cpp_peak_rss", int, lambda r: r.peaks[1]),
)


# ---------------------------------------------------------------- columns
def _varied(field: str, title: str, width: int) -> Column[Result]:
    """A parameter of the task, shown where it is not at its default."""
    return Column(title, lambda r: _text(getattr(r.task, field)), width)


def _rate(summary: Summary) -> str:
    return f"{summary.mean:.2f} ± {summary.deviation:.2f}"


def _rate_and_median(summary: Summary) -> str:
    return f"{_rate(summary)} ({summary.median:.2f})"


MODEL: Column[Result] = Column("model", lambda r: r.model.type, 30, left=True)
SIZE: Column[Result] = Column("size", lambda r: _size(r.model.size), 10)
PARAMS: Column[Result] = Column("params", lambda r: _count(r.model.n_params), 10)
BACKEND: Column[Result] = Column("backend", lambda r: r.machine.backends, left=True)
THREADS: Column[Result] = Column("threads", lambda r: str(r.task.n_threads), 7)
TEST: Column[Result] = Column("test", lambda r: r.task.name, 15)
VARIED = {
    "n_batch": _varied("n_batch", "n_batch", 7),
    "n_ubatch": _varied("n_ubatch", "n_ubatch", 8),
    "type_k": _varied("type_k", "type_k", 6),
    "type_v": _varied("type_v", "type_v", 6),
    "flash_attn": Column("fa", lambda r: str(FLASH_ATTN_NUMBERS[r.task.flash_attn]), 3),
    "load_mode": _varied("load_mode", "lm", 10),
    "repack": _varied("repack", "rpk", 3),
    "n_gpu_layers": _varied("n_gpu_layers", "ngl", 3),
    "n_cpu_moe": _varied("n_cpu_moe", "n_cpu_moe", 0),
    "split_mode": _varied("split_mode", "sm", 6),
    "main_gpu": _varied("main_gpu", "main_gpu", 0),
    "devices": Column("dev", lambda r: r.task.devices, 12, left=True),
    "tensor_split": _varied("tensor_split", "ts", 0),
    "overrides": Column("ot", lambda r: short(r.task.overrides), SHOWN),
    "no_host": _varied("no_host", "noh", 4),
    "no_op_offload": _varied("no_op_offload", "nopo", 4),
    "no_kv_offload": _varied("no_kv_offload", "nkvo", 0),
    "cpu_mask": _varied("cpu_mask", "cpu_mask", 10),
    "cpu_range": _varied("cpu_range", "range", 7),
    "cpu_strict": _varied("cpu_strict", "strict", 6),
    "poll": _varied("poll", "poll", 4),
    "numa": _varied("numa", "numa", 10),
}
PEAK_COLUMNS: Sequence[Column[Result]] = (
    Column("peak memory", lambda r: _mebibytes(r.peaks[0]), 12),
    Column("llama.cpp's", lambda r: _mebibytes(r.peaks[1]), 12),
)
MODELLED = "the cards are simulated: times are modelled, not measured"
LEGEND = (
    "t/s: mean ± standard deviation (median); ratio: of the medians, above 1 pyggml is faster\n"
    "foreign: cores that other programs used in the worst round; *: above "
    f"{MAX_FOREIGN} although the round was repeated"
)


def plain_columns(grid: Grid, simulated: bool = False) -> list[Column[Result]]:
    """llama-bench's."""
    own = [VARIED[name] for name in varied(grid)]
    title = "modelled t/s" if simulated else "t/s"
    rate: Column[Result] = Column(title, lambda r: _rate(r.mine), 20)
    return [MODEL, SIZE, PARAMS, BACKEND, THREADS, *own, TEST, rate]


def compared_columns(grid: Grid) -> list[Column[Result]]:
    """Both sides, their ratio, and how quiet the machine was."""
    own = [VARIED[name] for name in varied(grid)]
    mine: Column[Result] = Column("pyggml t/s", lambda r: _rate_and_median(r.mine), 26)
    other: Column[Result] = Column("llama.cpp t/s", lambda r: _rate_and_median(r.other), 26)
    ratio: Column[Result] = Column("ratio", lambda r: f"{r.ratio:.2f}", 6)
    foreign: Column[Result] = Column("foreign", lambda r: foreign_text(r.rounds), 7)
    return [MODEL, SIZE, THREADS, *own, TEST, mine, other, ratio, foreign]


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 10**9 else f"{n / 1e9:.2f} B"


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
