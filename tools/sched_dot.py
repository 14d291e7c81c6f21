"""A split graph in Graphviz' language: one cluster per split, copies as edges between clusters."""

from collections.abc import Iterator

from pyggml.sched_graph import GraphCopy, GraphNode, GraphSplit, SplitGraph, SplitGraphs
from pyggml.tools.sched_text import colours, shown_bytes, shown_shape

_HEAD = (
    "  rankdir=TB;\n"
    '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];\n'
    '  edge [fontname="sans-serif", fontsize=9];'
)


def text(graphs: SplitGraphs) -> str:
    """All graphs, each in a cluster of its own: draw it with `dot -Tsvg`."""
    lines = [f"digraph {quoted(graphs.model)} {{", _HEAD]
    for i, graph in enumerate(graphs.graphs):
        lines += (f"  {line}" for line in _graph(graph, f"g{i}"))
    return "\n".join([*lines, "}"]) + "\n"


def quoted(text: str) -> str:
    """A text between quotes, for Graphviz: a backslash would begin one of its escapes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "")
    return '"' + escaped.replace("\n", "\\n") + '"'


def _graph(graph: SplitGraph, prefix: str) -> Iterator[str]:
    colour_of = colours(graph)
    yield f"subgraph cluster_{prefix} {{"
    yield f"  label={quoted(f'{graph.name}: {graph.n_tokens} tokens')};"
    for leaf in graph.leafs:
        label = f"{leaf.name}\n{leaf.type} {shown_shape(leaf.ne)}\n{leaf.buffer or leaf.kind}"
        attributes = f"label={quoted(label)}, style=filled, fillcolor={quoted('#eeeeee')}"
        yield f"  {prefix}_{leaf.id} [{attributes}];"
    for split in graph.splits:
        yield from (f"  {line}" for line in _split(graph, split, prefix, colour_of[split.backend]))
    for node in graph.nodes:
        yield from (f"  {prefix}_{source} -> {prefix}_{node.id};" for source in node.sources)
    for copy in graph.copies:
        label = f"{copy.origin} → {copy.target}\n{shown_bytes(copy.moved)}"
        attributes = f"label={quoted(label)}, style=bold"
        yield f"  {prefix}_{copy.source} -> {prefix}_{copy.id} [{attributes}];"
    yield "}"


def _split(graph: SplitGraph, split: GraphSplit, prefix: str, colour: str) -> Iterator[str]:
    yield f"subgraph cluster_{prefix}_s{split.index} {{"
    yield f"  label={quoted(f'split {split.index}: {split.backend}')}; color={quoted(colour)};"
    yield "  penwidth=2;"
    for copy in (graph.copies[int(id[1:])] for id in split.copies):
        yield f"  {prefix}_{copy.id} [label={quoted(_copy_label(copy))}, shape=cds];"
    for node in graph.nodes[split.start : split.stop]:
        style = 'style="dashed,rounded"' if node.is_view else f"fillcolor={quoted(colour + '55')}"
        attributes = f"label={quoted(_label(node))}, tooltip={quoted(node.reason)}, {style}"
        yield f"  {prefix}_{node.id} [{attributes}];"
    yield "}"


def _label(node: GraphNode) -> str:
    return f"{node.name}\n{node.op} {node.type} {shown_shape(node.ne)}\n{node.cause}"


def _copy_label(copy: GraphCopy) -> str:
    return f"{copy.name}\n{copy.kind}, {shown_bytes(copy.bytes)}"
