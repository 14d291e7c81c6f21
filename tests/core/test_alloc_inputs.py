"""Inputs have memory of their own; a plan serves graphs of which nothing has grown."""

import pytest
from memory_check import check_all_placed, overlap
from plan_only import PlanBuffer, PlanBufferType

from pyggml import build
from pyggml.alloc import GraphAllocator
from pyggml.graph import Graph, build_graph
from pyggml.ops import Op, TensorFlag
from pyggml.tensor import Tensor, new_tensor


def vector() -> Tensor:
    return new_tensor(build.F32, 4)


def test_inputs_that_are_no_leafs_of_the_graph() -> None:
    """A part of a graph has none; its inputs are written before its first node runs."""
    early, late = vector().as_input(), vector().as_input()
    a = build.cont(early)
    b = build.cont(a)
    c = build.cont(b)
    y = build.add(c, late).as_output()
    whole = build_graph([y])
    part = whole.view(0, len(whole.nodes))
    assert part.leafs == []
    assert GraphAllocator([PlanBufferType()]).alloc_graph(part)
    assert not any(overlap(late, t) for t in (early, a, b, c))


def test_inputs_that_are_nodes() -> None:
    """Parameters are listed among the nodes, here behind others."""
    x, parameter = vector().as_input(), vector().as_input()
    parameter.flags |= TensorFlag.PARAM
    a = build.cont(x)
    b = build.cont(a)
    y = build.add(b, parameter).as_output()
    graph = build_graph([y])
    assert graph.nodes == [a, b, parameter, y]
    for node in (y, parameter):  # as if nobody had met it as a source
        node.src = [s for s in node.src if s is not parameter]
    y.src = [b, x]
    assert GraphAllocator([PlanBufferType()]).alloc_graph(graph)
    assert not any(overlap(parameter, t) for t in (x, a, b))


def sized(n_input: int, n_result: int) -> Graph:
    """One node of sizes that do not depend on each other."""
    x = new_tensor(build.F32, n_input).as_input()
    return build_graph([Tensor(build.F32, (n_result, 1, 1, 1), op=Op.PAD, src=(x,)).as_output()])


@pytest.mark.parametrize(("n_input", "n_result"), [(4, 400), (400, 4)])
def test_what_has_grown_needs_another_plan(n_input: int, n_result: int) -> None:
    first, second = PlanBufferType(), PlanBufferType()
    allocator = GraphAllocator([first, second])
    allocator.reserve_n(sized(4, 4), [0], [0])
    assert allocator.alloc_graph(sized(4, 4))
    grown = sized(n_input, n_result)
    assert not allocator.alloc_graph(grown)
    allocator.reserve_n(grown, [0], [0])
    assert allocator.alloc_graph(grown)
    check_all_placed(grown)


def test_buffers_are_told_of_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Tensor] = []
    monkeypatch.setattr(PlanBuffer, "init_tensor", lambda self, tensor: told.append(tensor))
    x = vector().as_input()
    a = build.cont(x)
    view = build.view(a, (2,))
    y = build.cont(view).as_output()
    assert GraphAllocator([PlanBufferType()]).alloc_graph(build_graph([y]))
    assert told == [x, a, view, y]
