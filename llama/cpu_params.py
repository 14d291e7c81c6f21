"""Which CPUs the threads of a context use, how urgent they are and how they wait (cpu_params)."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.threads import (
    POLL,
    POLLS,
    PRIORITIES,
    Cpus,
    ThreadParams,
    check_range,
    parse_mask,
    parse_range,
    usable_cpus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuParams:
    """Of generation, and of prompts: their fields end in _batch and are, if not given, the same.

    A mask and a range add up. Raises ConfigError, also for CPUs this process may not use.
    """

    cpu_mask: str = ""  # hexadecimal
    cpu_range: str = ""  # "lo-hi"
    cpu_strict: int = 0
    prio: int = 0
    poll: int = POLL
    cpu_mask_batch: str = ""
    cpu_range_batch: str = ""
    cpu_strict_batch: int | None = None
    prio_batch: int | None = None
    poll_batch: int | None = None

    def __post_init__(self) -> None:
        for flag, value, bounds in (
            ("--cpu-strict", self.cpu_strict, (0, 1)),
            ("--prio", self.prio, PRIORITIES),
            ("--poll", self.poll, POLLS),
            ("--cpu-strict-batch", self.cpu_strict_batch, (0, 1)),
            ("--prio-batch", self.prio_batch, PRIORITIES),
            ("--poll-batch", self.poll_batch, POLLS),
        ):
            if value is not None:
                check_range(flag, value, bounds)
        usable = usable_cpus()
        _cpus(self.cpu_mask, self.cpu_range, "", usable)
        _cpus(self.cpu_mask_batch, self.cpu_range_batch, "-batch", usable)

    @property
    def cpus(self) -> Cpus | None:
        """Of generation; None: all."""
        return _cpus(self.cpu_mask, self.cpu_range, "", usable_cpus())

    @property
    def cpus_batch(self) -> Cpus | None:
        """Of prompts; None: as for generation."""
        return _cpus(self.cpu_mask_batch, self.cpu_range_batch, "-batch", usable_cpus())

    def generation(self, n_threads: int) -> ThreadParams:
        """The threads of graphs of one token."""
        return ThreadParams(n_threads, self.cpus, bool(self.cpu_strict), self.prio, self.poll)

    def batch(self, n_threads: int) -> ThreadParams:
        """The threads of graphs of several tokens."""
        strict, prio, poll = self.cpu_strict_batch, self.prio_batch, self.poll_batch
        return ThreadParams(
            n_threads,
            self.cpus_batch or self.cpus,
            bool(self.cpu_strict if strict is None else strict),
            self.prio if prio is None else prio,
            self.poll if poll is None else poll,
        )


def _cpus(mask: str, span: str, suffix: str, usable: Cpus) -> Cpus | None:
    found: Cpus = frozenset()
    if mask:
        found |= parse_mask(mask, f"--cpu-mask{suffix}", usable)
    if span:
        found |= parse_range(span, f"--cpu-range{suffix}", usable)
    return found or None
