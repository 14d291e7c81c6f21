"""Threads that run compiled plans: they live in compiled code and sleep when there is no work."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml.backends.cpu import state as s
from pyggml.backends.cpu.library import KernelLibrary
from pyggml.backends.cpu.memory import aligned_words
from pyggml.backends.cpu.node import WORDS
from pyggml.backends.cpu.placement import Placement
from pyggml.threads import POLL, ThreadParams

Words = npt.NDArray[np.int64]
Entry = Callable[[int, int], int]

ENTRY_POINTS = ("run_plan", "run_worker", "retire_plan")
# One to two milliseconds: longer than the Python work between two graphs of a decode loop.
SPINS = 50_000  # at the usual level of polling
PLANS_HELD = 16


@dataclass(frozen=True, slots=True)
class _Entries:
    """The compiled entry points, callable; ctypes lets go of the GIL while they run."""

    run_plan: Entry
    run_worker: Entry
    retire_plan: Entry


class Pool:
    """Up to `n_threads` threads, the caller included; started when first needed.

    One graph at a time: `run` is for one thread at once. A worker that the system has taken off
    its core may look at a plan long after `run` has returned, so the pool holds what it has run
    until it knows that nobody does.
    """

    def __init__(
        self,
        n_threads: int,
        library: KernelLibrary,
        spins: int = SPINS,
        placement: Placement | None = None,
    ) -> None:
        self.n_threads = n_threads
        self._spins = spins
        self._placement = placement or Placement()
        self._params = ThreadParams(n_threads)  # as threads start
        signature = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        found = library.addresses(ENTRY_POINTS)
        self._library = library  # owns the code
        self._entries = _Entries(*(signature(found[name]) for name in ENTRY_POINTS))
        self._state = _new_state(n_threads, spins)
        self._address = self._state.ctypes.data
        self._empty_plan = np.zeros(WORDS, np.int64)
        self._held: dict[int, Words] = {}  # plans that a worker may look at, by their address
        self._threads: list[threading.Thread] = []
        self._n_started = 1
        # also at interpreter exit: no thread may outlive the memory it looks at
        self.close = weakref.finalize(
            self, _stop, self._state, self._entries, self._empty_plan, self._threads
        )

    def run(self, plan: Words, n_threads: int) -> None:
        """Run a plan on the caller and n_threads - 1 workers."""
        n = min(n_threads, self.n_threads)
        if n > self._n_started:
            self._start(n)
        self._state[s.THREADS // 8] = n
        address = plan.ctypes.data
        if n > 1:
            self._hold(address, plan)
        with self._placement.caller(self._params):
            self._entries.run_plan(self._address, address)

    def use(self, params: ThreadParams) -> None:
        """How the threads run from now on; how many is for `run` to say."""
        if params == self._params:
            return
        self._placement.check(params)
        self._state[s.SPINS // 8] = self._spins * params.poll // POLL
        for ith, thread in enumerate(self._threads, 1):
            self._place(thread, ith, self._params, params)
        self._params = params

    def _place(
        self, thread: threading.Thread, ith: int, old: ThreadParams | None, new: ThreadParams
    ) -> None:
        assert thread.native_id is not None
        self._placement.worker(thread.native_id, ith, old, new)

    def _hold(self, address: int, plan: Words) -> None:
        if address in self._held:
            return
        if len(self._held) == PLANS_HELD:
            # afterwards no worker looks at any of them
            self._entries.retire_plan(self._address, self._empty_plan.ctypes.data)
            self._held.clear()
        self._held[address] = plan

    def _start(self, n: int) -> None:
        for ith in range(self._n_started, n):
            thread = threading.Thread(
                target=self._entries.run_worker,
                args=(self._address, ith),
                name=f"pyggml-{ith}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
            self._place(thread, ith, None, self._params)
        self._n_started = n


def _new_state(n_threads: int, spins: int) -> Words:
    state = aligned_words((s.WORKERS + n_threads * s.WORKER_BYTES) // 8)
    python = ctypes.pythonapi
    python.PyThread_allocate_lock.restype = ctypes.c_void_p
    python.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
    words = {
        s.SPINS: spins,
        s.WORKER_COUNT: n_threads,
        s.THREADS: 1,
        s.YIELD: _address(_yield_function()),
        s.ACQUIRE: _address(python.PyThread_acquire_lock),
        s.RELEASE: _address(python.PyThread_release_lock),
    }
    for offset, value in words.items():
        state[offset // 8] = value
    for t in range(1, n_threads):
        lock = python.PyThread_allocate_lock()
        python.PyThread_acquire_lock(lock, 1)
        state[(s.WORKERS + t * s.WORKER_BYTES + s.LOCK) // 8] = lock
    return state


def _address(function: object) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # any C function
    assert value is not None
    return value


def _yield_function() -> object:
    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32").SwitchToThread
    return ctypes.CDLL(None).sched_yield


def _stop(
    state: Words, entries: _Entries, empty_plan: Words, threads: list[threading.Thread]
) -> None:
    """End the worker threads."""
    n_threads = int(state[s.WORKER_COUNT // 8])
    state[s.STOP // 8] = 1
    state[s.THREADS // 8] = n_threads
    entries.run_plan(state.ctypes.data, empty_plan.ctypes.data)  # wakes everybody
    for thread in threads:
        thread.join()
    free = ctypes.pythonapi.PyThread_free_lock
    free.argtypes = [ctypes.c_void_p]
    for t in range(1, n_threads):
        free(int(state[(s.WORKERS + t * s.WORKER_BYTES + s.LOCK) // 8]))
