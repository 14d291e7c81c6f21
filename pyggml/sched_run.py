"""Runs the splits of a graph: waits, copies of inputs, work, events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml.backend import Backend, Event, Status, copier, host_bytes
from pyggml.ids import ABSENT, check_ids
from pyggml.ops import TensorFlag
from pyggml.sched_split import Cut, Split
from pyggml.tensor import Tensor

# callback(node, True): wanted? callback(node, False): here it is; False stops the split
EvalCallback = Callable[[Tensor, bool], bool]

_INPUT = int(TensorFlag.INPUT)
# kernels for quantized weights may read a little beyond the last row: let them find finite numbers
EXPERT_OVERRUN = 512


@dataclass(slots=True)
class _Input:
    """What is known of one input of a split before anything runs."""

    tensor: Tensor
    copy: Tensor
    home: Backend
    is_graph_input: bool
    has_experts: bool
    move: Callable[[], None]  # copies, blocking


@dataclass(slots=True)
class _Step:
    """A split with its backend and the event of the copy in use."""

    split: Split
    backend: Backend
    event: Event | None
    inputs: list[_Input]
    results: list[Callable[[], None]]  # copy inputs back

    def wait_on_host(self) -> None:
        """Until the backend has done the work before the event's last record."""
        if self.event is not None:
            self.event.synchronize()
        else:
            self.backend.synchronize()


class Run:
    """A cut graph whose tensors have memory: everything that evaluations have in common."""

    def __init__(
        self, backends: Sequence[Backend], cut: Cut, events: Sequence[Event | None]
    ) -> None:
        """`events`: per backend, of the copy in use."""
        self.cut = cut
        self._shares_memory = cut.shares_memory
        self._experts = _UsedExperts(backends, cut)
        self._steps = [
            self._step(backends, split, events[split.backend_id]) for split in cut.splits
        ]

    def _step(self, backends: Sequence[Backend], split: Split, event: Event | None) -> _Step:
        inputs = []
        for i, tensor in enumerate(split.inputs):
            copy = self.cut.copy_of(split, i)
            has_experts = split.copies_used_experts(i)
            home = backends[self.cut.assignment.ids[tensor]]
            is_graph_input = bool(int(tensor.flags) & _INPUT)
            move = copier(tensor, copy)
            inputs.append(_Input(tensor, copy, home, is_graph_input, has_experts, move))
        results = [copier(inputs[i].copy, inputs[i].tensor) for i in split.results]
        return _Step(split, backends[split.backend_id], event, inputs, results)

    def run(self, callback: EvalCallback | None) -> Status:
        """All splits in order; the first status that is not SUCCESS ends it."""
        self._experts.forget()
        previous: _Step | None = None
        for step in self._steps:
            # copies order the work of two backends; without any, memory that the previous split
            # still uses may belong to this one
            alone = not step.inputs or self._shares_memory
            if alone and previous is not None and previous.backend is not step.backend:
                previous.wait_on_host()
            for i, item in enumerate(step.inputs):
                self._copy_input(step, i, item)
            status = _compute(step, callback)
            if status != Status.SUCCESS:
                return status
            for move in step.results:
                step.backend.synchronize()
                move()
            if step.event is not None:
                step.backend.event_record(step.event)
            previous = step
        if self._shares_memory and previous is not None:
            previous.wait_on_host()
        return Status.SUCCESS

    def _copy_input(self, step: _Step, index: int, item: _Input) -> None:
        if item.is_graph_input:
            # the user may write the next input as soon as we return: copy it now
            step.wait_on_host()
            item.move()
            return
        if step.event is None:
            step.backend.synchronize()
        if item.has_experts:
            self._experts.copy(step.split, index, item.copy)
            return
        if step.event is not None:
            # the copy may be made in the stream of its source. ggml lets the split's own backend
            # wait here, which orders nothing
            item.home.event_wait(step.event)
        if not step.backend.copy_async(item.home, item.tensor, item.copy):
            item.home.synchronize()
            item.move()


def _compute(step: _Step, callback: EvalCallback | None) -> Status:
    backend, graph = step.backend, step.split.graph
    if callback is None:
        return backend.graph_compute(graph)
    nodes = graph.nodes
    start = 0
    while start < len(nodes):
        stop = start + 1
        while not (wanted := callback(nodes[stop - 1], True)) and stop < len(nodes):
            stop += 1
        status = backend.graph_compute(graph.view(start, stop))
        if status != Status.SUCCESS:
            return status
        backend.synchronize()
        if wanted and not callback(nodes[stop - 1], False):
            break
        start = stop
    return Status.SUCCESS


class _UsedExperts:
    """Copies only those experts of a host tensor that a MUL_MAT_ID is about to use."""

    def __init__(self, backends: Sequence[Backend], cut: Cut) -> None:
        self.backends = backends
        self.cut = cut
        self._ids: Tensor | None = None  # the ids read last: gate, up and down share them
        self._used: list[int] = []

    def forget(self) -> None:
        """The ids of an earlier evaluation."""
        self._ids = None

    def copy(self, split: Split, index: int, copy: Tensor) -> None:
        """Copy the used experts of input number `index`; the others stay as they are."""
        tensor = split.inputs[index]
        self.backends[self.cut.assignment.ids[tensor]].synchronize()
        ids = split.graph.nodes[0].src[2]
        assert ids is not None
        if ids.is_empty:
            return
        data = host_bytes(tensor)
        n_expert, expert_size = tensor.ne[2], tensor.nb[2]
        for first, last in _runs(self._read_used(split, index, ids)):
            start, stop = first * expert_size, (last + 1) * expert_size
            if last + 1 < n_expert:
                stop += min(expert_size, EXPERT_OVERRUN)
            self.backends[split.backend_id].set_async(copy, data[start:stop], start)

    def _read_used(self, split: Split, index: int, ids: Tensor) -> list[int]:
        """The experts in `ids`, sorted, read where the ids are already known. Raises IdError."""
        if ids is self._ids:
            return self._used
        source, backend_id = ids, split.backend_id
        for later in range(index + 1, len(split.inputs)):
            if self.cut.copy_of(split, later) is ids:  # not copied yet
                source = split.inputs[later]
                backend_id = self.cut.assignment.ids[source]
                break
        raw = bytearray(source.nbytes)
        self.backends[backend_id].get_async(source, memoryview(raw))
        self.backends[backend_id].synchronize()
        shape, strides = (ids.ne[1], ids.ne[0]), (ids.nb[1], ids.nb[0])
        table: npt.NDArray[np.int32] = np.ndarray(shape, np.int32, raw, strides=strides)
        used = np.unique(table)
        check_ids(split.graph.nodes[0], used)
        self._used = used[used != ABSENT].tolist()
        self._ids = ids
        return self._used


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers; they are sorted and distinct."""
    if not numbers:
        return
    first = last = numbers[0]
    for n in numbers[1:]:
        if n != last + 1:
            yield first, last
            first = n
        last = n
    yield first, last
