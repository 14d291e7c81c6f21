"""A driver of cards that are not there: the protocol of driver.py over host memory and a clock."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from pyggml.backend import NO_LIMIT, Memory
from pyggml.backends.cpu.memory import at_address, reserve
from pyggml.backends.cuda.cards import Card
from pyggml.backends.cuda.driver import (
    DeviceError,
    DeviceProps,
    DriverEvent,
    DriverStream,
    HostBytes,
    Launch,
)
from pyggml.backends.cuda.sim_clock import Clock, Unit
from pyggml.backends.cuda.sim_memory import FAKE_SPACE, CardMemory, fake_address
from pyggml.backends.cuda.sim_stream import Captured, SimCard, SimEvent, SimStream
from pyggml.errors import OutOfMemory

STAGED = 64 << 10  # larger copies from memory that is not pinned are awaited


class SimDriver:
    """Simulated cards with one clock. `dry`: nothing is allocated, copied or computed.

    `pinned_limit`: bytes of host memory that can be pinned.
    """

    is_simulated = True

    def __init__(
        self,
        cards: Sequence[Card],
        clock: Clock,
        *,
        dry: bool = False,
        pinned_limit: int = NO_LIMIT,
    ) -> None:
        self.clock = clock
        self.models = tuple(cards)
        self.dry = dry
        self.cards = [_card(i, card, clock, dry=dry) for i, card in enumerate(cards)]
        self._pinned_left = pinned_limit
        self._pinned: dict[int, int] = {}  # size by address

    # ------------------------------------------------------------ devices and memory
    def n_devices(self) -> int:
        return len(self.cards)

    def props(self, device: int) -> DeviceProps:
        return self.models[device].props

    def memory(self, device: int) -> Memory:
        return self.cards[device].memory.state()

    def alloc(self, device: int, nbytes: int, label: str = "") -> int:
        card = self.cards[device]
        if card.is_capturing:
            raise DeviceError(f"{card.name}: nothing can be allocated while a graph is captured")
        return card.memory.alloc(nbytes, label)

    def free(self, device: int, address: int) -> None:
        card = self.cards[device]
        for stream in list(card.streams):
            stream.run_to(stream.submitted)
        card.memory.free(address)

    def pinned(self, nbytes: int) -> HostBytes:
        if nbytes > self._pinned_left:
            raise OutOfMemory(f"{nbytes >> 20} MiB of pinned memory: the limit is reached")
        memory = at_address(fake_address(nbytes), nbytes) if self.dry else reserve(nbytes)
        address = memory.ctypes.data
        self._pinned[address] = nbytes
        self._pinned_left -= nbytes
        weakref.finalize(memory, self._unpin, address)
        return memory

    def _unpin(self, address: int) -> None:
        self._pinned_left += self._pinned.pop(address)

    def is_pinned(self, host: HostBytes) -> bool:
        """Whether copies reach these bytes without a detour."""
        start = host.ctypes.data
        return any(a <= start and start + host.nbytes <= a + n for a, n in self._pinned.items())

    # ------------------------------------------------------------ streams
    def stream(self, device: int) -> DriverStream:
        return SimStream(self.cards[device])

    def event(self, device: int) -> DriverEvent:
        return SimEvent(self.cards[device])

    def synchronize(self, device: int) -> None:
        for stream in list(self.cards[device].streams):
            stream.synchronize()

    # ------------------------------------------------------------ copies
    def h2d(self, device: int, dst: int, src: HostBytes, stream: DriverStream) -> None:
        card, n, pinned = self.cards[device], src.nbytes, self.is_pinned(src)
        stream = _mine(stream)
        card.memory.check(dst, n, "a copy to the device")
        card.counters.h2d_bytes += n
        card.counters.h2d_copies += 1
        self._transfer(card, card.h2d, card.rates.h2d_gbs, n, pinned, stream)
        if self.dry:
            return
        # what is pinned is read when the copy runs: who overwrites it too early shall see that
        data = src.copy() if not pinned and n <= STAGED else src
        stream.push(lambda: _move(dst, data.ctypes.data, n, data))
        if not pinned and n > STAGED:
            stream.run_to(stream.submitted)

    def d2h(self, device: int, dst: HostBytes, src: int, stream: DriverStream) -> None:
        card, n, pinned = self.cards[device], dst.nbytes, self.is_pinned(dst)
        stream = _mine(stream)
        card.memory.check(src, n, "a copy from the device")
        card.counters.d2h_bytes += n
        card.counters.d2h_copies += 1
        self._transfer(card, card.d2h, card.rates.d2h_gbs, n, pinned, stream)
        if not self.dry:
            stream.push(lambda: _move(dst.ctypes.data, src, n, dst))
        elif dst.ctypes.data < FAKE_SPACE:
            dst[:] = 0
        if not pinned:
            stream.synchronize()

    def _transfer(
        self, card: SimCard, unit: Unit, gbs: float, nbytes: int, pinned: bool, stream: SimStream
    ) -> None:
        rates = card.rates
        self.clock.now += rates.submit
        seconds = rates.copy_seconds(nbytes, gbs, pinned=pinned)
        stream.ready_at = self.clock.copy(unit, stream.ready_at, seconds, unit.name, nbytes)
        if unit is card.h2d and not pinned:
            # the host copies it to where the card can read it, piece by piece
            self.clock.now = max(self.clock.now, stream.ready_at - rates.copy_latency)

    def d2d(self, device: int, dst: int, src: int, nbytes: int, stream: DriverStream) -> None:
        card, stream = self.cards[device], _mine(stream)
        card.memory.check(dst, nbytes, "a copy")
        card.memory.check(src, nbytes, "a copy")
        card.counters.d2d_bytes += nbytes
        self._kernel(card, "D2D", 2 * nbytes, stream)
        self._push_move(dst, src, nbytes, stream)

    def can_peer(self, a: int, b: int) -> bool:
        return a != b and bool(self.cards[a].rates.peer_gbs and self.cards[b].rates.peer_gbs)

    def peer(
        self, to: int, dst: int, source: int, src: int, nbytes: int, stream: DriverStream
    ) -> None:
        there, here, stream = self.cards[to], self.cards[source], _mine(stream)
        there.memory.check(dst, nbytes, "a copy to this device")
        here.memory.check(src, nbytes, "a copy from this device")
        here.counters.peer_bytes += nbytes
        self.clock.now += here.rates.submit
        if self.can_peer(source, to):
            units = (here.d2h, there.h2d)
            seconds = here.rates.copy_seconds(
                nbytes, min(here.rates.peer_gbs, there.rates.peer_gbs)
            )
            stream.ready_at = self.clock.run(units, stream.ready_at, seconds, "peer", nbytes)
        else:
            up = here.rates.copy_seconds(nbytes, here.rates.d2h_gbs)
            down = there.rates.copy_seconds(nbytes, there.rates.h2d_gbs)
            for unit, seconds in ((here.d2h, up), (there.h2d, down)):
                stream.ready_at = self.clock.copy(unit, stream.ready_at, seconds, "peer", nbytes)
        self._push_move(dst, src, nbytes, stream)

    def memset(self, device: int, dst: int, value: int, nbytes: int, stream: DriverStream) -> None:
        card, stream = self.cards[device], _mine(stream)
        card.memory.check(dst, nbytes, "filling")
        self._kernel(card, "fill", nbytes, stream)
        if not self.dry:
            stream.push(lambda: _fill(dst, value, nbytes))

    def _kernel(self, card: SimCard, name: str, nbytes: int, stream: SimStream) -> None:
        self.clock.now += card.rates.submit
        seconds = card.rates.node_latency + nbytes / (1e9 * card.rates.gbs)
        stream.ready_at = self.clock.run((card.compute,), stream.ready_at, seconds, name, nbytes)

    def _push_move(self, dst: int, src: int, nbytes: int, stream: SimStream) -> None:
        if not self.dry:
            stream.push(lambda: _move(dst, src, nbytes))

    # ------------------------------------------------------------ kernels
    def launch(self, device: int, launch: Launch, stream: DriverStream) -> None:
        card, stream, cost = self.cards[device], _mine(stream), launch.cost
        seconds = card.rates.seconds(cost)
        work = None if self.dry else launch.emulate
        if stream.captured is not None:
            stream.captured.append(Captured(launch.name, seconds, cost, work))
            return
        card.counters.launches += 1
        card.counters.kernel_bytes += cost.bytes
        card.counters.kernel_flops += cost.flops
        self.clock.now += card.rates.submit
        units = (card.compute,)
        stream.ready_at = self.clock.run(units, stream.ready_at, seconds, launch.name, cost.bytes)
        if work is not None:
            stream.push(work)


def _card(index: int, card: Card, clock: Clock, *, dry: bool) -> SimCard:
    name = f"CUDA{index}"
    memory = CardMemory(name, card.memory, card.reserved, dry=dry)
    compute, h2d, d2h = (Unit(name, unit) for unit in ("compute", "H2D", "D2H"))
    return SimCard(clock, card.rates, memory, compute, h2d, d2h)


def _mine(stream: DriverStream) -> SimStream:
    assert isinstance(stream, SimStream), "a stream of another driver"
    return stream


def _move(dst: int, src: int, nbytes: int, owner: object = None) -> None:
    """Copy; `owner` keeps the host's side alive."""
    ctypes.memmove(dst, src, nbytes)


def _fill(dst: int, value: int, nbytes: int) -> None:
    ctypes.memset(dst, value, nbytes)
