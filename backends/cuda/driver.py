"""What the CUDA backend asks of a driver: one small protocol for real and for simulated cards.

Addresses are integers in the device's address space, so a tensor lies at base plus offset. Work
that takes a stream is asynchronous: it runs in the order of its stream, and memory that it reads or
writes on the host must stay as it is until somebody has waited. Host memory that is not pinned is
copied at the call (to the device) or before it returns (from the device).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyggml.backend import NO_LIMIT, Memory, pad
from pyggml.cost import Cost

HostBytes = npt.NDArray[np.uint8]  # one dimension, packed

SMALL, LARGE = 512, 2 << 20  # granularity of allocations
MANY = 1 << 20  # bytes from which on an allocation counts as large


def footprint(nbytes: int) -> int:
    """What an allocation takes of a card's memory."""
    return pad(max(nbytes, 1), LARGE if nbytes >= MANY else SMALL)


class DeviceError(RuntimeError):
    """A call that the driver refused, or work that failed on the device."""


@dataclass(frozen=True, slots=True)
class DeviceProps:
    """What is known of a card."""

    name: str
    compute_capability: int  # 86: sm_86
    total_memory: int  # bytes
    max_buffer: int = NO_LIMIT  # bytes of one allocation


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments.

    Simulated cards take its time from `cost` and its results from `emulate`; real ones find out
    both for themselves.
    """

    name: str
    cost: Cost
    emulate: Callable[[], None] | None = None


class DriverEvent(Protocol):
    """A point in a stream; one that was never recorded has passed."""

    def record(self, stream: DriverStream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Whether the point has passed."""


class Capture(Protocol):
    """Launches recorded once: started again by a single call, with the same arguments."""

    def launch(self, stream: DriverStream) -> None: ...


class DriverStream(Protocol):
    """Work in order. Between streams only events give an order."""

    def synchronize(self) -> None:
        """Wait on the host. Raises what has gone wrong on the device."""

    def wait(self, event: DriverEvent) -> None:
        """Let later work start after an event; the host goes on."""

    def query(self) -> bool:
        """Whether all work is done."""

    def begin_capture(self) -> None:
        """Record launches from now on instead of running them."""

    def end_capture(self) -> Capture: ...


class Driver(Protocol):
    """The calls of a CUDA runtime. All raise DeviceError."""

    @property
    def is_simulated(self) -> bool: ...

    def n_devices(self) -> int: ...

    def props(self, device: int) -> DeviceProps: ...

    def memory(self, device: int) -> Memory: ...

    def alloc(self, device: int, nbytes: int, label: str = "") -> int:
        """An address. Raises OutOfMemory: what did not fit, and what is free."""

    def free(self, device: int, address: int) -> None:
        """Waits for the device first."""

    def pinned(self, nbytes: int) -> HostBytes:
        """Host memory that copies reach without a detour; it is freed with its last reference.
        Raises OutOfMemory."""

    def stream(self, device: int) -> DriverStream: ...

    def event(self, device: int) -> DriverEvent: ...

    def h2d(self, device: int, dst: int, src: HostBytes, stream: DriverStream) -> None: ...

    def d2h(self, device: int, dst: HostBytes, src: int, stream: DriverStream) -> None: ...

    def d2d(self, device: int, dst: int, src: int, nbytes: int, stream: DriverStream) -> None: ...

    def peer(
        self, to: int, dst: int, source: int, src: int, nbytes: int, stream: DriverStream
    ) -> None:
        """From device `source` to device `to`, in the order of a stream of `source`."""

    def can_peer(self, a: int, b: int) -> bool:
        """Whether such copies are direct; else they go through host memory."""

    def memset(
        self, device: int, dst: int, value: int, nbytes: int, stream: DriverStream
    ) -> None: ...

    def launch(self, device: int, launch: Launch, stream: DriverStream) -> None: ...

    def synchronize(self, device: int) -> None:
        """Wait for all streams of a device."""
