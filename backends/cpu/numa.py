"""Memory nodes (NUMA): where threads run, and so where the pages lie that they touch first.

Linux puts a page on the node of the thread that first writes it. Repacked weights are written
while a model is loaded, so the threads that repack decide where they lie.

Threads claim chunks of a product as they come: which thread, and so which node, reads a row is not
known before. `distribute` therefore spreads the blocks of a weight evenly over the nodes, which
uses the memory channels of all of them; it does not make reads local. `isolate` does: threads and
weights are on one node. Pages may be as large as 2 MiB, and a page belongs to whoever touches it
first, so small weights are not spread evenly. Weights that stay in a mapped file lie where the
system's file cache has them.
"""

from __future__ import annotations

import ctypes
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from pyggml.threads import Cpus, listed, usable_cpus

log = logging.getLogger("pyggml.cpu")

NODES = Path("/sys/devices/system/node")
BALANCING = Path("/proc/sys/kernel/numa_balancing")


@dataclass(frozen=True, slots=True)
class Numa:
    """A way to use several nodes."""

    mode: str  # distribute, isolate or numactl
    nodes: tuple[Cpus, ...]  # usable CPUs of each node that has some
    home: int  # index of the node this process runs on

    def groups(self, within: Cpus | None = None) -> tuple[Cpus, ...]:
        """The sets of CPUs that threads take turns on, none left empty by a mask; () means
        anywhere."""
        if self.mode == "numactl":
            return ()
        nodes = self.nodes if self.mode == "distribute" else self.nodes[self.home : self.home + 1]
        parts = (node if within is None else node & within for node in nodes)
        return tuple(part for part in parts if part)

    def share(self, ith: int, within: Cpus | None) -> tuple[Cpus | None, int]:
        """CPUs of thread `ith`, and its number among the threads that have the same ones."""
        groups = self.groups(within)
        if not groups:
            return within, ith
        turn, node = divmod(ith, len(groups))
        return groups[node], turn


def find_numa(
    mode: str,
    *,
    root: Path = NODES,
    balancing: Path = BALANCING,
    usable: Cpus | None = None,
    current_cpu: int | None = None,
) -> Numa | None:
    """The nodes of this machine; None if there is one only: then there is nothing to choose."""
    if not mode:
        return None
    usable = usable_cpus() if usable is None else usable
    nodes = read_nodes(root, usable)
    if len(nodes) < 2:
        log.info("numa %s: one node, nothing to place", mode)
        return None
    current = _current_cpu() if current_cpu is None else current_cpu
    home = next((i for i, cpus in enumerate(nodes) if current in cpus), 0)
    log.info("numa %s: CPUs %s", mode, " | ".join(listed(cpus) for cpus in nodes))
    if _read(balancing) not in ("", "0"):
        log.warning(
            "%s is on: the system moves pages while they are read, which costs speed; "
            "write 0 to it",
            balancing,
        )
    return Numa(mode, nodes, home)


def read_nodes(root: Path, usable: Cpus) -> tuple[Cpus, ...]:
    """Usable CPUs of each node, in the order of the nodes' numbers; nodes without any are left
    out."""
    numbered = []
    for folder in root.glob("node*"):
        number = re.fullmatch(r"node(\d+)", folder.name)
        if number:
            numbered.append((int(number[1]), parse_list(_read(folder / "cpulist")) & usable))
    return tuple(cpus for _, cpus in sorted(numbered, key=lambda pair: pair[0]) if cpus)


def parse_list(text: str) -> Cpus:
    """CPUs as the system lists them: "0-3,8"."""
    cpus: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _current_cpu() -> int:
    """The CPU that runs this; -1 where the system does not tell."""
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError, TypeError):
        return -1
