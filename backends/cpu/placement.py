"""Puts threads onto CPUs and gives them priorities, as far as the system allows it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyggml.backends.cpu.numa import Numa
from pyggml.threads import NICE, Cpus, ThreadParams, listed, usable_cpus

log = logging.getLogger("pyggml.cpu")


class Placement:
    """Of the threads of one backend. What the system refuses is said once.

    Workers are the backend's own: they keep what they are given. The calling thread belongs to
    the program: it takes its place for the time of a graph, and its priority is left alone,
    since without privileges a lowered one cannot be taken back.
    """

    def __init__(self, numa: Numa | None = None) -> None:
        self.numa = numa
        self._inherited = usable_cpus()
        self._nice: int | None = None  # before the first change
        self._said: set[str] = set()

    def cpus(self, params: ThreadParams, ith: int) -> Cpus | None:
        """CPUs of a thread; None: anywhere."""
        allowed, turn = params.cpus, ith
        if self.numa is not None:
            allowed, turn = self.numa.share(ith, params.cpus)
        if allowed is None or not params.strict:
            return allowed
        order = sorted(allowed)
        return frozenset((order[turn % len(order)],))

    def worker(self, tid: int, ith: int, old: ThreadParams | None, new: ThreadParams) -> None:
        """Change what differs for a worker thread that runs as `old` said; None: a new one."""
        before, after = None if old is None else self.cpus(old, ith), self.cpus(new, ith)
        if before != after:
            self._set_cpus(tid, self._inherited if after is None else after)
        if (0 if old is None else old.priority) != new.priority:
            self._set_priority(tid, new.priority)

    @contextmanager
    def caller(self, params: ThreadParams) -> Iterator[None]:
        """The calling thread is in its place inside, and where it was afterwards."""
        cpus = self.cpus(params, 0)
        if cpus is None or not hasattr(os, "sched_getaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        try:
            self._set_cpus(0, cpus)
            yield
        finally:
            self._set_cpus(0, frozenset(before))

    def check(self, params: ThreadParams) -> None:
        """Say that threads have to share CPUs."""
        if params.cpus is not None and len(params.cpus) < params.n_threads:
            text = f"{params.n_threads} threads share CPU {listed(params.cpus)}"
            self._say(text, f"{text}: fewer threads are faster")

    def _set_cpus(self, tid: int, cpus: Cpus) -> None:
        if not hasattr(os, "sched_setaffinity"):
            self._say("cpus", "this system does not let a program choose CPUs for its threads")
            return
        try:
            os.sched_setaffinity(tid, cpus)
        except OSError as e:
            self._say("cpus", f"threads stay where they are: CPUs {listed(cpus)}: {e.strerror}")

    def _set_priority(self, tid: int, level: int) -> None:
        if not hasattr(os, "setpriority"):
            self._say("nice", "this system has no priorities of threads that can be set")
            return
        try:
            if self._nice is None:
                self._nice = os.getpriority(os.PRIO_PROCESS, tid)
            wanted = NICE.get(level, self._nice)
            if os.getpriority(os.PRIO_PROCESS, tid) != wanted:
                os.setpriority(os.PRIO_PROCESS, tid, wanted)
        except OSError as e:
            self._say(
                "nice",
                f"priority {level}: the system refuses ({e.strerror}); "
                "a higher priority needs root or CAP_SYS_NICE",
            )

    def _say(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", text)
