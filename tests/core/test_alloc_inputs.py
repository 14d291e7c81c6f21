"""Inputs have memory of their own until they are read for the last time."""

from memory_check import overlap
from plan_only import PlanBufferType

from pyggml import build
from pyggml.alloc import GraphAllocator
from pyggml.graph import build_graph
from pyggml.ops import TensorFlag
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
