"""Checks of a graph's memory, written without the allocator's own bookkeeping."""

from pyggml.graph import Graph
from pyggml.ops import OPS, TensorFlag
from pyggml.tensor import Tensor


def root(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory."""
    return tensor.view_src or tensor


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two allocated tensors share a byte."""
    assert a.data is not None and b.data is not None
    if a.buffer is not b.buffer or not a.nbytes or not b.nbytes:
        return False
    return a.data < b.data + b.nbytes and b.data < a.data + a.nbytes


def last_touch(graph: Graph) -> dict[Tensor, int]:
    """Index of the last node that reads or writes the memory of each root."""
    last: dict[Tensor, int] = {}
    for i, node in enumerate(graph.nodes):
        for tensor in (node, *node.src):
            if tensor is not None:
                last[root(tensor)] = i
    return last


def check_all_placed(graph: Graph) -> None:
    """Every node has a buffer and an address inside it."""
    for node in graph.nodes:
        assert node.buffer is not None and node.data is not None, node
        buffer = node.buffer
        assert buffer.base <= node.data, node
        assert node.data + node.nbytes <= buffer.base + buffer.size, node


def check_no_overlap(graph: Graph) -> None:
    """No live tensor is overwritten; only an in-place operation may take its source's place."""
    last = last_touch(graph)
    owners = [t for t in dict.fromkeys(graph.leafs) if t.view_src is None]
    for i, leaf in enumerate(owners):
        assert not any(overlap(leaf, other) for other in owners[:i]), leaf
    for i, node in enumerate(graph.nodes):
        if node.view_src is not None or node in owners:
            continue
        for earlier in owners:
            if overlap(earlier, node):
                check_may_replace(earlier, node, i, last)
        owners.append(node)


def check_may_replace(earlier: Tensor, node: Tensor, index: int, last: dict[Tensor, int]) -> None:
    """Whether node number `index` may lie where `earlier` lies."""
    assert TensorFlag.OUTPUT not in earlier.flags, f"{node!r} overwrites the output {earlier!r}"
    if last[earlier] < index:
        return
    places = OPS[node.op].in_place
    in_place = last[earlier] == index and earlier in node.src[places.start : places.stop]
    assert in_place, f"{node!r} overwrites {earlier!r}, which is still needed"
    assert earlier.data == node.data
    assert earlier.same_layout(node)
    readers = [s for s in node.src if s is not None and root(s) is earlier]
    assert readers == [earlier], f"{node!r} reads {earlier!r} twice while overwriting it"


def check_max_size(graph: Graph, max_size: int) -> None:
    """No tensor ends beyond the largest buffer."""
    for tensor in (*graph.leafs, *graph.nodes):
        assert tensor.buffer is not None and tensor.data is not None
        assert tensor.data - tensor.buffer.base + tensor.nbytes <= max_size, tensor
