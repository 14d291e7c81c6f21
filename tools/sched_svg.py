"""A split graph as a picture: a lane per device, blocks in the order they run, copies as arrows.

Alike layers are drawn once. Widths are modelled times, or bytes where a device's speed is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pyggml.sched_graph import GraphCopy, GraphNode, GraphSplit, SplitGraph, SplitGraphs
from pyggml.sched_layers import Fold, Section
from pyggml.tools.sched_text import colours, counted, shown_bytes, shown_shape, shown_time

WIDTH, MARGIN, LEFT = 1200, 16, 110
LANE, BETWEEN, HEAD, FOOT = 84, 40, 96, 24
WORK, VIEW, LEAST, BLOCK = 1000.0, 0.3, 0.8, 30.0  # widths before all is scaled to WIDTH
SEAM, NEXT, GAP = 30.0, 6.0, 34.0  # before copies, before other splits, between sections

_STYLE = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1b2430; }
.title { font-size: 16px; font-weight: 600; }
.name { font-weight: 600; }
.faint { fill: #566072; font-size: 11px; }
.back { fill: #ffffff; }
.lane { fill: #eef0f4; }
.edge { fill: none; stroke: #9aa4b5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e7ebf1; }
  .faint { fill: #a3adbd; }
  .back { fill: #14171c; }
  .lane { fill: #222732; }
}
""".strip()


_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="3" height="7" fill="#9aa4b5" fill-opacity=".6"/>'
    "</pattern>"
)


def text(graphs: SplitGraphs) -> str:
    """The picture, one graph below the other."""
    parts: list[str] = []
    y = 52.0
    for graph in graphs.graphs:
        picture = _Picture(graph, y)
        parts += picture.draw()
        y = picture.bottom
    title = f"What runs where: {graphs.model}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" '
        f'viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-labelledby="title description">'
    )
    lines = [
        head,
        f'<title id="title">{_escaped(title)}</title>',
        f'<desc id="description">{_escaped(_in_words(graphs))}</desc>',
        f"<style>{_STYLE}</style>",
        _HATCH,
        '<rect class="back" width="100%" height="100%"/>',
        _text(MARGIN, 24, title, "title"),
        _text(MARGIN, 42, graphs.description, "faint"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _in_words(graphs: SplitGraphs) -> str:
    sentences = []
    for g in graphs.graphs:
        devices = "; ".join(f"{d.name} {counted(d.splits, 'split')}" for d in g.devices)
        sentences.append(
            f"{g.name} of {counted(g.n_tokens, 'token')}: {counted(len(g.splits), 'split')}, "
            f"{counted(len(g.copies), 'copy')}; {devices}."
        )
    return " ".join(sentences)


def _escaped(text: str) -> str:
    """Text for XML, which has no way to write control characters."""
    return escape("".join(c if c.isprintable() else " " for c in text))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{_escaped(text)}</text>'


@dataclass(slots=True)
class _Block:
    """Nodes `start` to `stop` - 1 of one split in one section, and the edges between them."""

    split: GraphSplit
    start: int
    stop: int
    edges: list[float]


@dataclass(slots=True)
class _Arrow:
    """Copies from one backend before a split."""

    x: float
    origin: str
    target: str
    copies: Sequence[GraphCopy]


class _Picture:
    """One graph, from `top` to `bottom`."""

    def __init__(self, graph: SplitGraph, top: float) -> None:
        self.graph = graph
        self.top = top
        self.colours = colours(graph)
        self.lanes = {device.name: i for i, device in enumerate(graph.devices)}
        self.timed = all(d.seconds is not None for d in graph.devices if d.nodes)
        self.blocks: list[_Block] = []
        self.columns: list[tuple[Section, float, float]] = []
        self.groups: list[tuple[Fold, float, float]] = []
        self.x = 0.0
        self.total = self._total()
        for fold in graph.folds:
            self._place(fold)
        self.scale = (WIDTH - LEFT - 2 * MARGIN - 10) / max(1.0, self.x - GAP)
        self.bottom = self._lane_top(len(graph.devices)) - BETWEEN + FOOT

    # ------------------------------------------------------------ places
    def _shown(self, fold: Fold) -> Sequence[Section]:
        return self.graph.sections[fold.first : fold.first + fold.period]

    def _work(self, node: GraphNode) -> float:
        return (node.seconds or 0.0) if self.timed else float(node.traffic)

    def _copying(self, split: GraphSplit) -> float:
        """In the same unit as the work."""
        if self.timed:
            return split.copying or 0.0
        return float(sum(self.graph.copies[int(id[1:])].moved for id in split.copies))

    def _total(self) -> float:
        shown = [section for fold in self.graph.folds for section in self._shown(fold)]
        nodes = (n for s in shown for n in self.graph.nodes[s.start : s.stop])
        splits = (s for s in self.graph.splits if any(p.start <= s.start < p.stop for p in shown))
        return max(1e-12, sum(map(self._work, nodes)) + sum(map(self._copying, splits)))

    def _place(self, fold: Fold) -> None:
        start, total = self.x, self.total
        for section in self._shown(fold):
            left, i = self.x, section.start
            while i < section.stop:
                split = self.graph.splits[self.graph.nodes[i].split]
                stop = min(section.stop, split.stop)
                if i == split.start and split.copies:
                    self.x += SEAM + WORK * self._copying(split) / total
                elif i > section.start:
                    self.x += NEXT
                self._add(split, i, stop, total)
                i = stop
            self.columns.append((section, left, self.x))
            self.x += GAP
        self.groups.append((fold, start, self.x - GAP))

    def _add(self, split: GraphSplit, start: int, stop: int, total: float) -> None:
        nodes = self.graph.nodes[start:stop]
        widths = [VIEW if n.is_view else LEAST + WORK * self._work(n) / total for n in nodes]
        grow = max(1.0, BLOCK / sum(widths))
        edges = [self.x]
        for width in widths:
            edges.append(edges[-1] + grow * width)
        self.blocks.append(_Block(split, start, stop, edges))
        self.x = edges[-1]

    def _screen(self, x: float) -> float:
        return LEFT + MARGIN + 5 + x * self.scale

    def _lane_top(self, lane: int) -> float:
        return self.top + HEAD + lane * (LANE + BETWEEN)

    # ------------------------------------------------------------ drawing
    def draw(self) -> Iterator[str]:
        """All of the picture."""
        g = self.graph
        moved = sum(c.moved for c in g.copies)
        facts = [
            counted(len(g.splits), "split"),
            f"{counted(len(g.copies), 'copy')} of {shown_bytes(moved)}",
            f"{shown_time(g.seconds)} modelled" if g.seconds is not None else "",
            f"widths: {'modelled time' if self.timed else 'bytes'}, hatched: copies",
        ]
        yield _text(MARGIN, self.top + 18, f"{g.name}: {counted(g.n_tokens, 'token')}", "name")
        yield _text(MARGIN + 160, self.top + 18, " · ".join(f for f in facts if f), "faint")
        yield from self._draw_lanes()
        yield from self._draw_heads()
        for block in self.blocks:
            yield from self._draw_block(block)
        arrows = [arrow for block in self.blocks for arrow in self._arrows(block)]
        ends = [arrow.x for arrow in arrows[1:]] + [WIDTH]
        for arrow, end in zip(arrows, ends, strict=False):
            yield from self._draw_arrow(arrow, end)

    def _draw_lanes(self) -> Iterator[str]:
        for i, device in enumerate(self.graph.devices):
            y, x = self._lane_top(i), LEFT + MARGIN
            colour = self.colours[device.name]
            width = WIDTH - x - MARGIN
            yield f'<rect class="lane" x="{x}" y="{y}" width="{width}" height="{LANE}"/>'
            yield f'<rect x="{x - 5}" y="{y}" width="5" height="{LANE}" fill="{colour}"/>'
            yield _text(MARGIN, y + 24, device.name, "name")
            yield _text(MARGIN, y + 40, counted(device.splits, "split"), "faint")
            work = shown_time(device.seconds) if device.nodes else ""
            yield _text(MARGIN, y + 56, work or shown_bytes(device.traffic), "faint")

    def _draw_heads(self) -> Iterator[str]:
        y = self.top + HEAD
        for fold, start, stop in self.groups:
            if fold.repeats > 1:
                a, b = self._screen(start) - 5, self._screen(stop) + 5
                height = self.bottom - FOOT - y + 30
                for shift in (6, 3, 0):
                    yield (
                        f'<rect class="edge" x="{a + shift:.1f}" y="{y - 36 - shift:.1f}" '
                        f'width="{b - a:.1f}" height="{height:.1f}" rx="5"/>'
                    )
                last = self.graph.sections[fold.first + fold.period * fold.repeats - 1]
                first = self.graph.sections[fold.first]
                words = f"{fold.repeats} × the same: layers {first.layer} to {last.layer}"
                yield _text(min(a, WIDTH - 8 - 7.2 * len(words)), y - 48, words, "name")
        for section, start, _ in self.columns:
            x = min(self._screen(start), WIDTH - 8 - 6.2 * len(section.name))
            yield _text(x, y - 20, section.name, "faint")

    def _draw_block(self, block: _Block) -> Iterator[str]:
        y, colour = (
            self._lane_top(self.lanes[block.split.backend]),
            self.colours[block.split.backend],
        )
        a, b = self._screen(block.edges[0]), self._screen(block.edges[-1])
        count = counted(block.stop - block.start, "node")
        words = f"split {block.split.index} on {block.split.backend}: {count}"
        if block.start == block.split.start:
            yield from self._draw_wait(block, a - 6, y)
        yield f"<g><title>{_escaped(words)}</title>"
        yield (
            f'<rect x="{a:.1f}" y="{y}" width="{b - a:.1f}" height="{LANE}" rx="3" '
            f'fill="{colour}" fill-opacity=".4"/>'
        )
        pairs = zip(block.edges, block.edges[1:], strict=False)
        for node, (left, right) in zip(
            self.graph.nodes[block.start : block.stop], pairs, strict=True
        ):
            if not node.is_view:
                yield self._draw_node(node, self._screen(left), self._screen(right), y, colour)
        yield "</g>"

    def _draw_wait(self, block: _Block, stop: float, y: float) -> Iterator[str]:
        """How long the copies before a block take."""
        copying = self._copying(block.split)
        width = self.scale * WORK * copying / self.total
        if width < 1:
            return
        shown = shown_time(copying) if self.timed else shown_bytes(copying)
        yield (
            f'<rect x="{stop - width:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" '
            f'fill="url(#hatch)"><title>copies: {shown}</title></rect>'
        )
        if width > 12 + 6.5 * len(shown):
            yield _text(stop - width + 6, y + LANE / 2 + 4, shown, "faint")

    @staticmethod
    def _draw_node(node: GraphNode, a: float, b: float, y: float, colour: str) -> str:
        words = f"{node.name}: {node.op} {node.type} {shown_shape(node.ne)}; {node.reason}"
        width = max(0.3, b - a - (0.6 if b - a > 2 else 0.0))
        bar = (
            f'<rect x="{a:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{colour}">'
            f"<title>{_escaped(words)}</title></rect>"
        )
        if b - a < 14:
            return bar
        ink = "#101418" if colour in ("#e69f00", "#56b4e9", "#f0e442", "#cc79a7") else "#ffffff"
        x, bottom = (a + b) / 2 + 4, y + LANE - 5
        return bar + (
            f'<text transform="translate({x:.1f} {bottom:.1f}) rotate(-90)" '
            f'style="font-size:9.5px;fill:{ink}">{_escaped(_short(node))}</text>'
        )

    def _arrows(self, block: _Block) -> Iterator[_Arrow]:
        """One from each backend that copies come from."""
        if block.start != block.split.start:
            return
        by_origin: dict[str, list[GraphCopy]] = {}
        for id in block.split.copies:
            copy = self.graph.copies[int(id[1:])]
            by_origin.setdefault(copy.origin, []).append(copy)
        for i, (origin, copies) in reversed(list(enumerate(by_origin.items()))):
            x = self._screen(block.edges[0]) - 6 - 8 * i
            yield _Arrow(x, origin, block.split.backend, copies)

    def _draw_arrow(self, arrow: _Arrow, end: float) -> Iterator[str]:
        """With its bytes, if they fit before `end`."""
        x, colour = arrow.x, self.colours[arrow.origin]
        a, b = self.lanes[arrow.origin], self.lanes[arrow.target]
        start = self._lane_top(a) + (LANE if a < b else 0)
        stop = self._lane_top(b) + (0 if a < b else LANE)
        tip = stop - 6 if start < stop else stop + 6
        words = ", ".join(f"{c.name} {shown_bytes(c.moved)}" for c in arrow.copies)
        yield f'<g stroke="{colour}" fill="{colour}"><title>{_escaped(words)}</title>'
        yield f'<path d="M{x:.1f} {start:.1f}V{tip:.1f}" stroke-width="2"/>'
        yield f'<path d="M{x:.1f} {stop:.1f}l-4 {tip - stop:.1f}h8z" stroke="none"/></g>'
        moved = shown_bytes(sum(c.moved for c in arrow.copies))
        if end - x > 12 + 6.5 * len(moved):
            yield _text(x + 6, (start + stop) / 2 + 4, moved, "faint")


def _short(node: GraphNode) -> str:
    """What fits beside the height of a lane."""
    name = node.op if node.name.startswith(("node_", " ")) else node.name
    return name if len(name) <= 13 else name[:12] + "…"
