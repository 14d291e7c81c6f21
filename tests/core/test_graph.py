"""Graphs: order, use counts, the COMPUTE flag."""

from hypothesis import given
from hypothesis import strategies as st

from pyggml import build
from pyggml.graph import Graph, build_graph, next_uid
from pyggml.ops import Op, TensorFlag
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32


def leaf(name: str = "") -> Tensor:
    return new_tensor(F32, 4, name=name)


def computed(graph: Graph) -> list[bool]:
    return [TensorFlag.COMPUTE in node.flags for node in graph.nodes]


def test_sources_come_first_in_slot_order() -> None:
    a, b, c = leaf("a"), leaf("b"), leaf("c")
    left, right = build.mul(b, a), build.add(a, c)
    top = build.add(left, right)
    graph = build_graph([top])
    assert graph.leafs == [b, a, c] and graph.nodes == [left, right, top]
    assert [graph.use_counts[t] for t in (a, b, c, left, top)] == [2, 1, 1, 1, 0]
    assert computed(graph) == [True] * 3
    assert graph.uid == 0 and next_uid() < next_uid()


def test_anonymous_tensors_get_names() -> None:
    graph = build_graph([build.scale(build.add(leaf(), leaf("bias")), 2.0)])
    assert [t.name for t in (*graph.leafs, *graph.nodes)] == ["leaf_0", "bias", "node_0", "node_1"]


def test_parameters_are_nodes() -> None:
    weight = leaf("weight")
    weight.flags |= TensorFlag.PARAM
    graph = build_graph([build.scale(weight, 2.0)])
    assert graph.leafs == [] and graph.nodes[0] is weight


def test_same_source_twice_counts_twice() -> None:
    a = leaf()
    graph = build_graph([build.mul(a, a)])
    assert graph.use_counts[a] == 2


def test_deep_graphs_do_not_recurse() -> None:
    t = leaf()
    for _ in range(20_000):
        t = build.scale(t, 1.0)
    assert len(build_graph([t]).nodes) == 20_000


def test_unselected_branches_stay_but_are_not_computed() -> None:
    shared = build.scale(leaf(), 2.0)
    first, second = build.scale(shared, 3.0), build.scale(shared, 4.0)
    graph = Graph()
    graph.expand(first, compute=False)
    graph.expand(second)
    assert graph.nodes == [shared, first, second]
    assert computed(graph) == [True, False, True]


def test_branch_without_compute_can_be_computed_later() -> None:
    x = leaf()
    a = build.scale(x, 2.0)
    b = build.scale(a, 2.0)
    graph = Graph()
    graph.expand(b, compute=False)
    assert computed(graph) == [False, False]
    graph.expand(build.scale(b, 2.0))
    assert computed(graph) == [True] * 3
    assert TensorFlag.COMPUTE not in x.flags
    assert graph.use_counts[a] == 1  # visiting again counts nothing again


def test_view_of_a_graph_shares_use_counts() -> None:
    t = leaf()
    nodes = [t := build.scale(t, 2.0) for _ in range(4)]
    graph = build_graph([t])
    part = graph.view(1, 3)
    assert part.nodes == nodes[1:3] and part.leafs == [] and part.uid == 0
    assert part.use_counts is graph.use_counts


def test_find_looks_at_leafs_and_nodes() -> None:
    x = leaf("x")
    y = build.scale(x, 2.0).named("y")
    graph = build_graph([y])
    assert graph.find("x") is x and graph.find("y") is y and graph.find("z") is None


def test_nodes_that_fusion_may_remove() -> None:
    x = leaf()
    once, output = build.scale(x, 2.0), build.scale(x, 3.0).as_output()
    view = build.reshape(once, 2, 2)
    graph = build_graph([build.cont(view), build.sqr(output)])
    assert graph.node_has_n_uses(once, 1) and not graph.node_has_n_uses(once, 2)
    assert not graph.node_has_n_uses(view, 1) and not graph.node_has_n_uses(output, 1)


def test_dot() -> None:
    graph = build_graph([build.scale(leaf("x"), 2.0).named("y")])
    assert graph.dump_dot().splitlines() == [
        "digraph G {",
        "  rankdir = TB;",
        '  t0 [shape=box, label="x\\nNONE f32 [4, 1, 1, 1]"];',
        '  t1 [shape=ellipse, label="y\\nSCALE f32 [4, 1, 1, 1]"];',
        "  t0 -> t1;",
        "}",
    ]


# ---------------------------------------------------------------- against the recursive rule
class Recursive:
    """The rule as ggml states it, by recursion."""

    def __init__(self) -> None:
        self.leafs: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self.uses: dict[Tensor, int] = {}
        self.compute: set[Tensor] = set()

    def visit(self, t: Tensor, compute: bool) -> None:
        if compute and t.op != Op.NONE:
            self.compute.add(t)
        sources = [s for s in t.src if s is not None]
        if t in self.uses:
            for s in sources:
                if compute and s not in self.compute:
                    self.visit(s, compute)
            return
        self.uses[t] = 0
        for s in sources:
            self.visit(s, compute)
            self.uses[s] += 1
        (self.leafs if t.op == Op.NONE else self.nodes).append(t)


pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=30)
roots = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=5)


@given(pairs, roots)
def test_equals_the_recursive_rule(
    edges: list[tuple[int, int]], wanted: list[tuple[int, bool]]
) -> None:
    tensors = [leaf("p"), leaf("q")]
    for a, b in edges:
        tensors.append(build.add(tensors[a % len(tensors)], tensors[b % len(tensors)]))
    graph, rule = Graph(), Recursive()
    for root, compute in wanted:
        graph.expand(tensors[root % len(tensors)], compute=compute)
        rule.visit(tensors[root % len(tensors)], compute)
    assert (graph.leafs, graph.nodes) == (rule.leafs, rule.nodes)
    assert graph.use_counts == rule.uses
    assert {t for t in graph.nodes if TensorFlag.COMPUTE in t.flags} == rule.compute
