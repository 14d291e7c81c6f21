"""What pyggml can be compared with: chosen by name, or by the path of a llama-bench binary."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pyggml.errors import UserError
from pyggml.llama.context_params import CACHE_TYPES
from pyggml.threads import POLL
from pyggml.tools.bench_llama_cpp import NUMA, LlamaCppSide
from pyggml.tools.bench_measure import Side, Vocabulary, Work
from pyggml.tools.bench_tasks import FLASH_ATTN_NUMBERS, Task

PACKAGES = {"llama_cpp": "llama-cpp-python", "xllamacpp": "xllamacpp"}


def make_reference(choice: str, *, verbose: bool = False) -> Side:
    """The side that --vs-llama-cpp names."""
    if choice not in ("auto", *PACKAGES):
        return LlamaBenchSide(choice)
    for name in PACKAGES if choice == "auto" else (choice,):
        module = _import(name)
        if module is not None:
            return LlamaCppSide(module, verbose=verbose) if name == "llama_cpp" else ServerSide()
    wanted = " or ".join(PACKAGES.values()) if choice == "auto" else PACKAGES[choice]
    raise UserError(
        f"--vs-llama-cpp {choice}: {wanted} is not installed: pip install llama-cpp-python, "
        "or give the path of a llama-bench binary"
    )


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


# ---------------------------------------------------------------- a binary
class LlamaBenchSide:
    """A llama-bench binary: a process per repetition, which loads the model and warms up itself."""

    name = "llama.cpp"

    def __init__(self, path: str) -> None:
        self.path = path
        if not Path(path).is_file():
            raise UserError(
                f"--vs-llama-cpp {path}: neither {', '.join(('auto', *PACKAGES))} nor a file"
            )
        self.version = "llama-bench"
        self._task: Task | None = None

    def open(self, task: Task) -> None:
        self._task = task

    def vocabulary(self) -> Vocabulary:
        raise AssertionError("llama-bench draws its own tokens")

    def warm_up(self, work: Work) -> None:
        pass

    def prepare(self, work: Work) -> None:
        pass

    def run(self, work: Work) -> int:
        assert self._task is not None
        record = run_llama_bench(self.command(self._task))
        self.version = f"llama-bench {record.get('build_commit')} ({record.get('build_number')})"
        return int(record["samples_ns"][0])

    def command(self, task: Task) -> list[str]:
        """One repetition; defaults are left out, since older binaries spell some otherwise."""
        options: list[tuple[str, object, object]] = [
            ("-b", task.n_batch, 2048),
            ("-ub", task.n_ubatch, 512),
            ("-ctk", task.type_k, "f16"),
            ("-ctv", task.type_v, "f16"),
            ("-fa", task.flash_attn, "auto"),
            ("-lm", task.load_mode, "auto"),
            ("--repack", int(task.repack), 1),
            ("-d", task.n_depth, 0),
            ("-C", task.mask, "0x0"),
            ("--cpu-strict", task.cpu_strict, 0),
            ("--poll", task.poll, POLL),
            ("--numa", task.numa, ""),
        ]
        work = ["-p", "0", "-n", "0", "-pg", f"{task.n_prompt},{task.n_gen}"]
        if not task.n_prompt or not task.n_gen:
            work = ["-p", str(task.n_prompt), "-n", str(task.n_gen)]
        given = [text for flag, v, default in options if v != default for text in (flag, str(v))]
        fixed = ["-m", task.model, "-t", str(task.n_threads), "-r", "1", "-o", "jsonl"]
        return [self.path, *fixed, *work, *given]

    def close(self) -> None:
        pass


def run_llama_bench(command: Sequence[str]) -> dict[str, Any]:
    """Run one test; its record."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be started ({error.strerror})") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        last = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
        raise UserError(f"{' '.join(command)}: failed with {done.returncode}: {last}")
    record: dict[str, Any] = json.loads(lines[0])
    if not record.get("samples_ns"):
        raise UserError(f"{command[0]}: its output has no samples_ns; is it llama-bench?")
    return record


# ---------------------------------------------------------------- a server
class ServerSide:
    """xllamacpp's server: a rough check, since it also samples and keeps books.

    Prompts and generations are timed by the server itself.
    """

    name = "llama.cpp"

    def __init__(self) -> None:
        import xllamacpp

        self._lib: Any = xllamacpp
        self.version = f"xllamacpp {xllamacpp.__version__} (rough)"
        self._server: Any = None

    def open(self, task: Task) -> None:
        if task.n_depth:
            raise UserError("--vs-llama-cpp xllamacpp cannot measure at a depth: leave -d away")
        params = self._lib.CommonParams()
        params.model.path = task.model
        # the server wants a cell for the token after the last
        params.n_ctx = task.n_ctx + 2
        params.n_batch, params.n_ubatch, params.n_parallel = task.n_batch, task.n_ubatch, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.n_threads
        for cpu in (params.cpuparams, params.cpuparams_batch):
            cpu.poll, cpu.strict_cpu = task.poll, bool(task.cpu_strict)
            if task.cpu.cpus:
                cpu.cpumask = [i in task.cpu.cpus for i in range(len(cpu.cpumask))]
                cpu.mask_valid = True
        params.numa = self._lib.ggml_numa_strategy(NUMA[task.numa])
        params.cache_type_k = self._lib.ggml_type(int(CACHE_TYPES[task.type_k]))
        params.cache_type_v = self._lib.ggml_type(int(CACHE_TYPES[task.type_v]))
        params.flash_attn_type = self._lib.llama_flash_attn_type(
            FLASH_ATTN_NUMBERS[task.flash_attn]
        )
        params.no_extra_bufts = not task.repack
        params.fit_params = False
        params.n_gpu_layers, params.verbosity = 0, 0
        self._server = self._lib.Server(params)

    def vocabulary(self) -> Vocabulary:
        raise AssertionError("the server is never the first side")

    def warm_up(self, work: Work) -> None:
        self._complete(work, min(1, len(work.gen)))

    def prepare(self, work: Work) -> None:
        pass

    def run(self, work: Work) -> int:
        timings = self._complete(work, len(work.gen))
        prompt_ms = timings["prompt_ms"] if work.prompt else 0.0
        # the first token comes out of the prompt
        predicted_ms = timings["predicted_ms"] if work.gen else 0.0
        return int(1e6 * (prompt_ms + predicted_ms))

    def _complete(self, work: Work, n_gen: int) -> dict[str, float]:
        prompt = [int(token) for tokens in work.prompt for token in tokens]
        answer = self._server.handle_completions(
            {
                "prompt": prompt or [work.gen[0]],
                "n_predict": n_gen + 1,
                "cache_prompt": False,
                "ignore_eos": True,
                "temperature": 0.0,
                "samplers": ["temperature"],
            }
        )
        if "timings" not in answer:
            raise UserError(f"xllamacpp: {json.dumps(answer)[:200]}")
        timings: dict[str, float] = answer["timings"]
        return timings

    def close(self) -> None:
        self._server = None
