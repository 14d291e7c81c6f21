"""Which placement of a model is fastest on some devices: the answer of pyllama-plan.

Layers are costed one by one (planner_layers), the best combinations are searched
(planner_search), written as flags (planner_rules), and the best few are planned for real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyggml.backend import Device, DeviceType
from pyggml.cost import Rates
from pyggml.errors import ConfigError, OutOfMemory
from pyggml.estimate import Estimate, estimate
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.fit_model import quiet
from pyggml.llama.loader import Model, ModelFile, ModelParams, load_model, open_model
from pyggml.llama.memory_table import MemoryTable, memory_table
from pyggml.llama.placement_params import ALL_LAYERS, PlacementParams
from pyggml.llama.planner_layers import LayerCost, Layers, Mode, patterns_of
from pyggml.llama.planner_rules import OUTPUT, Moved, rules_of, shortest_flags
from pyggml.llama.planner_search import WHOLE, Floats, Problem, Solution, search, tidy

MIB = 1 << 20
# what counts, in tokens: one that is generated, and so many of prompts
GOALS: Mapping[str, tuple[float, float]] = {
    "generation": (1.0, 0.0),
    "prompt": (0.0, 1.0),
    "mix": (1.0, 4.0),
}
ATTEMPTS = 16  # plans made for real, at most
STEP = 4 * MIB  # of allocations on a device, about
CLOSE = 0.003  # share of the time for which a shorter line is preferred
WORTH = 0.1  # share of a device that keys and values must take to be kept elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerParams:
    """What a plan is for. `margin`: bytes of each device that stay free.

    `ram`: bytes of the host for weights; None: what is available. `disk_gbs`: what the host reads
    of weights that it cannot keep; 0: unknown, then this is left out.
    """

    goal: str = "mix"
    margin: int = 1024 * MIB
    n_best: int = 3
    ram: int | None = None
    disk_gbs: float = 0.0
    rates: Mapping[str, Rates] = field(default_factory=dict)  # instead of what devices say

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise ConfigError(f"--for {self.goal}: one of {', '.join(GOALS)}")


@dataclass(frozen=True, slots=True)
class Flags:
    """A placement as flags that llama.cpp understands as well."""

    n_gpu_layers: int
    rules: str = ""  # as `shortest_flags` writes them
    tensor_split: tuple[int, ...] = ()
    mode: Mode = Mode()

    def __str__(self) -> str:
        words = [f"-ngl {self.n_gpu_layers}"]
        if self.tensor_split:
            words.append(f"-ts {','.join(map(str, self.tensor_split))}")
        words.append(self.rules)
        words += [
            word
            for word, given in (
                ("-nkvo", not self.mode.kv_offload),
                ("--no-op-offload", not self.mode.op_offload),
                ("--no-host", self.mode.no_host),
            )
            if given
        ]
        return " ".join(word for word in words if word)

    @property
    def placement(self) -> PlacementParams:
        """The same for the loader."""
        return PlacementParams(
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=tuple(map(float, self.tensor_split)),
            rules=rules_of(self.rules),
            no_host=self.mode.no_host,
            fit=False,
        )

    def context(self, params: ContextParams) -> ContextParams:
        """The parameters of a context with them."""
        return replace(params, kv_offload=self.mode.kv_offload, op_offload=self.mode.op_offload)


@dataclass(frozen=True, slots=True)
class Modelled:
    """Times of a plan, not measured: seconds of one token and of a ubatch when memory is full."""

    token: float
    ubatch: float
    n_ubatch: int
    missing: float  # share of the host's weights that are read from disk each time
    token_estimate: Estimate
    ubatch_estimate: Estimate

    @property
    def generation_rate(self) -> float:
        """Tokens per second."""
        return 1 / self.token

    @property
    def prompt_rate(self) -> float:
        """Tokens per second."""
        return self.n_ubatch / self.ubatch


@dataclass(frozen=True, slots=True)
class Planned:
    """What lies where, and how fast that would be."""

    memory: MemoryTable
    modelled: Modelled
    host_bytes: int  # weights that the host keeps


@dataclass(frozen=True, slots=True)
class Choice(Planned):
    """One of the best placements: its flags, and what they do."""

    flags: Flags
    layers: Sequence[str]  # names of devices
    moved: Mapping[str, int]  # matrices on the CPU though their layer is not: in how many layers


@dataclass(frozen=True, slots=True)
class Plan:
    """The best placements, fastest first, and how many were looked at."""

    goal: str
    choices: tuple[Choice, ...]
    n_searched: int


def score(modelled: Modelled, goal: str) -> float:
    """Seconds of what the goal counts."""
    generated, read = GOALS[goal]
    return generated * modelled.token + read * modelled.ubatch / modelled.n_ubatch


def plan(
    path: str | Path,
    devices: Sequence[Device],
    params: ContextParams,
    options: PlannerParams | None = None,
    model_params: ModelParams | None = None,
) -> Plan:
    """Search. The file may be a header only. Raises UserError if no device or nothing fits."""
    options, base = options or PlannerParams(), model_params or ModelParams()
    if all(device.type == DeviceType.CPU for device in devices):
        raise ConfigError(
            "there is no GPU to plan for: name one to simulate, as --sim-device rtx3060"
        )
    with quiet():  # the same is loaded again and again
        search = _Planner(Path(path), tuple(devices), params, options, base)
        try:
            return search.run()
        finally:
            search.close()


def modelled(model: Model, context: Context, options: PlannerParams) -> tuple[Modelled, int]:
    """The times of a planned context, and the bytes of weights that the host keeps."""
    n = min(context.params.n_ctx, context.params.n_ubatch)
    token, ubatch = (estimate(context.plan_graph(k)[0], rates=options.rates) for k in (1, n))
    host_bytes = _host_bytes(model)
    missing = missing_share(host_bytes, model.devices[-1], options)
    disk = options.disk_gbs
    found = Modelled(
        token.seconds + _reading(token.host_weights, missing, disk),
        ubatch.seconds + _reading(ubatch.host_weights, missing, disk),
        *(n, missing, token, ubatch),
    )
    return found, host_bytes


def _host_bytes(model: Model) -> int:
    """Weights in memory of the host, repacked or not."""
    gpus = {gpu.buffer_type() for gpu in model.placement.gpus}
    tensors = model.weights.tensors.values()
    return sum(t.nbytes for t in tensors if t.buffer is not None and t.buffer.buft not in gpus)


def missing_share(host_bytes: float, cpu: Device, options: PlannerParams) -> float:
    """What part of the host's weights its memory cannot keep."""
    room = options.ram if options.ram is not None else cpu.memory().free
    return max(0.0, 1.0 - room / host_bytes) if host_bytes > 0 else 0.0


def _reading(nbytes: float, missing: float, disk_gbs: float) -> float:
    return 1e-9 * nbytes * missing / disk_gbs if disk_gbs else 0.0


class _Candidate(NamedTuple):
    """A solution before it is planned for real."""

    seconds: float  # of the goal
    mode: Mode
    solution: Solution
    flags: Flags


def in_order(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Fastest first, but for those to which a shorter line comes close: they come last.

    Among the last, other modes than the fastest one's come first: they show what it is worth.
    """
    ranked = sorted(candidates, key=lambda c: c.seconds)
    rest = [c for c in ranked if any(_is_nicer(other, c) for other in ranked)]
    kept = [c for c in ranked if c not in rest]
    slower = [c for c in rest if c.seconds >= min(k.seconds for k in kept)]
    return [*kept, *sorted(slower, key=lambda c: c.mode == kept[0].mode)]


def _is_nicer(a: _Candidate, b: _Candidate) -> bool:
    return len(str(a.flags)) < len(str(b.flags)) and a.seconds < b.seconds * (1 + CLOSE)


class _Planner:
    """One search."""

    def __init__(
        self,
        path: Path,
        devices: tuple[Device, ...],
        params: ContextParams,
        options: PlannerParams,
        base: ModelParams,
    ) -> None:
        self.devices = devices
        self.options = options
        self.base = base
        self.file = open_model(path, base.overrides, allow_no_data=True)
        everything = PlacementParams(n_gpu_layers=ALL_LAYERS, tensor_split=(1.0,), fit=False)
        self.model = self._load(everything)
        self.gpus = self.model.placement.gpus
        self.layers = Layers(self.model, params, options.rates)
        self.params = self.layers.params
        self.patterns = patterns_of(self.layers.movable)
        self.n_searched = 0

    def close(self) -> None:
        self.layers.close()
        self.model.close()  # and the file

    def _load(self, placement: PlacementParams) -> Model:
        params = replace(self.base, placement=placement)
        return load_model(self.file, params, devices=self.devices, no_alloc=True)

    # ------------------------------------------------------------ the search
    def run(self) -> Plan:
        lacking = {mode: np.zeros(len(self.gpus)) for mode in self._modes()}
        candidates = in_order([c for mode in lacking for c in self._search(mode, lacking[mode])])
        choices: dict[str, Choice] = {}
        for _ in range(ATTEMPTS):
            if not candidates or len(choices) == self.options.n_best:
                break
            _, mode, solution, flags = candidates.pop(0)
            if str(flags) in choices:
                continue
            choice, missing = self._try(flags, solution)
            if choice is not None:
                choices[str(flags)] = choice
            else:  # the small graphs promised too much: look again with less room
                lacking[mode] += missing + STEP * (missing > 0)
                others = [c for c in candidates if c.mode != mode]
                candidates = in_order([*others, *self._search(mode, lacking[mode])])
        if not choices:
            raise OutOfMemory(self._nothing_fits())
        goal = self.options.goal
        best = sorted(choices.values(), key=lambda c: score(c.modelled, goal))
        return Plan(goal, tuple(best), self.n_searched)

    def _modes(self) -> list[Mode]:
        found = [Mode(), Mode(op_offload=False), Mode(no_host=True)]
        kept = sum(t.nbytes for part in self.layers.memory.parts for t in part.tensors)
        if kept > WORTH * sum(gpu.memory().free for gpu in self.gpus):
            found += [replace(mode, kv_offload=False) for mode in found]
        if OUTPUT in self.file.gguf.tensors:  # else it is the embedding's, and has its name
            found += [replace(mode, output=False) for mode in found[:3]]
        return found

    def _search(self, mode: Mode, lacking: Floats) -> list[_Candidate]:
        """Solutions with what they score; `lacking` bytes of each device are not to be used."""
        problem = self._problem(mode, lacking)
        if problem is None:
            return []
        self.n_searched += 1
        ends = self._seconds(self.layers.ends(mode))
        found = []
        for solution in search(problem):
            on_cpu = not mode.output or any(p != WHOLE for p in solution.patterns)
            if (mode.no_host or not mode.op_offload) and not on_cpu:
                continue  # the same as without these flags
            if mode.no_host and not self._fits_host(solution):
                continue
            same = [solution, tidy(solution, self.layers.kinds)]
            flags, solution = min(
                ((self._flags(mode, s), s) for s in same), key=lambda pair: len(str(pair[0]))
            )
            found.append(_Candidate(ends + solution.seconds, mode, solution, flags))
        return found

    def _problem(self, mode: Mode, lacking: Floats) -> Problem | None:
        layers, n = self.layers, self.layers.n_layer
        kinds = list(dict.fromkeys(layers.kinds))
        first = [layers.kinds.index(kind) for kind in kinds]
        of_kind = [[layers.cost(il, p, mode) for p in self.patterns] for il in first]
        size_of_kind = [[layers.nbytes(il, p, mode) for p in self.patterns] for il in first]
        compute = [max(layers.compute(il, p, mode)[0] for il in first) for p in self.patterns]
        number = [kinds.index(layers.kinds[il]) for il in range(n)]
        seconds = np.array([[self._seconds(c) for c in of_kind[k]] for k in number])
        nbytes = np.array([size_of_kind[k] for k in number], np.float64)
        budget = np.array([g.memory().free - self.options.margin for g in self.gpus], np.float64)
        budget[-1] -= layers.ends_bytes(mode)
        budget -= lacking
        if (budget < 0).any():
            return None
        return Problem(seconds, nbytes, np.array(compute, np.float64), budget)

    def _seconds(self, cost: LayerCost) -> float:
        """What a layer adds to the goal."""
        generated, read = GOALS[self.options.goal]
        missing, disk = self._missing, self.options.disk_gbs
        token = cost.token + _reading(cost.token_weights, missing, disk)
        ubatch = cost.ubatch + _reading(cost.ubatch_weights, missing, disk)
        return generated * token + read * ubatch / min(self.params.n_ctx, self.params.n_ubatch)

    @cached_property
    def _missing(self) -> float:
        """Before it is known what lies where: as if the devices were full of weights."""
        total = sum(t.nbytes for t in self.model.weights.tensors.values())
        room = sum(max(0, g.memory().free - self.options.margin) for g in self.gpus)
        return missing_share(total - room, self.devices[-1], self.options)

    def _fits_host(self, solution: Solution) -> bool:
        """Whether repacked weights, which are no file that can be read again, have room."""
        tensors = self.model.weights.tensors
        total = 0
        for il, p in enumerate(solution.patterns):
            for name, t in tensors.items():
                if name.startswith(f"blk.{il}.") and self.layers.moves(name, self.patterns[p]):
                    total += t.nbytes
        options = self.options
        room = options.ram if options.ram is not None else self.devices[-1].memory().free
        return total <= room

    # ------------------------------------------------------------ flags
    def _flags(self, mode: Mode, solution: Solution) -> Flags:
        hp = self.model.hparams
        n_cpu = sum(d < 0 for d in solution.devices)
        n_all = hp.n_layer + hp.n_nextn + 1
        layers = self._device_names(solution)
        movable = frozenset(
            (il, m)
            for il in range(hp.n_layer)
            for m in self.layers.movable
            if f"blk.{il}.{m}.weight" in self.model.weights.tensors
        )
        on_cpu = frozenset(
            (il, m) for il, m in movable if m in self.patterns[solution.patterns[il]].moved
        )
        names = tuple(self.model.weights.tensors)
        moved = Moved(movable, on_cpu, layers, names, not mode.output)
        split: tuple[int, ...] = ()
        if len(self.gpus) > 1:
            counts = [layers.count(gpu.name) for gpu in self.gpus]
            counts[-1] += hp.n_nextn + 1
            split = tuple(counts)
        n_gpu = n_all - n_cpu
        whole = next(n for n in (99, 999, n_all) if n >= n_all)
        return Flags(whole if n_cpu == 0 else n_gpu, shortest_flags(moved), split, mode)

    def _device_names(self, solution: Solution) -> list[str]:
        return ["CPU" if d < 0 else self.gpus[d].name for d in solution.devices]

    # ------------------------------------------------------------ for real
    def _try(self, flags: Flags, solution: Solution) -> tuple[Choice | None, Floats]:
        """Plan with flags; or how many bytes each device lacks."""
        none = np.zeros(len(self.gpus))
        try:
            found = planned(
                self.file,
                self.devices,
                flags.context(self.params),
                flags.placement,
                self.options,
                self.base,
            )
        except OutOfMemory:
            return None, none + self.options.margin / 2
        free = np.array([d.free for d in found.memory.devices[: len(self.gpus)]])
        missing = np.maximum(0.0, self.options.margin - free)
        if missing.any():
            return None, missing
        moved: dict[str, int] = {}
        for il, p in enumerate(solution.patterns):
            for name in self.patterns[p].moved:
                there = f"blk.{il}.{name}.weight" in self.model.weights.tensors
                moved[name] = moved.get(name, 0) + there
        names = tuple(self._device_names(solution))
        what = (found.memory, found.modelled, found.host_bytes)
        return Choice(*what, flags=flags, layers=names, moved=moved), none

    def _nothing_fits(self) -> str:
        sizes = ", ".join(f"{g.name} {g.memory().free / MIB:,.0f} MiB" for g in self.gpus)
        return (
            f"not even the output of this model fits into what is free ({sizes}) with "
            f"{self.options.margin / MIB:,.0f} MiB to spare and a context of {self.params.n_ctx}\n"
            "use a smaller --ctx-size or --ubatch-size, or a smaller --fit-target"
        )


def planned(
    file: ModelFile,
    devices: Sequence[Device],
    params: ContextParams,
    placement: PlacementParams,
    options: PlannerParams,
    base: ModelParams | None = None,
) -> Planned:
    """One placement of an open file with its memory and its modelled times. Raises OutOfMemory."""
    model_params = replace(base or ModelParams(), placement=placement)
    model = load_model(file, model_params, devices=devices, no_alloc=True)
    context = Context(model, params, is_trial=True)
    try:
        table = memory_table(model, context)
        times, host_bytes = modelled(model, context, options)
    finally:
        context.close()
    return Planned(table, times, host_bytes)
