"""Streams of a simulated card: work waits until somebody waits for it.

So what reads too early finds old values, as it may on a real card, and every time. Virtual time is
settled when work is submitted; only results are late.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pyggml.backends.cuda.driver import Capture, DeviceError, DriverEvent, DriverStream
from pyggml.backends.cuda.sim_clock import Clock, Unit
from pyggml.backends.cuda.sim_memory import CardMemory
from pyggml.cost import Cost, Rates
from pyggml.errors import UserError

Work = Callable[[], None]


@dataclass(slots=True)
class Counters:
    """What one card was asked for."""

    launches: int = 0
    captured_launches: int = 0  # those of them that a captured graph started
    kernel_bytes: float = 0.0
    kernel_flops: float = 0.0
    h2d_bytes: int = 0
    h2d_copies: int = 0
    d2h_bytes: int = 0
    d2h_copies: int = 0
    peer_bytes: int = 0
    d2d_bytes: int = 0
    syncs: int = 0


@dataclass(slots=True)
class SimCard:
    """Everything that belongs to one card."""

    clock: Clock
    rates: Rates
    memory: CardMemory
    compute: Unit
    h2d: Unit
    d2h: Unit
    counters: Counters = field(default_factory=Counters)
    streams: weakref.WeakSet[SimStream] = field(default_factory=weakref.WeakSet)
    is_capturing: bool = False

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def units(self) -> tuple[Unit, Unit, Unit]:
        return self.compute, self.h2d, self.d2h

    def restart(self) -> None:
        """Count from here on."""
        self.counters = Counters()
        for unit in self.units:
            unit.busy = 0.0


@dataclass(frozen=True, slots=True)
class Captured:
    """One launch of a captured graph."""

    name: str
    seconds: float
    cost: Cost
    work: Work | None


class SimStream:
    """Work in order, done as far as somebody has waited for it."""

    def __init__(self, card: SimCard) -> None:
        self.card = card
        card.streams.add(self)
        self._name = f"for {card.name}"
        self.submitted = self.done = 0
        self.ready_at = 0.0  # when all submitted work is over, in virtual time
        self.captured: list[Captured] | None = None
        self._queue: deque[Work] = deque()
        self._running = False
        self._fault: Exception | None = None
        self._news: Exception | None = None  # what nobody has been told yet

    def push(self, work: Work) -> None:
        """Append work. Raises DeviceError after a fault."""
        if self.captured is not None:
            raise DeviceError(f"{self.card.name}: only launches can be captured")
        self._check()
        self._queue.append(work)
        self.submitted += 1

    def run_to(self, position: int) -> None:
        """Do the first `position` works; what goes wrong is told to who synchronizes."""
        if self.done >= position:
            return
        assert not self._running, "a stream waits for itself"
        self._running = True
        try:
            while self.done < position and self._queue:
                self.done += 1
                self._do(self._queue.popleft())
        finally:
            self._running = False

    def _do(self, work: Work) -> None:
        if self._fault is not None:  # nothing works any more
            return
        try:
            work()
        except UserError as e:  # a kernel has noted it; later work goes on
            self._news = self._news or e
        except Exception as e:
            self._fault = self._news = e

    def _check(self) -> None:
        if self._fault is not None and self._news is None:
            name = self.card.name
            raise DeviceError(f"{name}: an earlier error ended all work here: {self._fault}")

    # ------------------------------------------------------------ the driver's calls
    def synchronize(self) -> None:
        if self.captured is not None:
            raise DeviceError(
                f"{self.card.name}: a stream that is being captured cannot be waited for"
            )
        self._check()
        if self.done < self.submitted:
            self.run_to(self.submitted)
        card = self.card
        card.counters.syncs += 1
        card.clock.wait_until(self.ready_at, self._name, card.rates.sync)
        self.tell()

    def tell(self) -> None:
        """Raise what has gone wrong and nobody has been told."""
        if self._news is not None:
            news, self._news = self._news, None
            raise news

    def wait(self, event: DriverEvent) -> None:
        assert isinstance(event, SimEvent)
        self.card.clock.now += self.card.rates.submit
        stream, position = event.stream, event.position
        if stream is None or stream is self:
            return
        self.ready_at = max(self.ready_at, event.time)
        self.push(lambda: stream.run_to(position))

    def query(self) -> bool:
        return self.done == self.submitted and self.card.clock.now >= self.ready_at

    def begin_capture(self) -> None:
        self.captured = []
        self.card.is_capturing = True

    def end_capture(self) -> Capture:
        assert self.captured is not None
        items, self.captured = self.captured, None
        self.card.is_capturing = False
        return SimCapture(self.card, items)


class SimEvent:
    """A number of works of a stream, and when they are over."""

    def __init__(self, card: SimCard) -> None:
        self.card = card
        self.stream: SimStream | None = None
        self.position = 0
        self.time = 0.0

    def record(self, stream: DriverStream) -> None:
        assert isinstance(stream, SimStream)
        self.card.clock.now += self.card.rates.submit
        self.stream, self.position, self.time = stream, stream.submitted, stream.ready_at

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.position)
            self.card.counters.syncs += 1
            rates = self.card.rates
            self.card.clock.wait_until(self.time, f"for {self.card.name}", rates.sync)
            self.stream.tell()

    def query(self) -> bool:
        if self.stream is None:
            return True
        return self.stream.done >= self.position and self.card.clock.now >= self.time


class SimCapture:
    """Launches that one call starts again."""

    def __init__(self, card: SimCard, items: list[Captured]) -> None:
        self._card = card
        self._items = items
        self._work = [item.work for item in items if item.work is not None]
        self._seconds = sum(item.seconds for item in items)
        self._bytes = sum(item.cost.bytes for item in items)
        self._flops = sum(item.cost.flops for item in items)

    def launch(self, stream: DriverStream) -> None:
        assert isinstance(stream, SimStream)
        card = self._card
        card.clock.now += card.rates.submit
        counters = card.counters
        counters.launches += len(self._items)
        counters.captured_launches += len(self._items)
        counters.kernel_bytes += self._bytes
        counters.kernel_flops += self._flops
        units = (card.compute,)
        if card.clock.trace is None:
            stream.ready_at = card.clock.run(units, stream.ready_at, self._seconds, "graph")
        else:
            for item in self._items:
                stream.ready_at = card.clock.run(
                    units, stream.ready_at, item.seconds, item.name, item.cost.bytes
                )
        for work in self._work:
            stream.push(work)
