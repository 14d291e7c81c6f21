"""What this machine can do at most, measured with the threads that run graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cpu.memory import aligned_words, reserve
from pyggml.backends.cpu.placement import Placement
from pyggml.backends.cpu.pool import ENTRY_POINTS, Pool, Words
from pyggml.threads import ThreadParams

KERNELS = ("probe_read", "probe_fma", "probe_dot")
CHUNKS_PER_THREAD = 4
LINE = 64
ARITHMETIC = 1 << 29  # operations of a thread: about 2 ms
RUNS = 5  # of which the fastest counts
HALF = 0x3F003F00  # two i16 that are, as one f32, about 0.5: sums of products stay finite


@dataclass(frozen=True, slots=True)
class Peak:
    """Something that can be measured again and again; `amount` of work per call of `run`."""

    amount: int
    run: Callable[[], int]  # nanoseconds of the fastest of some runs


class Probe:
    """Memory of `nbytes`, and threads that read it or compute as fast as they can."""

    def __init__(self, device: CpuDevice, params: ThreadParams, nbytes: int) -> None:
        addresses = device.library.addresses({*ENTRY_POINTS, *KERNELS})
        self._params = params
        self._pool = Pool(params.n_threads, device.library, placement=Placement(device.numa))
        self._pool.use(params)
        self._memory = reserve(nbytes)
        self._memory.view("i4")[:] = HALF  # pages that nobody has written are all the same one
        n_chunks = CHUNKS_PER_THREAD * params.n_threads
        self._sink = aligned_words(n_chunks * LINE // 8)
        part = nbytes // n_chunks // (4 * LINE) * 4 * LINE
        share = ARITHMETIC // CHUNKS_PER_THREAD
        self.read = self._peak(addresses["probe_read"], part, part)  # bytes
        self.fma = self._peak(addresses["probe_fma"], share, 0)  # float operations
        self.dot = self._peak(addresses["probe_dot"], share, 0)  # operations on int8

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _peak(self, kernel: int, work: int, step: int) -> Peak:
        n_chunks = CHUNKS_PER_THREAD * self._params.n_threads
        plan = aligned_words(2 * layout.WORDS)
        plan[layout.KERNEL], plan[layout.N_CHUNKS] = kernel, n_chunks
        plan[layout.DST], plan[layout.SRC] = self._sink.ctypes.data, self._memory.ctypes.data
        plan[layout.PARAMS : layout.PARAMS + 2] = work, step
        return Peak(work * n_chunks, lambda: min(self._timed(plan) for _ in range(RUNS)))

    def _timed(self, plan: Words) -> int:
        start = time.perf_counter_ns()
        self._pool.run(plan, self._params.n_threads)
        return time.perf_counter_ns() - start
