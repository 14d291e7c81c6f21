"""Draws docs/planner.svg: modelled speed against -ngl, and against layers with experts on the GPU.

usage: python tests/plan_figure.py docs/planner.svg

The machine is written down here, so that the picture is the same wherever it is drawn. The card has
more memory than it is sold with: a line shows where the real one is full.
"""

from __future__ import annotations

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

    def across(x: float) -> float:
        return left + WIDTH * x / last

    yield text(left, top - 8, chart.title, 13)
    yield (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    )
    for x in (0, last // 2, last):
        yield text(across(x), top + HEIGHT + 16, str(x), anchor="middle")
    yield text(left + WIDTH / 2, top + HEIGHT + 34, chart.x, anchor="middle")
    yield from full(chart, across, top)
    for row, name in enumerate(COLORS):
        yield from line(chart, name, across, top, row)


def full(chart: Chart, across: Callable[[float], float], top: int) -> Iterator[str]:
    """Where the card that is sold has no more room."""
    for a, b in zip(chart.points, chart.points[1:], strict=False):
        if a.nbytes <= SOLD < b.nbytes:
            x = across(a.x + (b.x - a.x) * (SOLD - a.nbytes) / (b.nbytes - a.nbytes))
            yield (
                f'<path d="M{x:.1f} {top} v{HEIGHT}" stroke="#a00" stroke-dasharray="4 3" '
                'fill="none"/>'
            )
            yield text(x + 4, top + 14, f"{SOLD >> 30} GiB")


def line(
    chart: Chart, name: str, across: Callable[[float], float], top: int, row: int
) -> Iterator[str]:
    """A curve on a scale of its own; the words say how high it goes."""
    rates = [getattr(p, name) for p in chart.points]
    highest = max(rates)
    places = [
        (across(p.x), top + HEIGHT - 0.94 * HEIGHT * rate / highest)
        for p, rate in zip(chart.points, rates, strict=True)
    ]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    color = COLORS[name]
    yield f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>'
    for (x, y), rate in zip(places, rates, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}">'
        yield f"<title>{name}: {rate:.2f} t/s</title></circle>"
    words = f"{name}: {rates[0]:.3g} to {highest:.3g} t/s"
    x = across(0) + 8
    yield f'<text x="{x:.1f}" y="{top + 36 + 16 * row}" fill="{color}">{words}</text>'


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(svg(list(charts(Path(folder)))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
