"""Seconds from starting a command to its first token, beside llama.cpp's from Python."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyggml.errors import UserError
from pyggml.tools.bench_measure import Round, foreign_text, quiet_round, timed
from pyggml.tools.bench_output import BUILD, Column, Field, Layout, Samples
from pyggml.version import __version__

PROMPT = "hi"
# What llama-completion does by default: the model's whole context, and a warm-up run.
ONE_LINER = (
    "import sys; from llama_cpp import Llama; "
    "llm = Llama(sys.argv[1], n_ctx=0, n_threads=int(sys.argv[2]), verbose=False); "
    "llm.eval([llm.token_bos()]); llm.reset(); "
    f"print(next(llm({PROMPT!r}, max_tokens=1, temperature=0, stream=True))"
    "['choices'][0]['text'], flush=True)"
)
MINE = f"pyllama-cli -m FILE -t N -p {PROMPT} -n 1"
OTHER = f'python -c "{ONE_LINER}" FILE N'


@dataclass(frozen=True, slots=True)
class Startup:
    """The result for one model and number of threads."""

    model: str
    n_threads: int
    rounds: Sequence[Round]

    def seconds(self, side: int) -> list[float]:
        return [samples[side].ns / 1e9 for samples in self.rounds]

    def median(self, side: int) -> float:
        return statistics.median(self.seconds(side))

    @property
    def ratio(self) -> float:
        """Above 1 pyggml is faster."""
        return self.median(1) / self.median(0)

    @property
    def foreign(self) -> str:
        return foreign_text(self.rounds)


def commands(model: str, n_threads: int, *, compare: bool) -> list[list[str]]:
    """One command per side."""
    if compare and importlib.util.find_spec("llama_cpp") is None:
        raise UserError(
            "--startup --vs-llama-cpp starts llama-cpp-python, which is not installed: "
            "pip install llama-cpp-python"
        )
    script = Path(sys.executable).with_name("pyllama-cli")
    start = [str(script)] if script.exists() else [sys.executable, "-m", "pyggml", "cli"]
    # --no-display-prompt: the first byte on stdout is the token's
    options = ["--no-display-prompt", "-no-cnv", "--temp", "0", "-t", str(n_threads)]
    mine = [*start, "-m", model, "-p", PROMPT, "-n", "1", *options]
    return [mine, [sys.executable, "-c", ONE_LINER, model, str(n_threads)]][: 1 + compare]


def first_byte(command: Sequence[str]) -> int:
    """Nanoseconds from starting a process to the first byte it prints; waits for its end."""
    start = time.perf_counter_ns()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    taken = time.perf_counter_ns() - start
    _, errors = process.communicate()
    if process.returncode or not first:
        said = errors.decode(errors="replace").strip()
        raise UserError(f"{' '.join(command)}: failed with {process.returncode}: {said}")
    return taken


def measure(
    model: str, n_threads: int, repetitions: int, attempts: int, *, compare: bool
) -> Startup:
    """Let both sides start in turns, after one start that counts for nothing."""
    sides = commands(model, n_threads, compare=compare)
    for command in sides:
        first_byte(command)

    def take() -> Round:
        return tuple(timed(partial(first_byte, command)) for command in sides)

    rounds = [quiet_round(take, attempts) for _ in range(repetitions)]
    return Startup(model, n_threads, rounds)


# ---------------------------------------------------------------- how it looks
def layout(*, compare: bool) -> Layout[Startup]:
    """Fields and columns; with `compare` those of both sides."""
    n_sides = 1 + compare
    fields = [*FIELDS, *SIDE_FIELDS[: 3 * n_sides]]
    columns = [*COLUMNS, *SIDE_COLUMNS[:n_sides]]
    samples = SAMPLES[:n_sides]
    footer = [f"seconds to the first token, median (fastest to slowest): {MINE}"]
    if compare:
        fields += COMPARED_FIELDS
        columns += COMPARED_COLUMNS
        footer.append(f"llama.cpp: {OTHER}")
    footer.append(BUILD)
    return Layout("pyllama_startup", fields, columns, samples, lambda: "\n".join(footer))


def _range(result: Startup, side: int) -> str:
    seconds = result.seconds(side)
    return f"{result.median(side):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


FIELDS: Sequence[Field[Startup]] = (
    Field("build_commit", str, lambda r: __version__),
    Field("model_filename", str, lambda r: r.model),
    Field("n_threads", int, lambda r: r.n_threads),
)
SIDE_FIELDS: Sequence[Field[Startup]] = (
    Field("median_s", float, lambda r: r.median(0)),
    Field("min_s", float, lambda r: min(r.seconds(0))),
    Field("max_s", float, lambda r: max(r.seconds(0))),
    Field("llama_cpp_median_s", float, lambda r: r.median(1)),
    Field("llama_cpp_min_s", float, lambda r: min(r.seconds(1))),
    Field("llama_cpp_max_s", float, lambda r: max(r.seconds(1))),
)
COMPARED_FIELDS: Sequence[Field[Startup]] = (
    Field("ratio", float, lambda r: r.ratio),
    Field("foreign", str, lambda r: r.foreign),
)
SAMPLES: Sequence[Samples[Startup]] = (
    Samples("samples_s", lambda r: r.seconds(0)),
    Samples("llama_cpp_samples_s", lambda r: r.seconds(1)),
)
COLUMNS: Sequence[Column[Startup]] = (
    Column("model", lambda r: Path(r.model).stem, 34, left=True),
    Column("threads", lambda r: str(r.n_threads), 7),
)
SIDE_COLUMNS: Sequence[Column[Startup]] = (
    Column("pyggml s", lambda r: _range(r, 0), 20),
    Column("llama.cpp s", lambda r: _range(r, 1), 20),
)
COMPARED_COLUMNS: Sequence[Column[Startup]] = (
    Column("ratio", lambda r: f"{r.ratio:.2f}", 6),
    Column("foreign", lambda r: r.foreign, 7),
)
