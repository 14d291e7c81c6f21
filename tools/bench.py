"""pyllama-bench: tokens per second, alone or beside llama.cpp."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any, TypeVar

from pyggml import registry
from pyggml.backend import Device, DeviceType
from pyggml.errors import ConfigError, UserError
from pyggml.threads import set_own_priority
from pyggml.tools import bench_memory, bench_startup, logs
from pyggml.tools.bench_measure import (
    ATTEMPTS,
    Round,
    Side,
    quiet_round,
    random_work,
    take_turns,
)
from pyggml.tools.bench_modes import MODELS, STARTUP
from pyggml.tools.bench_output import Layout, make_format
from pyggml.tools.bench_pyggml import PyggmlSide
from pyggml.tools.bench_references import make_reference
from pyggml.tools.bench_report import Machine, ModelInfo, Result, layout
from pyggml.tools.bench_tasks import OFFLOAD, PLACEMENT, Task, parse_grid, tasks, thread_params
from pyggml.tools.cli import list_devices
from pyggml.tools.simulated import simulated_cards
from pyggml.tools.ui import Screen, compiling_shown

PLACED = tuple(parameter.field for parameter in (*PLACEMENT, *OFFLOAD))
R = TypeVar("R")
Outputs = Sequence[tuple[str, IO[str]]]  # names of formats, and where they write


@dataclass(frozen=True, slots=True)
class Options:
    """How tests are run."""

    repetitions: int = 5
    delay: int = 0
    warm_up: bool = True
    reference: str = ""  # what --vs-llama-cpp names
    memory: bool = False
    verbose: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError(f"-r {self.repetitions}: it must be at least 1")
        if self.delay < 0:
            raise ConfigError(f"--delay {self.delay}: it cannot be negative")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Options:
        return Options(
            repetitions=values.get("repetitions", 5),
            delay=values.get("delay", 0),
            warm_up=not values.get("no_warmup", False),
            reference=values.get("reference", ""),
            memory=values.get("memory", False),
            verbose=values.get("verbose", False),
            progress=values.get("progress", False),
        )

    @property
    def attempts(self) -> int:
        """Only a comparison repeats rounds that other programs disturbed: llama-bench does not."""
        return ATTEMPTS if self.reference else 1

    @property
    def side_names(self) -> list[str]:
        return [bench_memory.PYGGML, *([self.reference] if self.reference else [])]


def run(values: Mapping[str, Any]) -> None:
    """Do what the flags ask."""
    # as llama-bench: nothing below an error unless -v
    logs.set_up({"verbosity": 1, **values})
    if values.get("list_devices"):
        list_devices(values)
        return
    options = Options.of(values)
    outputs = _outputs(values)
    screen = Screen()
    set_priority(int(values.get("prio", "0")))
    with compiling_shown(screen):
        if values.get("op"):
            _run_op(values, options, outputs)
        elif values.get("startup"):
            _run_startup(values, options, outputs)
        else:
            _run_models(values, options, outputs, screen)


def _run_startup(values: Mapping[str, Any], options: Options, outputs: Outputs) -> None:
    """What --startup asks for."""
    STARTUP.check(values)
    grid = parse_grid(values)
    compare = bool(options.reference)
    places = [(model, n) for model in grid["model"] for n in grid["n_threads"]]
    emit(bench_startup.layout(compare=compare), _startups(places, options), outputs)


def _run_models(
    values: Mapping[str, Any], options: Options, outputs: Outputs, screen: Screen
) -> None:
    """Prompts and generation, on one side or on two."""
    MODELS.check(values)
    grid = parse_grid(values)
    simulation = simulated_cards(values)
    for given, flag in ((options.reference, "--vs-llama-cpp"), (options.memory, "--memory")):
        if given and simulation is not None:
            raise ConfigError(f"{flag} measures: leave --sim-device away")
    if options.reference and any(field in values for field in PLACED):
        raise ConfigError("--vs-llama-cpp compares CPUs: leave -ngl, -ot and their kin away")
    with ExitStack() as stack:
        sides: list[Side] = [PyggmlSide(simulation)]
        if options.reference:
            sides.append(make_reference(options.reference, verbose=options.verbose))
        for side in sides:
            stack.callback(side.close)
        reference = sides[1] if options.reference else None
        simulated = simulation is not None
        look = layout(grid, reference, has_memory=options.memory, simulated=simulated)
        machine = this_machine(simulation.devices if simulation else registry.devices())
        emit(look, results(tasks(grid), sides, options, machine, screen.say), outputs)


def _run_op(values: Mapping[str, Any], options: Options, outputs: Outputs) -> None:
    """What --op asks for."""
    # here, not above: these modules know the CPU backend
    from pyggml.tools import bench_op, bench_op_report

    todo = bench_op.op_tasks(values, thread_params(values))
    bench_op.cpu_device().use_numa(values.get("numa", ""))
    found = bench_op.op_results(todo, options.repetitions, warm_up=options.warm_up)
    emit(bench_op_report.layout(), found, outputs)


def set_priority(level: int) -> None:
    """As llama.cpp: a nice value for the process; its threads inherit it."""
    try:
        set_own_priority(level)
    except OSError as error:
        raise UserError(
            f"--prio {level}: the system refuses ({error.strerror}); "
            "a higher priority needs root or CAP_SYS_NICE"
        ) from None


# ---------------------------------------------------------------- tests
def results(
    todo: Sequence[Task],
    sides: Sequence[Side],
    options: Options,
    machine: Machine,
    say: Callable[[str], None],
) -> Iterator[Result]:
    """One after the other, as they are measured. The first side must be pyggml's."""
    mine = sides[0]
    assert isinstance(mine, PyggmlSide)
    # before this process holds models, whose pages a child would begin with
    peaks = {}
    if options.memory:
        peaks = {t: [bench_memory.peak(name, t) for name in options.side_names] for t in todo}
    if not options.warm_up:
        for device in registry.devices():
            device.compile_kernels()
    for i, task in enumerate(todo):
        label = f"pyllama-bench: benchmark {i + 1}/{len(todo)}"
        tell = _teller(say, label) if options.progress else _silent
        test_time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tell(f"starting {task.name}")
        rounds = measure(task, sides, options, tell)
        model = ModelInfo(mine.model.description, mine.model.nbytes, mine.model.n_params)
        reference = sides[1].version if len(sides) > 1 else ""
        yield Result(task, model, machine, test_time, rounds, reference, peaks.get(task, ()))


def measure(
    task: Task, sides: Sequence[Side], options: Options, tell: Callable[[str], None]
) -> list[Round]:
    """All repetitions; the sides take turns in each, with the same tokens."""
    for side in sides:
        side.open(task)
    vocabulary = sides[0].vocabulary()
    if options.delay:
        time.sleep(options.delay)
    if options.warm_up:
        tell("warm-up run")
        for side in sides:
            side.warm_up(random_work(task, vocabulary, seed=0))
    rounds = []
    for i in range(options.repetitions):
        tell(f"run {i + 1}/{options.repetitions}")
        work = random_work(task, vocabulary, seed=1 + i)
        rounds.append(quiet_round(partial(take_turns, sides, work), options.attempts))
    return rounds


def _teller(say: Callable[[str], None], label: str) -> Callable[[str], None]:
    return lambda text: say(f"{label}: {text}")


def _silent(text: str) -> None:
    pass


def this_machine(devices: Sequence[Device]) -> Machine:
    """The devices as llama-bench names them."""
    cpus = [d.description for d in devices if d.type in (DeviceType.CPU, DeviceType.ACCEL)]
    gpus = [d.description for d in devices if d.type in (DeviceType.GPU, DeviceType.IGPU)]
    names = [re.sub(r"\d+$", "", d.name) for d in devices if d.type != DeviceType.CPU]
    backends = ",".join(dict.fromkeys(names)) or "CPU"
    return Machine(", ".join(cpus), ", ".join(gpus), backends)


def _startups(
    places: Sequence[tuple[str, int]], options: Options
) -> Iterator[bench_startup.Startup]:
    for model, n_threads in places:
        yield bench_startup.measure(
            model,
            n_threads,
            options.repetitions,
            options.attempts,
            compare=bool(options.reference),
        )


# ---------------------------------------------------------------- output
def _outputs(values: Mapping[str, Any]) -> Outputs:
    chosen = ((values.get("output", "md"), sys.stdout), (values.get("output_err"), sys.stderr))
    return [(name, stream) for name, stream in chosen if name and name != "none"]


def emit(look: Layout[R], found: Iterable[R], outputs: Outputs) -> None:
    """Write each result as soon as it is there."""
    writers = [(make_format(name, look), stream) for name, stream in outputs]
    for writer, stream in writers:
        print(writer.header(), end="", file=stream, flush=True)
    for result in found:
        for writer, stream in writers:
            print(writer.record(result), end="", file=stream, flush=True)
    for writer, stream in writers:
        print(writer.footer(), end="", file=stream, flush=True)
