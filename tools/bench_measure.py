"""How a test is measured: sides that take turns, and what else ran on the machine meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml.errors import UserError
from pyggml.tools.bench_tasks import Task

IntArray = npt.NDArray[np.int32]
State = TypeVar("State")

MAX_FOREIGN = 0.05  # cores that other programs may use in a round
# /proc/stat counts clock ticks: one more or less says nothing
TICKS = 1
ATTEMPTS = 4  # of a disturbed round
QUIET_WINDOW = 0.25  # seconds without other programs before a disturbed round is repeated
QUIET_TIMEOUT = 5.0  # seconds to wait for that

# seconds: longer than the scheduler keeps a spinning thread waiting
IDLE_WINDOW = 0.03
IDLE_SHARE = 0.02  # of a core
IDLE_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What random tokens are drawn from."""

    n_tokens: int
    bos: int | None  # None: prompts do not begin with one


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens of one repetition; prompts in batches, as they are decoded."""

    depth: tuple[IntArray, ...]
    prompt: tuple[IntArray, ...]
    gen: tuple[int, ...]


class Side(Protocol):
    """Something that can do a task's work: pyggml, or what it is compared with."""

    name: str
    version: str

    def open(self, task: Task) -> None:
        """Load the model if its parameters changed, and make a context."""

    def vocabulary(self) -> Vocabulary: ...

    def warm_up(self, work: Work) -> None:
        """Do the work once, untimed, with one generated token."""

    def prepare(self, work: Work) -> None:
        """Empty the memory, or bring it to the task's depth."""

    def run(self, work: Work) -> int:
        """Do the work; nanoseconds."""

    def close(self) -> None: ...


class DecodingSide(ABC, Generic[State]):
    """A side that decodes in this process: what is done in what order, and what of it is timed."""

    _at_depth: State | None = None  # what the memory holds at the task's depth

    def warm_up(self, work: Work) -> None:
        self._clear()
        with self._placed():
            self._decode_batches(work.prompt)
            self._generate(work.gen[:1])
        self._clear()

    def prepare(self, work: Work) -> None:
        self._clear()
        if not work.depth:
            return
        if self._at_depth is None:
            with self._placed():
                self._decode_batches(work.depth)
            self._at_depth = self._state()
        else:
            self._restore(self._at_depth, work)

    def run(self, work: Work) -> int:
        with self._placed():
            start = time.perf_counter_ns()
            self._decode_batches(work.prompt)
            self._generate(work.gen)
            return time.perf_counter_ns() - start

    def _placed(self) -> AbstractContextManager[None]:
        """Inside, the calling thread is where the task wants it."""
        return nullcontext()

    @abstractmethod
    def _clear(self) -> None:
        """Empty the memory."""

    @abstractmethod
    def _decode_batches(self, batches: tuple[IntArray, ...]) -> None:
        """Prompts."""

    @abstractmethod
    def _generate(self, tokens: tuple[int, ...]) -> None:
        """One token after the other."""

    @abstractmethod
    def _state(self) -> State:
        """What the memory holds."""

    @abstractmethod
    def _restore(self, state: State, work: Work) -> None:
        """Let the memory hold that again, which is the depth of `work`."""


def random_work(task: Task, vocabulary: Vocabulary, seed: int) -> Work:
    """Random tokens, prompts and generations beginning with BOS where the model wants it."""
    random = np.random.default_rng(seed)

    def tokens(n: int) -> IntArray:
        ids = random.integers(0, vocabulary.n_tokens, n, np.int32)
        if vocabulary.bos is not None:
            ids[:1] = vocabulary.bos
        return ids

    def batches(n: int) -> tuple[IntArray, ...]:
        ids = tokens(n)
        return tuple(ids[i : i + task.n_batch] for i in range(0, n, task.n_batch))

    return Work(batches(task.n_depth), batches(task.n_prompt), tuple(map(int, tokens(task.n_gen))))


# ---------------------------------------------------------------- samples
@dataclass(frozen=True, slots=True)
class Sample:
    """One side's part of a round."""

    ns: int
    wall: float  # seconds around it
    foreign: float | None  # cores that other programs used meanwhile; None: unknown here

    @property
    def disturbed(self) -> bool:
        """Whether other programs took more than the clock's ticks can hide."""
        if self.foreign is None:
            return False
        return self.foreign > MAX_FOREIGN + TICKS * _tick() / self.wall


Round = tuple[Sample, ...]  # one per side


@dataclass(frozen=True, slots=True)
class Summary:
    """Tokens per second of one side."""

    samples_ns: tuple[int, ...]
    n_tokens: int

    @property
    def rates(self) -> list[float]:
        return [1e9 * self.n_tokens / ns for ns in self.samples_ns]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        return deviation(self.rates)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def mean_ns(self) -> int:
        return sum(self.samples_ns) // len(self.samples_ns)

    @property
    def deviation_ns(self) -> int:
        return int(deviation(self.samples_ns))


def deviation(values: Sequence[float]) -> float:
    """Of the sample (n - 1); 0 of a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def summaries(rounds: Sequence[Round], n_tokens: int) -> list[Summary]:
    """One per side."""
    return [Summary(tuple(s.ns for s in side), n_tokens) for side in zip(*rounds, strict=True)]


def foreign_load(rounds: Sequence[Round]) -> float | None:
    """The highest foreign load of any sample."""
    loads = [s.foreign for samples in rounds for s in samples if s.foreign is not None]
    return max(loads, default=None)


def n_disturbed(rounds: Sequence[Round]) -> int:
    """Rounds that stayed disturbed although they were repeated."""
    return sum(any(s.disturbed for s in samples) for samples in rounds)


def foreign_text(rounds: Sequence[Round]) -> str:
    """The highest foreign load, marked if it stayed too high."""
    load = foreign_load(rounds)
    if load is None:
        return "n/a"
    return f"{load:.2f}{'*' if n_disturbed(rounds) else ''}"


# ---------------------------------------------------------------- rounds
def take_turns(sides: Sequence[Side], work: Work) -> Round:
    """Each side does the work, while the others sleep."""
    samples = []
    for side in sides:
        side.prepare(work)
        samples.append(timed(partial(side.run, work)))
    return tuple(samples)


def wait_until_quiet() -> None:
    """Return when other programs rest, or after QUIET_TIMEOUT."""
    deadline = time.perf_counter() + QUIET_TIMEOUT
    while time.perf_counter() < deadline and timed(_rest).disturbed:
        pass


def _rest() -> int:
    time.sleep(QUIET_WINDOW)
    return 0


def quiet_round(
    take: Callable[[], Round], attempts: int, wait: Callable[[], None] = wait_until_quiet
) -> Round:
    """The first undisturbed round, else of `attempts` rounds the least disturbed one."""
    kept = take()
    for _ in range(attempts - 1):
        if not _any_disturbed(kept):
            break
        wait()
        kept = min(kept, take(), key=_load)
    return kept


def _any_disturbed(samples: Round) -> bool:
    return any(s.disturbed for s in samples)


def _load(samples: Round) -> float:
    return max(s.foreign or 0.0 for s in samples)


def timed(run: Callable[[], int]) -> Sample:
    """Run something that tells its nanoseconds, beside the foreign load meanwhile."""
    settle()
    busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
    ns = run()
    wall = time.perf_counter() - start
    own, after = own_seconds() - own, busy_seconds()
    if busy is None or after is None:
        return Sample(ns, wall, None)
    return Sample(ns, wall, max(0.0, after - busy - own) / wall)


def settle() -> None:
    """Wait until no thread of this process is busy: pools spin for a while after their work.

    OpenMP's, which llama.cpp uses, do so for about 10 ms. Raises UserError if they never end.
    """
    deadline = time.perf_counter() + IDLE_TIMEOUT
    while time.perf_counter() < deadline:
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(IDLE_WINDOW)
        used = time.process_time() - cpu
        if used < IDLE_SHARE * (time.perf_counter() - wall):
            return
    raise UserError(
        "threads of this process stay busy although they have no work, so nothing can be measured\n"
        "unset OMP_WAIT_POLICY, GOMP_SPINCOUNT and KMP_BLOCKTIME"
    )


# ---------------------------------------------------------------- clocks
def _tick() -> float:
    return 1.0 / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float | None:
    """CPU seconds that this process's cores have worked (or were stolen from this machine).

    None where there is no /proc/stat.
    """
    try:
        with open("/proc/stat") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    cores = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    ticks = 0
    for line in lines:
        name, *counters = line.split()
        if name in cores:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, counters[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks * _tick()


def own_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system
