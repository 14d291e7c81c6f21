"""Virtual time: how long the modelled machine would have taken, in seconds since its start.

Nothing here looks at a real clock. The host is at `now`; each unit of a card (compute and the two
copy engines) does one thing at a time; host memory delivers to all of them together only so much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Slice:
    """One thing that took time."""

    device: str
    unit: str
    name: str
    start: float
    seconds: float
    nbytes: float


@dataclass(slots=True)
class Unit:
    """Does one thing at a time."""

    device: str
    name: str
    free_at: float = 0.0
    busy: float = 0.0


class Bus:
    """Host memory: what was promised first is delivered first, the rest shares what is left."""

    def __init__(self, gbs: Callable[[], float]) -> None:
        """`gbs`: asked once, when somebody wants the first bytes."""
        self._ask = gbs
        self._taken: list[tuple[float, float, float]] = []  # from, to, bytes per second
        self._until = 0.0  # when the last of it is over

    @cached_property
    def gbs(self) -> float:
        """What it delivers to all together."""
        return self._ask()

    def deliver(self, now: float, start: float, seconds: float, nbytes: float) -> float:
        """When bytes have arrived that would take `seconds` if nobody else wanted any."""
        if nbytes <= 0 or seconds <= 0:
            return start + seconds
        wanted, left, at = nbytes / seconds, nbytes, start
        if start >= self._until:  # nobody else is there
            if self._until <= now:
                self._taken.clear()
            self._until = start + seconds
            self._taken.append((start, self._until, wanted))
            return self._until
        self._taken = taken = [span for span in self._taken if span[1] > now]
        for stop in (*sorted({t for a, b, _ in taken for t in (a, b) if t > start}), None):
            used = sum(rate for a, b, rate in taken if a <= at < b)
            rate = min(wanted, max(0.0, 1e9 * self.gbs - used)) if used else wanted
            if stop is None or (rate and at + left / rate <= stop):
                end = at + left / rate
                taken.append((at, end, rate))
                self._until = max(self._until, end)
                return end
            if rate:
                taken.append((at, stop, rate))
            left -= rate * (stop - at)
            at = stop
        raise AssertionError("after the last span everything is free")


class Clock:
    """The host's time, and what the units have done until then."""

    def __init__(self, bus: Bus, *, trace: bool = False) -> None:
        self.now = 0.0
        self.since = 0.0  # what is reported began then
        self.bus = bus
        self.host = Unit("host", "CPU")
        self.waits = Unit("host", "waiting")
        self.trace: list[Slice] | None = [] if trace else None

    def restart(self) -> None:
        """Let what is reported begin now."""
        self.since = self.now
        self.host.busy = self.waits.busy = 0.0
        if self.trace is not None:
            self.trace.clear()

    def wait_until(self, time: float, why: str, cost: float) -> None:
        """The host waits, and `cost` seconds longer."""
        start = self.now
        self.now = end = (time if time > start else start) + cost
        self.waits.busy += end - start
        if self.trace is not None:
            self._note(self.waits, why, start, end, 0)

    def compute(self, name: str, seconds: float, nbytes: float) -> None:
        """The host computes, reading bytes of its memory."""
        start = self.now
        self.now = self.bus.deliver(start, start, seconds, nbytes)
        self.host.busy += self.now - start
        self._note(self.host, name, start, self.now, nbytes)

    def run(
        self, units: Sequence[Unit], ready: float, seconds: float, name: str, nbytes: float = 0
    ) -> float:
        """Work of one or two units of a card, not before `ready`; when it is over."""
        start = max(self.now, ready, *(unit.free_at for unit in units))
        for unit in units:
            self._occupy(unit, name, start, start + seconds, nbytes)
        return start + seconds

    def copy(self, unit: Unit, ready: float, seconds: float, name: str, nbytes: int) -> float:
        """The same for a copy from or to host memory."""
        start = max(self.now, ready, unit.free_at)
        seconds = max(seconds, 1e-9 * nbytes / self.bus.gbs)  # host memory gives no more
        end = self.bus.deliver(self.now, start, seconds, nbytes)
        self._occupy(unit, name, start, end, nbytes)
        return end

    def _occupy(self, unit: Unit, name: str, start: float, end: float, nbytes: float) -> None:
        unit.free_at = end
        unit.busy += end - start
        self._note(unit, name, start, end, nbytes)

    def _note(self, unit: Unit, name: str, start: float, end: float, nbytes: float) -> None:
        if self.trace is not None and end > start:
            self.trace.append(Slice(unit.device, unit.name, name, start, end - start, nbytes))
