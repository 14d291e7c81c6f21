"""How the threads of a graph run: how many, on which CPUs, how urgent, how long they wait awake."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyggml.errors import ConfigError

Cpus = frozenset[int]

POLL = 50
# nice values of llama.cpp's priorities low, medium, high, realtime; 0 keeps what is
NICE: Mapping[int, int] = {-1: 5, 1: -5, 2: -10, 3: -20}
PRIORITIES, POLLS = (-1, 3), (0, 100)  # lowest and highest
MASK_DIGITS = 128  # 512 CPUs, as in llama.cpp


@dataclass(frozen=True, slots=True)
class ThreadParams:
    """Of the graphs that run next (ggml_threadpool_params); raises ConfigError."""

    n_threads: int  # the caller included
    cpus: Cpus | None = None  # None: wherever the process may run
    strict: bool = False  # one CPU for each thread, in ascending order
    priority: int = 0  # -1 low, 0 as it is, 1 medium, 2 high, 3 realtime
    poll: int = POLL  # 0 sleeps as soon as there is no work, 100 waits awake for longest

    def __post_init__(self) -> None:
        check_range("priority", self.priority, PRIORITIES)
        check_range("poll", self.poll, POLLS)
        if self.n_threads < 1:
            raise ConfigError(f"n_threads {self.n_threads}: at least one thread must run")
        if self.cpus is not None and not self.cpus:
            raise ConfigError("a set of CPUs for threads is empty: name at least one")


def check_range(name: str, value: int, bounds: tuple[int, int]) -> None:
    """Raises ConfigError if a number is not within bounds."""
    low, high = bounds
    if not low <= value <= high:
        raise ConfigError(f"{name} {value} is out of range: allowed are {low} to {high}")


def usable_cpus() -> Cpus:
    """CPUs that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def set_own_priority(level: int) -> None:
    """Of the calling thread and those it starts later; raises OSError if that is refused."""
    if level in NICE and hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, 0, NICE[level])


def parse_mask(text: str, flag: str, usable: Cpus) -> Cpus:
    """CPUs of a hexadecimal mask: bit i is CPU i; raises ConfigError."""
    digits = re.fullmatch(r"(?:0[xX])?([0-9a-fA-F]+)", text)
    if digits is None:
        raise ConfigError(f"{flag} {text!r} is not a hexadecimal number such as 0xf (CPUs 0-3)")
    if len(digits[1]) > MASK_DIGITS:
        raise ConfigError(f"{flag}: a mask has at most {MASK_DIGITS} digits, not {len(digits[1])}")
    mask = int(digits[1], 16)
    if mask == 0:
        raise ConfigError(f"{flag} {text}: no CPU is in this mask; leave it out to use all")
    return _checked({i for i in range(mask.bit_length()) if mask >> i & 1}, flag, text, usable)


def parse_range(text: str, flag: str, usable: Cpus) -> Cpus:
    """CPUs lo to hi of "lo-hi"; a bound that is left out is the first or the last usable CPU."""
    bounds = re.fullmatch(r"(\d{0,4})-(\d{0,4})", text, re.ASCII)
    if bounds is None:
        raise ConfigError(f"{flag} {text!r} is not a range of CPUs such as 0-3, 2- or -5")
    low = int(bounds[1] or min(usable))
    high = int(bounds[2] or max(usable))
    if low > high:
        raise ConfigError(f"{flag} {text}: CPU {low} comes after CPU {high}")
    return _checked(set(range(low, high + 1)), flag, text, usable)


def _checked(cpus: set[int], flag: str, text: str, usable: Cpus) -> Cpus:
    if cpus <= usable:
        return frozenset(cpus)
    raise ConfigError(
        f"{flag} {text}: this process cannot run on CPU {listed(cpus - usable)}\n"
        f"it may use {listed(usable)}"
    )


def listed(cpus: Iterable[int]) -> str:
    """CPUs as the system lists them: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
