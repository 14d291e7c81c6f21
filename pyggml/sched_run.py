"""Runs the splits of a graph: waits, copies of inputs, work, events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pyggml.backend import Backend, Event, Status, Usage, host_bytes, tensor_copy
from pyggml.ids import ABSENT, check_ids
from pyggml.ops import Op, TensorFlag
from pyggml.sched_split import Cut, Split
from pyggml.tensor import Tensor

# callback(node, True): wanted? callback(node, False): here it is; False stops the split
EvalCallback = Callable[[Tensor, bool], bool]

_INPUT = int(TensorFlag.INPUT)
# kernels for quantized weights may read a little beyond the last row: let them find finite numbers
EXPERT_OVERRUN = 512


class Run:
    """One evaluation of a cut graph."""

    def __init__(
        self,
        backends: Sequence[Backend],
        cut: Cut,
        events: Sequence[Event | None],
        callback: EvalCallback | None,
    ) -> None:
        self.backends = backends
        self.cut = cut
        self.events = events  # per backend, of the copy in use
        self.callback = callback
        self._experts = _UsedExperts(backends, cut)

    def run(self) -> Status:
        """All splits in order; the first status that is not SUCCESS ends it."""
        previous = -1
        for split in self.cut.splits:
            backend_id = split.backend_id
            # copies order the work of two backends; without any, memory that the previous split
            # still uses may belong to this one
            alone = not split.inputs or self.cut.shares_memory
            if alone and previous not in (-1, backend_id):
                self._wait_on_host(previous)
            for i in range(len(split.inputs)):
                self._copy_input(split, i)
            status = self._compute(split)
            if status != Status.SUCCESS:
                return status
            for i in split.results:
                self._copy_back(split, i)
            event = self.events[backend_id]
            if event is not None:
                self.backends[backend_id].event_record(event)
            previous = backend_id
        if self.cut.shares_memory:
            self._wait_on_host(previous)
        return Status.SUCCESS

    def _wait_on_host(self, backend_id: int) -> None:
        event = self.events[backend_id]
        if event is not None:
            event.synchronize()
        else:
            self.backends[backend_id].synchronize()

    # ------------------------------------------------------------ inputs
    def _copy_input(self, split: Split, index: int) -> None:
        tensor = split.inputs[index]
        copy = self.cut.copy_of(split, index)
        if int(tensor.flags) & _INPUT:
            # the user may write the next input as soon as we return: copy it now
            self._wait_on_host(split.backend_id)
            tensor_copy(tensor, copy)
            return
        backend, event = self.backends[split.backend_id], self.events[split.backend_id]
        if event is not None:
            backend.event_wait(event)
        else:
            backend.synchronize()
        if self._experts.applies(split, tensor, copy):
            self._experts.copy(split, index, copy)
            return
        home = self.backends[self.cut.assignment.ids[tensor]]
        if not backend.copy_async(home, tensor, copy):
            home.synchronize()
            self._wait_on_host(split.backend_id)
            tensor_copy(tensor, copy)

    def _copy_back(self, split: Split, index: int) -> None:
        """Write an input that a node has changed to where it came from."""
        target = split.inputs[index]
        self.backends[split.backend_id].synchronize()
        self.backends[self.cut.assignment.ids[target]].synchronize()
        tensor_copy(self.cut.copy_of(split, index), target)

    # ------------------------------------------------------------ nodes
    def _compute(self, split: Split) -> Status:
        backend = self.backends[split.backend_id]
        if self.callback is None:
            return backend.graph_compute(split.graph)
        nodes = split.graph.nodes
        start = 0
        while start < len(nodes):
            stop = start + 1
            while not (wanted := self.callback(nodes[stop - 1], True)) and stop < len(nodes):
                stop += 1
            status = backend.graph_compute(split.graph.view(start, stop))
            if status != Status.SUCCESS:
                return status
            backend.synchronize()
            if wanted and not self.callback(nodes[stop - 1], False):
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

    @staticmethod
    def applies(split: Split, tensor: Tensor, copy: Tensor) -> bool:
        """Whether an input holds experts, weights in host memory, for the split's first node."""
        node, buffer = split.graph.nodes[0], tensor.buffer
        return (
            node.op == Op.MUL_MAT_ID
            and node.src[0] is copy
            and buffer is not None
            and buffer.usage == Usage.WEIGHTS
            and buffer.buft.is_host
        )

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
        backend_id = split.backend_id
        for later in range(index + 1, len(split.inputs)):
            if self.cut.copy_of(split, later) is ids:  # not copied yet
                ids = split.inputs[later]
                backend_id = self.cut.assignment.ids[ids]
                break
        if ids is not self._ids:
            raw = bytearray(ids.nbytes)
            self.backends[backend_id].get_async(ids, memoryview(raw))
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
