"""The graph allocator: the graphs of ggml's test-alloc, edge cases and random graphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_check import check_all_placed, check_max_size, check_no_overlap
from plan_only import BASE, PlanBufferType

from pyggml import build
from pyggml.alloc import GraphAllocator
from pyggml.backend import EmptyBuffer, Usage, alloc_tensors
from pyggml.errors import OutOfMemory
from pyggml.graph import Graph, build_graph
from pyggml.ops import Op
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32


def leaf(nbytes: int) -> Tensor:
    """An F32 vector that is a graph input."""
    return new_tensor(F32, nbytes // 4).as_input()


def mean(a: Tensor) -> Tensor:
    """MEAN, which cannot run in place."""
    return Tensor(F32, (1, *a.ne[1:]), op=Op.MEAN, src=(a,))


def pad_right(a: Tensor, n: int) -> Tensor:
    """PAD by n elements, which cannot run in place."""
    return Tensor(F32, (a.ne[0] + n, *a.ne[1:]), op=Op.PAD, src=(a,))


def graph_of(result: Tensor) -> Graph:
    """The graph of one output."""
    return build_graph([result.as_output()])


def allocate(result: Tensor, max_size: int | None = None, alignment: int = 8) -> int:
    """Allocate the graph of one output, check it, give back the bytes taken."""
    buft = PlanBufferType(alignment=alignment)
    if max_size is not None:
        buft.max_size = max_size
    graph = graph_of(result)
    allocator = GraphAllocator([buft])
    assert allocator.alloc_graph(graph)
    check_all_placed(graph)
    check_no_overlap(graph)
    assert allocator.buffer_size(0) == buft.total
    assert all(b.usage == Usage.COMPUTE for b in buft.buffers)
    if max_size is not None and all(t.nbytes <= max_size for t in (*graph.leafs, *graph.nodes)):
        chunks = len(buft.buffers)
        if chunks < 16:
            check_max_size(graph, max_size)
    return buft.total


# ---------------------------------------------------------------- ggml's cases
def test_max_size_too_many_tensors() -> None:
    x0, x1, x2 = leaf(8), leaf(8), leaf(8)
    x3, x4 = build.mul(x0, x1), build.add(x1, x2)
    x5 = build.add(x3, x0)
    assert allocate(build.add(x4, x5), max_size=16) <= 32


def test_max_size_tensor_too_large() -> None:
    assert allocate(build.concat(leaf(16), leaf(8), 0), max_size=32) <= 56


def test_tensor_larger_than_max_size() -> None:
    assert allocate(build.scale(leaf(24), 2.0), max_size=16) == 24


def test_not_enough_chunks() -> None:
    inputs = [leaf(8) for _ in range(17)]
    total = inputs[0]
    for x in inputs[1:]:
        total = build.add(total, x)
    assert allocate(total, max_size=8) > 128


def test_fill_leftover_space() -> None:
    assert allocate(mean(pad_right(leaf(8), 2)), max_size=16) <= 28


def test_view_in_place() -> None:
    x0 = leaf(16)
    x1 = build.permute(build.reshape(x0, 2, 2), 1, 0, 2, 3)
    x3 = build.view(x1, (2,), offset=4)
    assert allocate(build.add(x3, leaf(8)), max_size=32) <= 24


def test_reuse_and_free() -> None:
    x0, x1, x2 = leaf(24), leaf(8), leaf(8)
    x3 = build.add(x1, x2)
    x4 = pad_right(x0, 2)
    x6 = build.add(x4, build.scale(x4, 2.0))
    x7 = build.view(x6, (2,), offset=8)
    assert allocate(build.add(x3, x7), max_size=40) <= 104


@pytest.mark.parametrize("max_size", [32, None])
def test_merge_free_block(max_size: int | None) -> None:
    x0, x1, x2 = leaf(16), leaf(16), leaf(16)
    means = build.add(mean(x0), mean(x1))
    x6 = pad_right(x2, 2)
    assert allocate(build.add(x6, pad_right(means, 5)), max_size) <= 88


def test_prefer_already_allocated_memory() -> None:
    assert allocate(mean(mean(leaf(24))), max_size=32, alignment=4) <= 28


def test_multiple_buffer_types() -> None:
    a, b = PlanBufferType(32, name="a"), PlanBufferType(name="b")
    a0, a1, b0, b1 = (new_tensor(F32, n) for n in (4, 4, 6, 1))
    alloc_tensors([a0, a1], a)
    alloc_tensors([b0, b1], b)
    x0 = leaf(16)
    x1 = build.mul(x0, a0)
    x2 = pad_right(x1, 2)
    x3 = build.mul(x2, b0)
    x4 = mean(x3)
    x5 = build.add(x4, b1)
    x6 = pad_right(x5, 3)
    x7 = build.add(x6, a1)
    x8 = build.scale(x7, 2.0)
    graph = graph_of(x8)
    where = dict.fromkeys((x0, x1, x2, a0, a1, x7, x8), 0) | dict.fromkeys((x3, x4, x5, x6), 1)
    where |= {b0: 1, b1: 1}
    assert (len(graph.leafs), len(graph.nodes)) == (5, 8)
    allocator = GraphAllocator([a, b])
    ids = [where[t] for t in graph.nodes], [where[t] for t in graph.leafs]
    assert not allocator.alloc_graph(graph)  # with several types the caller has to reserve
    allocator.reserve_n(graph, *ids)
    assert allocator.alloc_graph(graph)
    check_all_placed(graph)
    check_no_overlap(graph)
    for t in (x0, x1, x2, x7, x8):
        assert t.data is not None and t.data - BASE + t.nbytes <= 32
    assert a.total <= 88
    assert b.total <= 56


def test_buffer_size_zero() -> None:
    a, b = PlanBufferType(name="a"), PlanBufferType(name="b")
    graph = graph_of(build.scale(leaf(16), 2.0))
    allocator = GraphAllocator([a, b])
    allocator.reserve_n(graph, [0], [0])
    assert allocator.alloc_graph(graph)
    assert (allocator.buffer_size(0), allocator.buffer_size(1)) == (16, 0)
    assert (a.total, b.total) == (16, 0)


def test_reallocation() -> None:
    buft = PlanBufferType(32, alignment=4)
    allocator = GraphAllocator([buft])
    x0, x1 = leaf(24), leaf(16)
    first = graph_of(build.add(build.view(x0, (4,)), x1))
    assert allocator.alloc_graph(first)
    check_no_overlap(first)
    assert buft.total == 40
    second = graph_of(build.add(leaf(20), leaf(20)))
    assert allocator.alloc_graph(second)
    check_all_placed(second)
    check_no_overlap(second)
    assert buft.total == 40


# ---------------------------------------------------------------- plans and buffers
def chain(n_elements: int) -> Graph:
    """mean(pad(x)): two allocations that cannot be in place."""
    return graph_of(mean(pad_right(leaf(4 * n_elements), 4)))


def test_smaller_graph_reuses_the_plan() -> None:
    buft = PlanBufferType()
    allocator = GraphAllocator([buft])
    allocator.reserve(chain(100))
    buffers = list(buft.buffers)
    for n in (100, 10, 99):
        graph = chain(n)
        assert allocator.alloc_graph(graph)
        check_no_overlap(graph)
    assert buft.buffers == buffers
    assert buffers[0].resets == 3


def test_larger_graph_frees_the_old_buffer_first() -> None:
    size = chain(200)
    need = GraphAllocator([PlanBufferType()]).reserve_size(size, [0, 0], [0])
    buft = PlanBufferType(room=need[0])
    allocator = GraphAllocator([buft])
    allocator.reserve(chain(100))
    assert allocator.alloc_graph(chain(200))
    assert [b.freed for b in buft.buffers] == [True, False]
    allocator.reserve(chain(100))
    assert buft.total == need[0]  # it never shrinks


def test_several_types_are_not_planned_anew_automatically() -> None:
    bufts = [PlanBufferType(), PlanBufferType()]
    allocator = GraphAllocator(bufts)
    allocator.reserve_n(chain(10), [0, 1], [0])
    assert allocator.alloc_graph(chain(10))
    assert not allocator.alloc_graph(chain(11))


def test_equal_types_share_one_buffer() -> None:
    buft = PlanBufferType()
    allocator = GraphAllocator([buft, buft])
    graph = chain(10)
    assert allocator.reserve_size(graph, [0, 1], [1]) == [40 + 56, 0]  # mean fills x's hole
    allocator.reserve_n(graph, [0, 1], [1])
    assert allocator.alloc_graph(graph)
    check_no_overlap(graph)
    assert len(buft.buffers) == 1
    assert (allocator.buffer_size(0), allocator.buffer_size(1)) == (buft.total, 0)


def test_reserve_size_changes_nothing() -> None:
    buft = PlanBufferType()
    allocator = GraphAllocator([buft])
    allocator.reserve(chain(10))
    before = buft.total
    small, large = chain(10), chain(1000)
    (size,) = allocator.reserve_size(large, [0, 0], [0])
    assert buft.total == before and large.nodes[0].data is None
    assert allocator.alloc_graph(small)
    allocator.reserve(large)
    assert buft.total == size > before


def test_out_of_memory_names_type_and_size() -> None:
    buft = PlanBufferType(room=100, name="tiny")
    allocator = GraphAllocator([buft])
    with pytest.raises(OutOfMemory, match="tiny buffer of size 816"):
        allocator.reserve(chain(100))
    assert buft.total == 0
    assert allocator.alloc_graph(chain(5))  # still usable


def test_failure_frees_the_chunks_already_allocated() -> None:
    buft = PlanBufferType(max_size=64, room=100)
    with pytest.raises(OutOfMemory):
        GraphAllocator([buft]).reserve(graph_of(build.concat(leaf(64), leaf(64), 0)))
    assert buft.total == 0


def test_tensor_beyond_all_chunks_is_named() -> None:
    huge = Tensor(F32, (1 << 58, 1 << 3, 1, 1), name="enormous").as_input()
    graph = Graph()
    for x in [leaf(8) for _ in range(15)]:
        graph.expand(x)
    graph.expand(huge)
    with pytest.raises(OutOfMemory, match="enormous.*does not fit plan: 92233"):
        GraphAllocator([PlanBufferType(max_size=8)]).reserve(graph)


# ---------------------------------------------------------------- lifetimes
def addresses(*tensors: Tensor) -> list[int | None]:
    return [t.data for t in tensors]


def test_in_place_takes_the_first_source_of_the_same_layout() -> None:
    x0, x1 = leaf(8), leaf(8)
    y = build.add(x0, x1)
    allocate(y)
    assert y.data == x0.data


def test_in_place_needs_the_same_layout() -> None:
    small, large = leaf(8), leaf(16)
    y = build.add(large, small)
    z = build.mul(y, build.repeat(small, y))
    allocate(z)
    assert y.data == large.data
    assert z.data == y.data


@pytest.mark.parametrize("stay", [False, True])
def test_in_place_may_leave_the_buffer(stay: bool) -> None:
    a, b = PlanBufferType(name="a"), PlanBufferType(name="b")
    allocator = GraphAllocator([a, b, a], stay_in_buffer=stay)
    y = build.scale(leaf(8), 2.0)
    z = build.scale(y, 2.0)
    graph = graph_of(z)
    allocator.reserve_n(graph, [1, 1], [0])
    assert allocator.alloc_graph(graph)
    assert y.buffer is z.buffer is (b if stay else a).buffers[0]
    same_type = graph_of(build.scale(leaf(8), 2.0))
    allocator.reserve_n(same_type, [2], [0])
    assert allocator.alloc_graph(same_type)
    assert same_type.nodes[0].data == same_type.leafs[0].data


def test_output_parent_is_not_overwritten() -> None:
    x = leaf(16)
    y = build.scale(x, 2.0).as_output()
    z = build.scale(y, 2.0)
    allocate(z)
    assert y.data != z.data


def test_parent_with_a_view_is_not_overwritten() -> None:
    x = leaf(16)
    view, y = build.view(x, (4,)), build.scale(x, 2.0)
    graph = Graph()
    for t in (view, y, pad_right(build.add(y, view), 4)):
        graph.expand(t)
    assert GraphAllocator([PlanBufferType()]).alloc_graph(graph)
    check_no_overlap(graph)
    assert y.data != x.data


def test_view_parent_is_not_taken_over() -> None:
    x = pad_right(leaf(16), 4)
    y = build.scale(build.reshape(x, 4, 2), 2.0)
    allocate(y)
    assert y.data != x.data


def test_node_used_twice_by_one_consumer_is_not_overwritten() -> None:
    x = leaf(16)
    y = build.add(x, x)
    allocate(y)
    assert y.data != x.data


def test_inputs_are_not_protected_after_their_last_use() -> None:
    x = leaf(16)
    y, z = pad_right(x, 0), pad_right(x, 0)
    total = mean(build.concat(y, z, 0))
    allocate(total)
    assert total.data == x.data


def test_smaller_result_frees_the_tail_of_its_parent() -> None:
    class Scratch(PlanBufferType):
        """TOP_K needs 64 bytes of scratch space behind its result."""

        def alloc_size(self, tensor: Tensor) -> int:
            return tensor.nbytes + (64 if tensor.op == Op.TOP_K else 0)

    buft = Scratch()
    x = leaf(16)
    y = Tensor(F32, x.ne, op=Op.TOP_K, src=(x,))
    z = build.scale(y, 2.0)
    w = build.concat(pad_right(z, 8), z, 0)
    graph = graph_of(w)
    allocator = GraphAllocator([buft])
    assert allocator.alloc_graph(graph)
    assert z.data == y.data and graph.nodes[2].op == Op.PAD
    assert graph.nodes[2].data == (z.data or 0) + 16  # in the freed scratch space


def test_zero_sized_tensors() -> None:
    empty = new_tensor(F32, 0, 4).as_input()
    y = build.scale(empty, 2.0)
    strided = build.view(y, (0, 2), (64,), offset=8)
    assert strided.nbytes == 0
    graph = graph_of(build.cont(strided))
    buft = PlanBufferType()
    allocator = GraphAllocator([buft])
    assert allocator.alloc_graph(graph)
    assert buft.buffers == []
    assert all(isinstance(t.buffer, EmptyBuffer) and t.data is not None for t in graph.nodes)
    assert allocator.buffer_size(0) == 0
    again = graph_of(build.cont(build.scale(leaf(8), 2.0)))
    again.expand(build.mul(leaf(8), leaf(8)).as_output())
    assert allocator.alloc_graph(again)
    check_all_placed(again)


def test_preallocated_tensors_are_left_alone() -> None:
    buft = PlanBufferType()
    weight = new_tensor(F32, 4)
    buffer = alloc_tensors([weight], buft)
    part = build.view(weight, (2,), offset=8)
    y = build.mul(leaf(8), part)
    graph = graph_of(y)
    assert GraphAllocator([buft]).alloc_graph(graph)
    assert (weight.buffer, weight.data) == (buffer, BASE)
    assert (part.buffer, part.data) == (buffer, BASE + 8)


# ---------------------------------------------------------------- random graphs
SHAPES = ((4,), (8,), (4, 2), (0, 4), (2, 2, 2))


def _unary(draw: st.DrawFn, a: Tensor) -> Tensor:
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return build.scale(a, 2.0)
    if kind == 1:
        return build.rms_norm(a, 1e-6)
    if kind == 2:
        return build.cont(a)
    if kind == 3:
        return build.transpose(a)
    if kind == 4 and a.is_contiguous:
        return build.reshape(a, a.nelements)
    if kind == 5:
        return build.view(a, (a.ne[0], a.ne[1]), (a.nb[1],))
    if kind == 6:
        return pad_right(a, draw(st.integers(0, 3)))
    return build.sum_rows(a)


def _binary(draw: st.DrawFn, a: Tensor, b: Tensor) -> Tensor | None:
    kind = draw(st.integers(0, 4))
    if kind == 0 and a.ne[1:] == b.ne[1:]:
        return build.concat(a, b, 0)
    if kind == 1 and a.nelements == b.nelements:
        return build.cpy(a, b)
    if not b.can_repeat_to(a):
        return None
    return build.add(a, b) if kind % 2 else build.mul(a, b)


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Chains, fans, views, writes through views and outputs over a few inputs."""
    tensors = [
        new_tensor(F32, *draw(st.sampled_from(SHAPES))) for _ in range(draw(st.integers(1, 4)))
    ]
    for t in tensors:
        if draw(st.booleans()):
            t.as_input()
    pick = st.integers(0, 1 << 16)
    for _ in range(draw(st.integers(1, 24))):
        a, b = (tensors[-1 - draw(pick) % len(tensors)] for _ in range(2))
        result = _binary(draw, a, b) if draw(st.booleans()) else None
        result = result or _unary(draw, a)
        if draw(st.integers(0, 9)) == 0:
            result.as_output()
        tensors.append(result)
    graph = Graph()
    if draw(st.booleans()):  # in the order of their creation, not only what the last one needs
        for t in tensors:
            graph.expand(t)
    graph.expand(tensors[-1].as_output())
    for t in draw(st.lists(st.sampled_from(tensors), max_size=3)):
        graph.expand(t, compute=draw(st.booleans()))
    return graph


@given(random_graphs(), st.sampled_from([16, 64, 1 << 40]), st.sampled_from([4, 32]))
def test_random_graphs_never_overlap(graph: Graph, max_size: int, alignment: int) -> None:
    buft = PlanBufferType(max_size, alignment)
    allocator = GraphAllocator([buft])
    assert allocator.alloc_graph(graph)
    check_all_placed(graph)
    check_no_overlap(graph)


@given(random_graphs(), st.data())
def test_random_placements_never_overlap(graph: Graph, data: st.DataObject) -> None:
    shared = PlanBufferType(64, name="shared")
    allocator = GraphAllocator([shared, PlanBufferType(name="own"), shared])
    ids = st.integers(0, 2)
    node_ids = [data.draw(ids) for _ in graph.nodes]
    leaf_ids = [data.draw(ids) for _ in graph.leafs]
    predicted = allocator.reserve_size(graph, node_ids, leaf_ids)
    allocator.reserve_n(graph, node_ids, leaf_ids)
    assert [allocator.buffer_size(i) for i in range(3)] == predicted
    assert allocator.alloc_graph(graph)
    check_all_placed(graph)
    check_no_overlap(graph)
