"""The search of a planner: which pattern each layer gets, so that time is least and all fits.

A pattern is one way to place a layer (all on its device, some matrices on the CPU, all on the
CPU). Layers go to the devices one after the other; those wholly on the CPU come first. Times add
up; a device's memory is the sum of its layers' and the largest of what their patterns compute in.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ON_CPU, WHOLE = 0, 1  # patterns of layers that are not on a device, and wholly there
STEPS = 2048  # of memory: sizes are rounded up to as many parts of what there is


@dataclass(frozen=True, slots=True)
class Problem:
    """One device after the other.

    `seconds` and `nbytes` [n_layer, n_pattern] are the same on all devices, and the latter those of
    its device: the host has no limit. `compute` [n_pattern] is what every device computes in if a
    layer has that pattern (work of the CPU's layers may be done on a device too), `budget`
    [n_device] what is free for layers and computing.
    """

    seconds: Floats
    nbytes: Floats
    compute: Floats
    budget: Floats

    @property
    def n_layer(self) -> int:
        return int(self.seconds.shape[0])

    @property
    def n_pattern(self) -> int:
        return int(self.seconds.shape[1])


@dataclass(frozen=True, slots=True)
class Solution:
    """The pattern of each layer, and its device (-1: the CPU)."""

    seconds: float
    patterns: tuple[int, ...]
    devices: tuple[int, ...]


def search(problem: Problem) -> list[Solution]:
    """The best of all, and the best of few runs of equal layers; fastest first; may be empty."""
    found = [*_few_runs(problem), *_best(problem)]
    unique = {(s.patterns, s.devices): s for s in found}
    return sorted(unique.values(), key=lambda s: s.seconds)


def exhaustive(problem: Problem) -> Solution | None:
    """The best of all for one device, by trying everything: for small problems only."""
    n, best = problem.n_layer, None
    layers = np.arange(n)
    for patterns in itertools.product(range(problem.n_pattern), repeat=n):
        if not _is_in_order(patterns):
            continue
        chosen = np.array(patterns)
        used = problem.nbytes[layers, chosen].sum() + problem.compute[chosen].max()
        seconds = float(problem.seconds[layers, chosen].sum())
        if used <= problem.budget[0] and (best is None or seconds < best.seconds):
            best = Solution(seconds, patterns, _on_first(patterns))
    return best


def _is_in_order(patterns: Sequence[int]) -> bool:
    """Whether layers on the CPU come first."""
    on_device = False
    for p in patterns:
        if p == ON_CPU and on_device:
            return False
        on_device |= p != ON_CPU
    return True


def _on_first(patterns: Sequence[int]) -> tuple[int, ...]:
    return tuple(-1 if p == ON_CPU else 0 for p in patterns)


# ---------------------------------------------------------------- few runs, one device
def _few_runs(problem: Problem) -> list[Solution]:
    """The best of one, two and three runs of equal layers, and of layers that are not parted."""
    if len(problem.budget) > 1:
        return []
    n = problem.n_layer
    time, size = _sums(problem.seconds), _sums(problem.nbytes)
    a, b = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    in_order = a <= b
    best: dict[object, Solution] = {}
    for p, q, r in itertools.product(range(problem.n_pattern), repeat=3):
        if ON_CPU in (q, r):
            continue
        seconds = _of_runs(time, p, q, r)
        used = _of_runs(size, p, q, r) + problem.compute[[p, q, r]].max()
        seconds[~in_order | (used > problem.budget[0])] = np.inf
        i, j = (int(k) for k in np.unravel_index(int(seconds.argmin()), seconds.shape))
        if np.isfinite(seconds[i, j]):
            patterns = (p,) * i + (q,) * (j - i) + (r,) * (n - j)
            found = Solution(float(seconds[i, j]), patterns, _on_first(patterns))
            kinds: list[object] = [len(list(itertools.groupby(patterns)))]
            if {p, q, r} <= {ON_CPU, WHOLE}:
                kinds.append("whole layers")
            for kind in kinds:
                if kind not in best or found.seconds < best[kind].seconds:
                    best[kind] = found
    return list(best.values())


def _sums(values: Floats) -> Floats:
    """Of the first 0, 1, 2... layers: [n_pattern, n_layer + 1]."""
    zeros = np.zeros((1, values.shape[1]))
    return np.concatenate([zeros, values.cumsum(axis=0)]).T


def _of_runs(sums: Floats, p: int, q: int, r: int) -> Floats:
    """Layers 0..a-1 of pattern p, a..b-1 of q, the rest of r: [a, b]."""
    first = (sums[p] - sums[q])[:, None]
    second = (sums[q] - sums[r])[None, :]
    total: Floats = first + second + sums[r, -1]
    return total


# ---------------------------------------------------------------- the best of all
def _best(problem: Problem) -> list[Solution]:
    """By dynamic programming over layers and memory, once for each size to compute in."""
    found = []
    for compute in np.unique(problem.compute):
        allowed = np.flatnonzero(problem.compute <= compute)
        if (problem.budget < compute).any():
            break
        solution = _with_patterns(problem, allowed, problem.budget - compute)
        if solution is not None:
            found.append(solution)
    return sorted(found, key=lambda s: s.seconds)[:2]


def _with_patterns(
    problem: Problem, patterns: npt.NDArray[np.intp], budget: Floats
) -> Solution | None:
    """Using some patterns only; None if nothing fits."""
    n = problem.n_layer
    n_devices = len(budget)
    n_cpu = n if ON_CPU in patterns else 0  # so many at most
    patterns = patterns[patterns != ON_CPU]
    # least[i]: seconds of layers i... on the devices from d on; None: they do not fit
    least = np.full(n + 1, np.inf)
    least[n] = 0.0
    choices: list[npt.NDArray[np.intp]] = []
    for d in reversed(range(n_devices)):
        cost = np.stack([_segments(problem, patterns, i, budget[d])[0] for i in range(n + 1)])
        total = cost + least[None, :]
        choices.insert(0, total.argmin(axis=1))
        least = total.min(axis=1)
    on_cpu = np.concatenate([[0.0], problem.seconds[:, ON_CPU].cumsum()])
    total = on_cpu + least
    start = int(total[: n_cpu + 1].argmin())
    if not np.isfinite(total[start]):
        return None
    chosen, devices, i = [ON_CPU] * start, [-1] * start, start
    for d in range(n_devices):
        stop = int(choices[d][i])
        chosen += _trace(problem, patterns, i, stop, budget[d])
        devices += [d] * (stop - i)
        i = stop
    return Solution(float(total[start]), tuple(chosen), tuple(devices))


def _segments(
    problem: Problem, patterns: npt.NDArray[np.intp], start: int, budget: float
) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """Least seconds of layers start..j-1 on one device for every j, and each layer's choices."""
    n = problem.n_layer
    cost = np.full(n + 1, np.inf)
    cost[start] = 0.0
    kept: list[npt.NDArray[np.intp]] = []
    if not len(patterns):
        return cost, kept
    units, most = _units(problem, patterns, budget)
    state = np.zeros(most + 1)  # least seconds with at most so many units
    for il in range(start, n):
        options = np.full((len(patterns), most + 1), np.inf)
        for k, (need, p) in enumerate(zip(units[il], patterns, strict=True)):
            if need <= most:
                options[k, need:] = state[: most + 1 - need] + problem.seconds[il, p]
        kept.append(options.argmin(axis=0))
        state = options.min(axis=0)
        cost[il + 1] = state[most]
        if not np.isfinite(cost[il + 1]):
            break
    return cost, kept


def _units(
    problem: Problem, patterns: npt.NDArray[np.intp], budget: float
) -> tuple[npt.NDArray[np.int64], int]:
    """Sizes in whole steps, rounded up, and how many steps there are."""
    step = max(budget / STEPS, 1.0)
    sizes: npt.NDArray[np.int64] = np.ceil(problem.nbytes[:, patterns] / step).astype(np.int64)
    return sizes, int(budget / step)


def _trace(
    problem: Problem, patterns: npt.NDArray[np.intp], start: int, stop: int, budget: float
) -> list[int]:
    """The patterns of layers start..stop-1 that `_segments` has found."""
    patterns = patterns[patterns != ON_CPU]
    _, kept = _segments(problem, patterns, start, budget)
    units, left = _units(problem, patterns, budget)
    found: list[int] = []
    for il in reversed(range(start, stop)):
        k = int(kept[il - start][left])
        found.insert(0, int(patterns[k]))
        left -= units[il, k]
    return found


def tidy(solution: Solution, classes: Sequence[object]) -> Solution:
    """The same with equal layers of a device sorted by pattern, which makes shorter rules."""
    patterns = list(solution.patterns)
    groups: dict[tuple[object, int], list[int]] = {}
    for il, (kind, device) in enumerate(zip(classes, solution.devices, strict=True)):
        groups.setdefault((kind, device), []).append(il)
    for layers in groups.values():
        for il, p in zip(layers, sorted(patterns[il] for il in layers), strict=True):
            patterns[il] = p
    return Solution(solution.seconds, tuple(patterns), solution.devices)
