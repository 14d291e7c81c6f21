"""How long a schedule would take, told from its splits alone: nothing is allocated or computed.

It walks through the calls that running the splits would make (copies of inputs, waits, launches)
with the clocks of the host, of each device's stream and of its copy engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.backend import BufferType, DeviceType, buffer_of, is_weight
from pyggml.cost import Rates, dense_bytes, expected_experts, node_cost
from pyggml.dtypes import GGMLType
from pyggml.errors import UserError
from pyggml.ops import Op, TensorFlag
from pyggml.sched import Scheduler
from pyggml.sched_run import EXPERT_OVERRUN
from pyggml.sched_split import Split
from pyggml.tensor import Tensor

_INPUT, _COMPUTE = int(TensorFlag.INPUT), int(TensorFlag.COMPUTE)
_IDS = 2  # the source of MUL_MAT_ID that holds them


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What one device has to do: seconds of its engines, bytes, calls."""

    name: str
    compute: float
    h2d: float
    d2h: float
    h2d_bytes: float
    d2h_bytes: float
    peer_bytes: float
    n_nodes: int
    n_splits: int
    n_copies: int


@dataclass(frozen=True, slots=True)
class SplitTime:
    """From when to when the host was busy with a split; what its device and copies took."""

    backend: str
    start: float
    stop: float
    compute: float
    copied: float  # bytes
    n_inputs: int
    n_nodes: int
    copying: float  # seconds of copy engines


@dataclass(frozen=True, slots=True)
class Estimate:
    """Modelled, not measured. `host_weights`: bytes of weights read where the host has them."""

    seconds: float
    devices: tuple[DeviceTime, ...]
    splits: tuple[SplitTime, ...]
    n_syncs: int
    host_weights: float

    @property
    def h2d_bytes(self) -> float:
        return sum(d.h2d_bytes for d in self.devices)

    @property
    def d2h_bytes(self) -> float:
        return sum(d.d2h_bytes for d in self.devices)

    @property
    def peer_bytes(self) -> float:
        return sum(d.peer_bytes for d in self.devices)

    def device(self, name: str) -> DeviceTime:
        """The device of a name."""
        return next(d for d in self.devices if d.name == name)


def estimate(
    sched: Scheduler, *, repeated: bool = True, rates: Mapping[str, Rates] | None = None
) -> Estimate:
    """Of the graph that a scheduler has split last (`reserve_size` and `alloc_graph` do).

    repeated: the graph has run before, so that devices start it by one call. `rates` by name of
    backend replace what the devices say of themselves. Raises UserError if a device knows none.
    """
    return _Walk(sched, repeated, rates or {}).run()


class _Clock:
    """When a device's stream and engines are free again, and what they have done."""

    def __init__(self, rates: Rates, is_host: bool) -> None:
        self.rates = rates
        self.is_host = is_host
        self.stream = 0.0
        self.event = 0.0  # when the latest event of the stream happens
        self.free = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0}
        self.busy = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0}
        self.moved = {"h2d": 0.0, "d2h": 0.0, "peer": 0.0}
        self.n_nodes = self.n_splits = self.n_copies = 0

    def time(self, name: str) -> DeviceTime:
        """What it has done."""
        return DeviceTime(
            name,
            compute=self.busy["compute"],
            h2d=self.busy["h2d"],
            d2h=self.busy["d2h"],
            h2d_bytes=self.moved["h2d"],
            d2h_bytes=self.moved["d2h"],
            peer_bytes=self.moved["peer"],
            n_nodes=self.n_nodes,
            n_splits=self.n_splits,
            n_copies=self.n_copies,
        )


class _Walk:
    """The calls of one evaluation, in the order of `sched_run`."""

    def __init__(self, sched: Scheduler, repeated: bool, rates: Mapping[str, Rates]) -> None:
        self.sched = sched
        self.repeated = repeated
        self.now = 0.0  # the host
        self.n_syncs = 0
        self.host_weights = 0.0
        self.clocks = [
            _Clock(
                _rates_of(backend.name, rates.get(backend.name) or backend.device.rates()),
                backend.device.type == DeviceType.CPU,
            )
            for backend in sched.backends
        ]
        self._ids: Tensor | None = None  # whose numbers the host has read last
        types = _weight_types(sched)
        for clock in self.clocks:
            if clock.rates.expect is not None:
                clock.rates.expect(types)

    def run(self) -> Estimate:
        spans: list[SplitTime] = []
        previous = -1
        for split in self.sched.splits:
            if not split.inputs and previous not in (-1, split.backend_id):
                self._wait_for_work(previous)
            spans.append(self._split(split))
            self._record(split.backend_id)
            previous = split.backend_id
        for i in range(len(self.clocks)):  # graph_compute synchronizes all
            self._wait(i)
        pairs = zip(self.sched.backends, self.clocks, strict=True)
        devices = tuple(clock.time(backend.name) for backend, clock in pairs)
        return Estimate(self.now, devices, tuple(spans), self.n_syncs, self.host_weights)

    def _split(self, split: Split) -> SplitTime:
        clock = self.clocks[split.backend_id]
        start, busy = self.now, clock.busy["compute"]
        moved, copying = self._moved(), self._copying()
        for i in range(len(split.inputs)):
            self._input(split, i)
        self._compute(split, clock)
        for i in split.results:  # copied back to where they came from
            home = self._home(split.inputs[i])
            self._wait(split.backend_id)
            self._wait(home)
            self._blocking(split.inputs[i], split.backend_id, home)
        return SplitTime(
            self.sched.backends[split.backend_id].name,
            start,
            self.now,
            clock.busy["compute"] - busy,
            self._moved() - moved,
            len(split.inputs),
            len(split.graph.nodes),
            self._copying() - copying,
        )

    def _copying(self) -> float:
        return sum(clock.busy["h2d"] + clock.busy["d2h"] for clock in self.clocks)

    def _moved(self) -> float:
        return sum(sum(clock.moved.values()) for clock in self.clocks)

    # ------------------------------------------------------------ clocks
    def _wait(self, backend_id: int) -> None:
        """The host waits for a device's stream."""
        clock = self.clocks[backend_id]
        if not clock.is_host:
            self.n_syncs += 1
            self.now = max(self.now, clock.stream) + clock.rates.sync

    def _record(self, backend_id: int) -> None:
        """With evaluations in flight each split ends with an event."""
        clock = self.clocks[backend_id]
        if self.sched.n_copies > 1 and not clock.is_host:
            self.now += clock.rates.submit
            clock.event = clock.stream

    def _wait_for_work(self, backend_id: int) -> None:
        """The host waits for a device's latest event, or without events for all it has to do."""
        clock = self.clocks[backend_id]
        if self.sched.n_copies == 1 or clock.is_host:
            self._wait(backend_id)
        else:
            self.n_syncs += 1
            self.now = max(self.now, clock.event) + clock.rates.sync

    def _schedule(self, clock: _Clock, engine: str, seconds: float) -> None:
        """Work in the order of the stream, on an engine that does one thing at a time."""
        begin = max(self.now, clock.stream, clock.free[engine])
        clock.stream = clock.free[engine] = begin + seconds
        clock.busy[engine] += seconds

    def _copy(self, backend_id: int, way: str, nbytes: float, buft: BufferType | None) -> None:
        """A copy between a device and host memory of some kind; None: of nobody in particular.

        Pinned memory is copied while the host goes on. Other memory is copied piece by piece to
        where the device can read it, or waited for.
        """
        clock = self.clocks[backend_id]
        rates, device = clock.rates, self.sched.backends[backend_id].device
        pinned = buft is not None and buft is device.host_buffer_type()
        self.now += rates.submit
        self._transfer(clock, way, nbytes, pinned)
        if not pinned:
            if way == "h2d":
                self.now = max(self.now, clock.stream - rates.copy_latency)
            else:
                self._wait(backend_id)

    def _transfer(self, clock: _Clock, way: str, nbytes: float, pinned: bool) -> None:
        rates = clock.rates
        gbs = rates.h2d_gbs if way == "h2d" else rates.d2h_gbs
        seconds = rates.copy_seconds(nbytes, gbs, pinned=pinned)
        # host memory gives no more
        self._schedule(clock, way, max(seconds, 1e-9 * nbytes / self.clocks[-1].rates.gbs))
        clock.moved[way] += nbytes
        clock.n_copies += 1

    # ------------------------------------------------------------ inputs
    def _home(self, tensor: Tensor) -> int:
        backend = self.sched.get_tensor_backend(tensor)
        assert backend is not None, f"{tensor!r} has no backend"
        return self.sched.backends.index(backend)

    def _memory(self, tensor: Tensor) -> BufferType:
        """The kind of memory where a tensor lies or will lie."""
        buffer = buffer_of(tensor)
        return buffer.buft if buffer is not None else self.sched.bufts[self._home(tensor)]

    def _input(self, split: Split, index: int) -> None:
        tensor, to, home = split.inputs[index], split.backend_id, self._home(split.inputs[index])
        if int(tensor.flags) & _INPUT:
            self._wait_for_work(to)
            self._blocking(tensor, home, to)
            return
        has_experts = split.copies_used_experts(index)
        if self.sched.n_copies == 1:
            self._wait(to)
        elif not has_experts:
            self._order(home, to)
        if has_experts:
            self._experts(split, index)
        elif self._is_direct(home, to):
            self._peer(home, to, dense_bytes(tensor))
        else:
            self._wait(home)
            self._blocking(tensor, home, to)

    def _order(self, home: int, to: int) -> None:
        """The source's stream, or the host, waits for the target's event."""
        source, target = self.clocks[home], self.clocks[to]
        if target.is_host:
            return
        if source.is_host:
            self._wait_for_work(to)
        else:
            self.now += source.rates.submit
            source.stream = max(source.stream, target.event)

    def _is_direct(self, home: int, to: int) -> bool:
        """Whether the devices exchange data in the order of their streams."""
        source, target = (self.sched.backends[i].device for i in (home, to))
        return type(source) is type(target) and source.caps.events and target.caps.events

    def _peer(self, home: int, to: int, nbytes: float) -> None:
        """A copy in the source's stream, for which the target's stream waits."""
        source, target = self.clocks[home], self.clocks[to]
        self.now += source.rates.submit
        gbs = min(source.rates.peer_gbs, target.rates.peer_gbs)
        if gbs:
            begin = max(self.now, source.stream, source.free["d2h"], target.free["h2d"])
            seconds = source.rates.copy_seconds(nbytes, gbs)
            for clock, way in ((source, "d2h"), (target, "h2d")):
                clock.free[way] = begin + seconds
                clock.busy[way] += seconds
            source.stream = begin + seconds
        else:  # in two steps
            self._transfer(source, "d2h", nbytes, True)
            target.stream, kept = source.stream, target.stream
            self._transfer(target, "h2d", nbytes, True)
            source.stream, target.stream = target.stream, kept
        source.moved["peer"] += nbytes
        source.n_copies += 1
        self.now += source.rates.submit + target.rates.submit  # the event, and the wait for it
        target.stream = max(target.stream, source.stream)

    def _blocking(self, tensor: Tensor, home: int, to: int) -> None:
        """Through host memory; each half is waited for."""
        nbytes = float(tensor.nbytes)
        if self.clocks[home].is_host and is_weight(tensor):
            self.host_weights += nbytes
        host = self._memory(tensor) if self.clocks[home].is_host else None
        if not self.clocks[home].is_host:
            self._copy(
                home, "d2h", nbytes, self.sched.bufts[to] if self.clocks[to].is_host else None
            )
            self._wait(home)
        if not self.clocks[to].is_host:
            self._copy(to, "h2d", nbytes, host)
            self._wait(to)

    def _experts(self, split: Split, index: int) -> None:
        """The ids are read once per layer; each run of used experts is a copy of its own."""
        tensor, ids = split.inputs[index], split.graph.nodes[0].src[_IDS]
        assert ids is not None
        self._wait(self._home(tensor))
        # ids that are copied after the experts are read where they were computed
        others = split.inputs[index + 1 :]
        copied = [t for t in others if t.ne == ids.ne and t.type == ids.type]
        source = copied[0] if copied else ids
        if source is not self._ids:
            home = self._home(source) if copied else split.backend_id
            if not self.clocks[home].is_host:
                self._copy(home, "d2h", float(ids.nbytes), None)
            self._wait(home)
        self._ids = source
        n_expert, size = tensor.ne[2], tensor.nb[2]
        used = expected_experts(n_expert, ids.ne[0], ids.ne[1])
        runs = _expected_runs(n_expert, used)
        # each run but one that ends with the last expert is copied a little too long
        overrun = runs - used / n_expert
        nbytes = used * size + overrun * min(size, EXPERT_OVERRUN)
        self.host_weights += nbytes
        self._runs(split.backend_id, nbytes, runs, self._memory(tensor))

    def _runs(self, backend_id: int, nbytes: float, runs: float, buft: BufferType) -> None:
        """Several copies at once; their number is an expectation."""
        clock = self.clocks[backend_id]
        more = runs - 1.0
        self.now += more * clock.rates.submit
        self._schedule(clock, "h2d", more * clock.rates.copy_latency)
        self._copy(backend_id, "h2d", nbytes, buft)
        clock.n_copies += round(more)

    # ------------------------------------------------------------ nodes
    def _compute(self, split: Split, clock: _Clock) -> None:
        nodes = [node for node in split.graph.nodes if int(node.flags) & _COMPUTE]
        pairs = [(node, node_cost(node)) for node in nodes]
        seconds = [clock.rates.seconds(cost) for _, cost in pairs if not cost.is_free]
        clock.n_splits += 1
        clock.n_nodes += len(seconds)
        if clock.is_host:
            weights = sum(cost.weight_bytes for _, cost in pairs)
            total = max(sum(seconds), 1e-9 * weights / clock.rates.gbs)
            self.now += total
            clock.busy["compute"] += total
            self.host_weights += sum(
                cost.weight_bytes for node, cost in pairs if _reads_weights(node)
            )
        elif self.repeated:
            self.now += clock.rates.submit
            self._schedule(clock, "compute", sum(seconds))
        else:
            for one in seconds:
                self.now += clock.rates.submit
                self._schedule(clock, "compute", one)


def _reads_weights(node: Tensor) -> bool:
    """Whether the matrix of a product is one of the model's."""
    return node.src[0] is not None and is_weight(node.src[0])


def _expected_runs(n_expert: int, used: float) -> float:
    """Runs of consecutive numbers among `used` of them, if all choices are equally likely."""
    if n_expert < 2 or used < 1:
        return 1.0
    return used * (1.0 - (used - 1.0) / n_expert)


_PRODUCTS = (Op.MUL_MAT, Op.MUL_MAT_ID, Op.MUL_MAT_ID_COLD)


def _weight_types(sched: Scheduler) -> set[GGMLType]:
    """Of all products of the graph."""
    nodes = (node for split in sched.splits for node in split.graph.nodes)
    return {node.src[0].type for node in nodes if node.op in _PRODUCTS and node.src[0] is not None}


def _rates_of(name: str, rates: Rates | None) -> Rates:
    if rates is None:
        raise UserError(f"the time of {name} cannot be modelled: nobody knows how fast it is")
    return rates
