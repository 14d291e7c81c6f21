"""Draws docs/planner.svg: modelled speed against -ngl, and against layers with experts on the GPU.

usage: python tests/plan_figure.py docs/planner.svg

The machine is written down here, so that the picture is the same wherever it is drawn. The card has
more memory than it is sold with: a line shows where the real one is full.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_shapes import SHAPES, write_header

from pyggml.backends.cuda.simulate import Simulation
from pyggml.cost import Rates
from pyggml.dtypes import GGMLType
from pyggml.llama.context_params import ContextParams
from pyggml.llama.fit_model import quiet
from pyggml.llama.loader import open_model
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_rules import n_cpu_moe
from pyggml.llama.planner import PlannerParams, planned

# a desktop with two channels of DDR5
HOST = Rates(
    gbs=70,
    gflops=800,
    gbs_of=dict.fromkeys(GGMLType, 60.0),
    gflops_of=dict.fromkeys(GGMLType, 1000.0),
    node_latency=2e-6,
)
CARD, SOLD = "rtx4090", 24 << 30
PARAMS = ContextParams(n_ctx=4096)
MODELS = {"mixtral-8x22b": "Mixtral 8x22B, Q4_K_M", "deepseek-r1": "DeepSeek R1, Q4_K_M"}
POINTS = 10  # of a curve


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    prompt: float  # tokens per second
    generation: float
    nbytes: int  # on the card


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    points: Sequence[Point]


# ---------------------------------------------------------------- the numbers
def charts(folder: Path) -> Iterator[Chart]:
    """For each model: by layers, and with all layers there by layers with experts."""
    for name, title in MODELS.items():
        path = write_header(folder / f"{name}.gguf", name)
        n = SHAPES[name].n_layer
        dense = int(SHAPES[name].keys.get("leading_dense_block_count", 0))
        yield Chart(title, "-ngl", curve(path, n + 1, lambda x: PlacementParams(n_gpu_layers=x)))

        def with_experts(x: int, n: int = n) -> PlacementParams:
            return PlacementParams(n_gpu_layers=99, rules=n_cpu_moe(n - x))

        points = curve(path, n - dense, with_experts)
        yield Chart(title, "layers with experts on the GPU (-ngl 99)", points)


def curve(path: Path, last: int, placement: Callable[[int], PlacementParams]) -> list[Point]:
    devices = Simulation([f"{CARD}:1000GiB,reserved=380MiB"], "dry", cpu_rates=HOST).devices
    options = PlannerParams(ram=1 << 42)
    file, found = open_model(path, allow_no_data=True), list[Point]()
    for x in sorted({round(i * last / POINTS) for i in range(POINTS + 1)}):
        choice = planned(file, devices, PARAMS, placement(x), options)
        m, card = choice.modelled, choice.memory.devices[0]
        found.append(Point(x, m.prompt_rate, m.generation_rate, card.total - card.free))
    return found


# ---------------------------------------------------------------- the picture
WIDTH, HEIGHT, GAP, LEFT, TOP = 420, 240, 70, 60, 60
LOWEST, HIGHEST = 1, 2000  # of the axis, tokens per second
COLORS = {"prompt": "#b5651d", "generation": "#1f5fa8"}


def svg(drawn: Sequence[Chart]) -> str:
    """Two charts beside each other for each model."""
    columns = 2
    rows = -(-len(drawn) // columns)
    width, height = LEFT + columns * (WIDTH + GAP), TOP + rows * (HEIGHT + GAP + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 24, f"Modelled tokens per second: {CARD}, memory of {HOST.gbs:.0f} GB/s", 15),
    ]
    for i, chart in enumerate(drawn):
        x = LEFT + i % columns * (WIDTH + GAP)
        y = TOP + i // columns * (HEIGHT + GAP + 20)
        parts += panel(chart, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def panel(chart: Chart, left: int, top: int) -> Iterator[str]:
    last = chart.points[-1].x

    def place(x: float, rate: float) -> tuple[float, float]:
        share = math.log(rate / LOWEST) / math.log(HIGHEST / LOWEST)
        return left + WIDTH * x / last, top + HEIGHT * (1 - share)

    yield text(left, top - 8, chart.title, 13)
    yield (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    )
    for x in (0, last // 2, last):
        yield text(place(x, LOWEST)[0], top + HEIGHT + 16, str(x), anchor="middle")
    yield text(left + WIDTH / 2, top + HEIGHT + 34, chart.x, anchor="middle")
    for rate in (1, 10, 100, 1000):
        y = place(0, rate)[1]
        yield f'<path d="M{left} {y:.1f} h{WIDTH}" stroke="#ddd"/>'
        yield text(left - 6, y + 4, str(rate), anchor="end")
    yield from full(chart, place, top)
    for name in COLORS:
        yield from line(chart, name, place)


Place = Callable[[float, float], tuple[float, float]]


def full(chart: Chart, place: Place, top: int) -> Iterator[str]:
    """Where the card that is sold has no more room."""
    for a, b in zip(chart.points, chart.points[1:], strict=False):
        if a.nbytes <= SOLD < b.nbytes:
            share = (SOLD - a.nbytes) / (b.nbytes - a.nbytes)
            x = place(a.x + (b.x - a.x) * share, LOWEST)[0]
            yield (
                f'<path d="M{x:.1f} {top} v{HEIGHT}" stroke="#a00" stroke-dasharray="4 3" '
                'fill="none"/>'
            )
            yield text(x + 4, top + 14, f"{SOLD >> 30} GiB are full")


def line(chart: Chart, name: str, place: Place) -> Iterator[str]:
    """A curve with its name at the first point."""
    color = COLORS[name]
    rates = [getattr(p, name) for p in chart.points]
    places = [place(p.x, rate) for p, rate in zip(chart.points, rates, strict=True)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>'
    for (x, y), rate in zip(places, rates, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}">'
        yield f"<title>{name}: {rate:.2f} t/s</title></circle>"
    (x, y) = places[0]
    yield f'<text x="{x + 8:.1f}" y="{y - 14:.1f}" fill="{color}">{name}</text>'


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, quiet():
        out.write_text(svg(list(charts(Path(folder)))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
