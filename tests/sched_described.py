"""Compares a split graph as data with the scheduler that it describes."""

from pyggml.sched import Scheduler
from pyggml.sched_graph import SplitGraph, describe


def name_of(graph: SplitGraph, id: str) -> str:
    """The name of a node, leaf or copy."""
    things = {"n": graph.nodes, "l": graph.leafs, "c": graph.copies}[id[0]]
    thing = things[int(id[1:])]
    assert thing.id == id
    return thing.name


def check_described(sched: Scheduler) -> SplitGraph:
    """Everything is there once, where and why the scheduler says."""
    cut = sched.cut
    assert cut is not None
    graph = describe(sched, "graph", 1)
    names = [backend.name for backend in sched.backends]
    assert [n.name for n in graph.nodes] == [t.name for t in cut.graph.nodes]
    assert [leaf.name for leaf in graph.leafs] == [t.name for t in cut.graph.leafs]
    assert [id for split in graph.splits for id in split.copies] == [c.id for c in graph.copies]
    for split, shown in zip(sched.splits, graph.splits, strict=True):
        assert shown.backend == names[split.backend_id]
        copies = [graph.copies[int(id[1:])] for id in shown.copies]
        assert [(c.bytes, c.back) for c in copies] == [
            (t.nbytes, i in split.results) for i, t in enumerate(split.inputs)
        ]
        assert [name_of(graph, c.source) for c in copies] == [t.name for t in split.inputs]
        assert all((c.target, c.split) == (shown.backend, shown.index) for c in copies)
        mine = graph.nodes[shown.start : shown.stop]
        for node, tensor in zip(mine, split.graph.nodes, strict=True):
            backend = sched.get_tensor_backend(tensor)
            assert backend is not None and node.backend == backend.name
            assert (node.cause, node.split) == (sched.cause(tensor), shown.index)
            assert node.reason and node.ne == tensor.ne[: tensor.n_dims]
            sources = [src.name for src in tensor.src if src is not None]
            assert [name_of(graph, id) for id in node.sources] == sources
    # splits and sections cover all nodes, once each and in order
    for parts in (graph.splits, graph.sections):
        ends = [0, *(p.stop for p in parts)]
        assert [p.start for p in parts] == ends[:-1] and ends[-1] == len(graph.nodes)
    assert sum(f.period * f.repeats for f in graph.folds) == len(graph.sections)
    return graph
