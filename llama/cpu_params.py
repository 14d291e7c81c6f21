"""Which CPUs the threads of a context use, how urgent they are and how they wait (cpu_params)."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.errors import ConfigError
from pyggml.threads import POLL, Cpus, ThreadParams, parse_mask, parse_range, usable_cpus


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
        for flag, value, low, high in (
            ("--cpu-strict", self.cpu_strict, 0, 1),
            ("--prio", self.prio, -1, 3),
            ("--poll", self.poll, 0, 100),
            ("--cpu-strict-batch", self.cpu_strict_batch, 0, 1),
            ("--prio-batch", self.prio_batch, -1, 3),
            ("--poll-batch", self.poll_batch, 0, 100),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} {value} is out of range: allowed are {low} to {high}")
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
