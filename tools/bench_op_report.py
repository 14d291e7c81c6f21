"""How single operations look: times, rates, and the shares of what the machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pyggml.threads import POLL, ThreadParams, listed
from pyggml.tools.bench_measure import MAX_FOREIGN, deviation, foreign_text, n_disturbed
from pyggml.tools.bench_op import CACHE_SHARE, DECODE_COLUMNS, OpResult
from pyggml.tools.bench_output import BUILD, Column, Field, Layout, Samples
from pyggml.version import __version__

LEGEND = (
    "us: median ± standard deviation (best) of an operation and the quantization before it\n"
    "GB/s: bytes that the weights have in a file; up to "
    f"{DECODE_COLUMNS} columns, copies of the matrix that fill {CACHE_SHARE} times the last cache\n"
    "read, fma, dot: the best of this run's rounds with the same threads: GB/s of a plain read,\n"
    "GFLOP/s of f32 multiply-adds, and G operations per second of int8 dot products\n"
    f"foreign: cores that other programs used in the worst round; *: above {MAX_FOREIGN}"
)


def layout() -> Layout[OpResult]:
    """Fields and columns of --op."""
    return Layout("pyllama_op", FIELDS, COLUMNS, SAMPLES, lambda: f"{LEGEND}\n{BUILD}")


def median_us(result: OpResult) -> float:
    """Microseconds of one operation."""
    return statistics.median(result.samples_us)


def bandwidth(result: OpResult) -> float:
    """GB/s of weights."""
    return result.weight_bytes / median_us(result) / 1e3


def speed(result: OpResult) -> float:
    """GFLOP/s, counting operations on integers alike."""
    return result.task.operations / median_us(result) / 1e3


def shares(result: OpResult) -> tuple[float, float, float]:
    """Percent of reading, of float and of int8 arithmetic."""
    rates = bandwidth(result), speed(result), speed(result)
    read, fma, dot = (100 * rate / result.peak(i) for i, rate in enumerate(rates))
    return read, fma, dot


def _time(result: OpResult) -> str:
    best = min(result.samples_us)
    return f"{median_us(result):.1f} ± {deviation(result.samples_us):.1f} ({best:.1f})"


def threads_text(threads: ThreadParams) -> str:
    """How many, and what is not at its default: "2 on 0-1 strict poll 0"."""
    parts = [str(threads.n_threads)]
    parts += [f"on {listed(threads.cpus)}"] if threads.cpus else []
    parts += ["strict"] if threads.strict else []
    parts += [f"poll {threads.poll}"] if threads.poll != POLL else []
    return " ".join(parts)


def _layout_name(result: OpResult) -> str:
    return "panels" if result.repacked else "rows"


FIELDS: Sequence[Field[OpResult]] = (
    Field("build_commit", str, lambda r: __version__),
    Field("op", str, lambda r: r.task.op),
    Field("type", str, lambda r: r.task.type.label),
    Field("rows", int, lambda r: r.task.rows),
    Field("k", int, lambda r: r.task.k),
    Field("columns", int, lambda r: r.task.columns),
    Field("n_experts", int, lambda r: r.task.n_experts),
    Field("n_used", int, lambda r: r.task.n_used),
    Field("layout", str, _layout_name),
    Field("n_copies", int, lambda r: r.n_copies),
    Field("n_threads", int, lambda r: r.task.threads.n_threads),
    Field("threads", str, lambda r: threads_text(r.task.threads)),
    Field("median_us", float, median_us),
    Field("stddev_us", float, lambda r: deviation(r.samples_us)),
    Field("best_us", float, lambda r: min(r.samples_us)),
    Field("gb_s", float, bandwidth),
    Field("gflop_s", float, speed),
    Field("read_gb_s", float, lambda r: r.peak(0)),
    Field("fma_gflop_s", float, lambda r: r.peak(1)),
    Field("dot_gop_s", float, lambda r: r.peak(2)),
    Field("read_percent", float, lambda r: shares(r)[0]),
    Field("fma_percent", float, lambda r: shares(r)[1]),
    Field("dot_percent", float, lambda r: shares(r)[2]),
    Field("foreign", str, lambda r: foreign_text(r.rounds)),
    Field("n_disturbed", int, lambda r: n_disturbed(r.rounds)),
)
SAMPLES: Sequence[Samples[OpResult]] = (Samples("samples_us", lambda r: r.samples_us),)


def _peak(title: str, which: int) -> Column[OpResult]:
    """A peak, and the share of it."""
    return Column(title, lambda r: f"{r.peak(which):.0f} ({shares(r)[which]:.0f}%)", 12)


COLUMNS: Sequence[Column[OpResult]] = (
    Column("op", lambda r: f"{r.task.op} {r.task.experts}".strip(), 14, left=True),
    Column("type", lambda r: r.task.type.label, 6, left=True),
    Column("MxKxN", lambda r: r.task.shape, 16),
    Column("layout", _layout_name, 6, left=True),
    Column("threads", lambda r: threads_text(r.task.threads), 7),
    Column("us", _time, 26),
    Column("GB/s", lambda r: f"{bandwidth(r):.1f}", 6),
    Column("GFLOP/s", lambda r: f"{speed(r):.0f}", 7),
    _peak("read", 0),
    _peak("fma", 1),
    _peak("dot", 2),
    Column("foreign", lambda r: foreign_text(r.rounds), 7),
)
