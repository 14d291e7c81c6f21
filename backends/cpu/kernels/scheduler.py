"""The scheduler of compiled plans: threads claim chunks of one node after another.

A node is over when all its chunks are done, whoever did them, so a thread that the system has
taken off its core delays the others only while it holds a chunk. The words CLAIM and DONE of a
node carry the graph's number in their upper half: a late thread that still looks at an older
graph can take nothing of a newer one. pool.py is the Python side; state.py names the words.
"""

from __future__ import annotations

from numba import int32, int64

from pyggml.backends.cpu import node as layout
from pyggml.backends.cpu import state as s
from pyggml.backends.cpu.kernels.access import entry_point, inline
from pyggml.backends.cpu.kernels.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    call_function,
    call_kernel,
    compare_swap,
    cpu_pause,
)
from pyggml.backends.cpu.kernels.simd import load

N_CHUNKS = 8 * layout.N_CHUNKS
CLAIM, DONE = 8 * layout.CLAIM, 8 * layout.DONE
NODE_BYTES = layout.BYTES


@inline
def run_nodes(state: int, node: int, tag: int, ith: int) -> None:
    """Claim chunks until the plan's end (a node without kernel)."""
    while True:
        kernel = load(int64, node)
        if kernel == 0:
            return
        n = load(int64, node + N_CHUNKS)
        while True:
            claimed = atomic_load(node + CLAIM)
            chunk = claimed - tag
            if chunk < 0 or chunk >= n:  # another graph's number, or nothing left
                break
            if compare_swap(node + CLAIM, claimed, claimed + 1):
                call_kernel(kernel, node, int32(ith), int32(chunk), int32(n))
                atomic_add(node + DONE, 1)
        spins = 0
        while True:
            done = atomic_load(node + DONE) - tag
            if done >= n:
                break
            if done < 0:  # the plan was not run under this number
                return
            cpu_pause()
            spins += 1
            if spins >= s.SPINS_BEFORE_YIELD:
                call_function(load(int64, state + s.YIELD), 0, int32(0))
                spins = s.SPINS_BEFORE_YIELD - 64
        node += NODE_BYTES


@entry_point
def run_plan(state: int, plan: int) -> int:
    """The calling thread runs a plan together with the workers 1 .. THREADS - 1."""
    n_threads = load(int64, state + s.THREADS)
    seq = atomic_load(state + s.SEQ) + 1
    node = plan
    while load(int64, node) != 0:
        atomic_store(node + DONE, seq << 32)
        atomic_store(node + CLAIM, seq << 32)
        node += NODE_BYTES
    if n_threads > 1:
        atomic_store(state + s.PLAN, plan)
        atomic_add(state + s.SEQ, 1)
        for t in range(1, n_threads):
            worker = state + s.WORKERS + t * s.WORKER_BYTES
            if atomic_swap(worker + s.ASLEEP, 0) != 0:
                call_function(
                    load(int64, state + s.RELEASE), load(int64, worker + s.LOCK), int32(0)
                )
    run_nodes(state, plan, seq << 32, 0)
    return 0


@entry_point
def run_worker(state: int, ith: int) -> int:
    """Run plans until STOP; spin for work for a while, then sleep."""
    worker = state + s.WORKERS + ith * s.WORKER_BYTES
    seen = atomic_load(state + s.SEQ)
    spins = 0
    while atomic_load(state + s.STOP) == 0:
        if atomic_load(state + s.SEQ) == seen:
            cpu_pause()
            spins += 1
            if spins > load(int64, state + s.SPINS):
                spins = 0
                atomic_swap(worker + s.ASLEEP, 1)
                # a plan published before ASLEEP was set: take the flag back, unless the
                # publisher has seen it and a release is on its way
                if atomic_add(state + s.SEQ, 0) == seen or atomic_swap(worker + s.ASLEEP, 0) == 0:
                    call_function(
                        load(int64, state + s.ACQUIRE), load(int64, worker + s.LOCK), int32(1)
                    )
            continue
        seen = atomic_load(state + s.SEQ)
        if ith < load(int64, state + s.THREADS):
            spins = 0
            atomic_swap(worker + s.ACTIVE, 1)
            run_nodes(state, atomic_add(state + s.PLAN, 0), seen << 32, ith)
            atomic_store(worker + s.ACTIVE, 0)
    return 0


@entry_point
def retire_plan(state: int, empty_plan: int) -> int:
    """Wait until no worker can look at the last plan any more; then it may be freed.

    A worker marks itself active before it fetches the plan: whoever missed the exchange here is
    seen as active.
    """
    atomic_swap(state + s.PLAN, empty_plan)
    for t in range(1, load(int64, state + s.WORKER_COUNT)):
        active = state + s.WORKERS + t * s.WORKER_BYTES + s.ACTIVE
        while atomic_add(active, 0) != 0:
            call_function(load(int64, state + s.YIELD), 0, int32(0))
    return 0
