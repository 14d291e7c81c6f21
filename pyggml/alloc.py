"""The graph allocator: one buffer per buffer type, memory reused after a tensor's last consumer.

`reserve` plans a graph and allocates the buffers; `alloc_graph` gives the tensors of a graph of
the same structure their addresses. The COMPUTE flag plays no role: branches that are not executed
keep their place, so that the layout stays stable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from pyggml.alloc_dynamic import DynamicAllocator
from pyggml.backend import Buffer, BufferType, EmptyBuffer, Usage, pad, view_init
from pyggml.errors import OutOfMemory
from pyggml.graph import Graph
from pyggml.ops import OPS, Op, TensorFlag
from pyggml.placeholder import PlaceholderBuffer
from pyggml.tensor import Tensor

log = logging.getLogger("pyggml.alloc")

# buffer id, chunk, offset in the chunk, bytes reserved
Place = tuple[int, int, int, int]
NOT_PLACED: Place = (-1, 0, 0, 0)

_INPUT = int(TensorFlag.INPUT)
_OUTPUT = int(TensorFlag.OUTPUT)
_IN_PLACE = frozenset(op for op, info in OPS.items() if info.in_place)


class _Measure:
    """One pass over a graph that finds a place for every tensor without memory."""

    def __init__(
        self,
        bufts: Sequence[BufferType],
        allocators: Sequence[DynamicAllocator],
        *,
        stay_in_buffer: bool,
    ) -> None:
        self.bufts = bufts
        self.allocators = allocators
        self.stay_in_buffer = stay_in_buffer
        self.places: dict[Tensor, Place] = {}
        self.live: set[Tensor] = set()  # has a place that nobody else may use yet
        self.children: dict[Tensor, int] = {}  # consumers that have not run
        self.views: dict[Tensor, int] = {}  # views that are still needed

    def run(self, graph: Graph, node_ids: Sequence[int], leaf_ids: Sequence[int]) -> None:
        """Fill `places`; ids are the buffer ids of the graph's nodes and leafs."""
        for leaf, buffer_id in zip(graph.leafs, leaf_ids, strict=True):
            self._place(leaf, buffer_id)
        self._count_uses(graph, node_ids)
        for node, buffer_id in zip(graph.nodes, node_ids, strict=True):
            for src in node.src:
                if src is not None and src not in self.places:
                    self._place(src, buffer_id)
            self._place(node, buffer_id)
            self._release_sources(node)

    def _count_uses(self, graph: Graph, node_ids: Sequence[int]) -> None:
        children, views = self.children, self.views
        for node, buffer_id in zip(graph.nodes, node_ids, strict=True):
            # a view without an operation only prolongs its source's life (scheduler)
            if node.view_src is not None and node.op != Op.NONE:
                views[node.view_src] = views.get(node.view_src, 0) + 1
            if int(node.flags) & _INPUT:
                self._place(node, buffer_id)
            for src in node.src:
                if src is not None:
                    children[src] = children.get(src, 0) + 1
                    if int(src.flags) & _INPUT and src not in self.places:
                        self._place(src, buffer_id)

    def _place(self, tensor: Tensor, buffer_id: int) -> None:
        if (
            tensor.data is not None
            or tensor.view_src is not None
            or tensor.buffer is not None
            or tensor in self.places
        ):
            return
        if tensor.op in _IN_PLACE:
            parent = self._parent_to_take_over(tensor, buffer_id)
            if parent is not None:
                self._take_over(tensor, parent)
                return
        size = self.bufts[buffer_id].alloc_size(tensor)
        try:
            chunk, offset = self.allocators[buffer_id].alloc(size)
        except OutOfMemory as e:
            raise OutOfMemory(f"{tensor!r} does not fit {self.bufts[buffer_id].name}: {e}") from e
        self.places[tensor] = (buffer_id, chunk, offset, size)
        self.live.add(tensor)

    def _parent_to_take_over(self, node: Tensor, buffer_id: int) -> Tensor | None:
        """The first source of which this node is the last user and that has its layout."""
        wanted = self.allocators[buffer_id]
        places = OPS[node.op].in_place
        for parent in node.src[places.start : places.stop]:
            if (
                parent is not None
                and parent in self.live
                and self.children.get(parent) == 1
                and not self.views.get(parent)
                and not int(parent.flags) & _OUTPUT
                and node.same_layout(parent)
                and not (
                    self.stay_in_buffer and self.allocators[self.places[parent][0]] is not wanted
                )
            ):
                return parent
        return None

    def _take_over(self, node: Tensor, parent: Tensor) -> None:
        buffer_id, chunk, offset, parent_size = self.places[parent]
        buft = self.bufts[buffer_id]
        size = buft.alloc_size(node)
        self.places[node] = (buffer_id, chunk, offset, size)
        self.live.discard(parent)
        self.live.add(node)
        kept = pad(size, buft.alignment)
        tail = pad(parent_size, buft.alignment) - kept
        if tail > 0:
            self.allocators[buffer_id].free(chunk, offset + kept, tail)

    def _release_sources(self, node: Tensor) -> None:
        children, views = self.children, self.views
        for src in node.src:
            if src is None:
                continue
            children[src] = left = children[src] - 1
            if left or views.get(src):
                continue
            root = src.view_src
            if root is None:
                self._free(src)
            else:
                views[root] = views.get(root, 0) - 1
                if not views[root] and not children.get(root):
                    self._free(root)

    def _free(self, tensor: Tensor) -> None:
        if tensor in self.live and not int(tensor.flags) & _OUTPUT:
            buffer_id, chunk, offset, size = self.places[tensor]
            self.allocators[buffer_id].free(chunk, offset, size)
            self.live.discard(tensor)


class GraphAllocator:
    """Memory for the tensors of graphs; equal buffer types share one buffer.

    Buffer ids are positions in `bufts`. A reserved plan serves every graph with as many nodes and
    leafs in the same order whose tensors need no more bytes than the reserved ones.

    An in-place operation takes over its source's memory even if that lies in another buffer than
    the one asked for, unless `stay_in_buffer` forbids it. With `no_alloc` buffers have a size only.
    """

    def __init__(
        self, bufts: Sequence[BufferType], *, stay_in_buffer: bool = False, no_alloc: bool = False
    ) -> None:
        self.bufts = tuple(bufts)
        self._new_buffers = _plan_buffers if no_alloc else _new_buffers
        self._stay_in_buffer = stay_in_buffer
        self._first = [self.bufts.index(buft) for buft in self.bufts]
        # one backend buffer per chunk; None: not allocated yet
        self._buffers: list[list[Buffer] | None] = [None] * len(self.bufts)
        self._nodes: list[tuple[Place, list[Place]]] = []
        self._leafs: list[Place] = []

    # ------------------------------------------------------------ planning
    def reserve(self, graph: Graph) -> None:
        """Plan a graph in the first buffer type and allocate. Raises OutOfMemory."""
        self.reserve_n(graph, [0] * len(graph.nodes), [0] * len(graph.leafs))

    def reserve_n(self, graph: Graph, node_ids: Sequence[int], leaf_ids: Sequence[int]) -> None:
        """Plan a graph whose nodes and leafs go to the given buffer ids, and allocate.

        Buffers that are too small are freed first and never shrink. Raises OutOfMemory.
        """
        self._nodes, self._leafs = [], []
        measured = self._measure(graph, node_ids, leaf_ids)
        self._allocate(measured)
        place = measured.places.get
        self._nodes = [
            (
                place(node, NOT_PLACED),
                [NOT_PLACED if s is None else place(s, NOT_PLACED) for s in node.src],
            )
            for node in graph.nodes
        ]
        self._leafs = [place(leaf, NOT_PLACED) for leaf in graph.leafs]

    def reserve_size(
        self, graph: Graph, node_ids: Sequence[int], leaf_ids: Sequence[int]
    ) -> list[int]:
        """Bytes per buffer id that `reserve_n` would need; nothing changes.

        As in `buffer_size`, an id whose buffer type came earlier counts 0.
        """
        allocators = self._measure(graph, node_ids, leaf_ids).allocators
        return [
            sum(allocators[i].chunk_sizes) if first == i else 0
            for i, first in enumerate(self._first)
        ]

    def _measure(self, graph: Graph, node_ids: Sequence[int], leaf_ids: Sequence[int]) -> _Measure:
        own = [DynamicAllocator(buft.alignment, buft.max_size) for buft in self.bufts]
        allocators = [own[first] for first in self._first]
        measure = _Measure(self.bufts, allocators, stay_in_buffer=self._stay_in_buffer)
        measure.run(graph, node_ids, leaf_ids)
        return measure

    def _allocate(self, measured: _Measure) -> None:
        for i, first in enumerate(self._first):
            if first != i:
                continue
            sizes = measured.allocators[i].chunk_sizes
            have = self._buffers[i]
            if have is not None:
                if len(have) >= len(sizes) and all(
                    b.size >= size for b, size in zip(have, sizes, strict=False)
                ):
                    continue
                before = self.buffer_size(i) >> 20
                name, after = self.bufts[i].name, sum(sizes) >> 20
                log.debug("reallocating %s buffer from %d MiB to %d MiB", name, before, after)
                _free_all(have)
                self._buffers[i] = None
            self._buffers[i] = self._new_buffers(self.bufts[i], sizes)

    # ------------------------------------------------------------ addresses
    def alloc_graph(self, graph: Graph) -> bool:
        """Give every tensor of the graph its memory.

        A graph that the plan does not fit is planned anew if there is one buffer type; with several
        the answer is False and the caller has to `reserve_n`. Raises OutOfMemory.
        """
        if not self._fits(graph):
            if len(self.bufts) > 1:
                return False
            self.reserve(graph)
        for buffers in self._buffers:
            for buffer in buffers or ():
                buffer.reset()
        for leaf, place in zip(graph.leafs, self._leafs, strict=True):
            self._assign(leaf, place)
        for node, (place, src_places) in zip(graph.nodes, self._nodes, strict=True):
            for src, src_place in zip(node.src, src_places, strict=True):
                if src is not None and src.buffer is None:
                    self._assign(src, src_place)
            self._assign(node, place)
        return True

    def _fits(self, graph: Graph) -> bool:
        if len(graph.nodes) != len(self._nodes) or len(graph.leafs) != len(self._leafs):
            return False
        for node, (place, src_places) in zip(graph.nodes, self._nodes, strict=True):
            if node.data is None and node.view_src is None and not self._holds(place, node):
                return False
            if len(node.src) != len(src_places):
                return False
            for src, src_place in zip(node.src, src_places, strict=True):
                if src is None or src.data is not None or src.view_src is not None:
                    continue
                if not self._holds(src_place, src):
                    return False
        return True

    def _holds(self, place: Place, tensor: Tensor) -> bool:
        return place[0] >= 0 and self.bufts[place[0]].alloc_size(tensor) <= place[3]

    def _assign(self, tensor: Tensor, place: Place) -> None:
        if tensor.view_src is not None:
            if tensor.buffer is None and tensor.view_src.buffer is not None:
                view_init(tensor)
        elif tensor.data is None:
            buffer_id, chunk, offset, _ = place
            assert buffer_id >= 0, f"{tensor!r} is not in the plan"
            buffers = self._buffers[self._first[buffer_id]]
            assert buffers is not None
            tensor.buffer = buffers[chunk]
            tensor.data = tensor.buffer.base + offset
            tensor.buffer.init_tensor(tensor)

    def buffer_size(self, buffer_id: int) -> int:
        """Bytes allocated for a buffer id; 0 if an earlier id has the same buffer type."""
        return sum(buffer.size for buffer in self.buffers(buffer_id))

    def buffers(self, buffer_id: int) -> Sequence[Buffer]:
        """The buffers of an id; none if an earlier id has the same buffer type."""
        return (self._buffers[buffer_id] or ()) if self._first[buffer_id] == buffer_id else ()


def _free_all(buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        buffer.free()


def _plan_buffers(buft: BufferType, sizes: Sequence[int]) -> list[Buffer]:
    return [PlaceholderBuffer(buft, size) for size in sizes]


def _new_buffers(buft: BufferType, sizes: Sequence[int]) -> list[Buffer]:
    """One buffer for each chunk. Raises OutOfMemory; then none stays allocated."""
    buffers: list[Buffer] = []
    try:
        for size in sizes:
            buffers.append(buft.alloc_buffer(size) if size else EmptyBuffer(buft))
    except OutOfMemory as e:
        _free_all(buffers)
        raise OutOfMemory(
            f"failed to allocate {buft.name} buffer of size {sum(sizes)} for a graph\n"
            f"{e}\na smaller batch (-ub) or context (-c) needs less"
        ) from e
    for buffer in buffers:
        buffer.set_usage(Usage.COMPUTE)
    return buffers
