"""The planner: against trying everything on small models, and against lines of people on large."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from model_shapes import SHAPES, write_header

from pyggml.backend import Device
from pyggml.backends.cuda.simulate import Simulation
from pyggml.cost import Rates
from pyggml.dtypes import GGMLType as T
from pyggml.errors import ConfigError, OutOfMemory
from pyggml.llama import load
from pyggml.llama.context_params import ContextParams
from pyggml.llama.loader import ModelFile, open_model
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_rules import Rule, n_cpu_moe, parse_rules
from pyggml.llama.planner import (
    CLOSE,
    MIB,
    Plan,
    Planned,
    PlannerParams,
    missing_share,
    plan,
    planned,
    score,
)
from pyggml.llama.planner_layers import Mode
from pyggml.llama.planner_reason import reason

# a desktop; repacked weights are read a little faster than rows of the file
HOST = Rates(
    gbs=60,
    gflops=600,
    gflops_of=dict.fromkeys(T, 900.0),
    gbs_of=dict.fromkeys(T, 45.0),
    repacked_gbs_of={T.Q4_K: 55.0, T.Q6_K: 55.0},
    repacked_gflops_of={T.Q4_K: 1500.0, T.Q6_K: 1200.0},
    node_latency=2e-6,
)
ROOM = 1 << 40  # bytes of memory of the host
PARAMS = ContextParams(n_ctx=4096)
MODES = (Mode(), Mode(op_offload=False), Mode(no_host=True))


def machine(*cards: str) -> tuple[Device, ...]:
    return Simulation(cards, "dry", cpu_rates=HOST).devices


def small(folder: Path, name: str, n_layer: int) -> Path:
    shape = replace(SHAPES[name], n_layer=n_layer)
    return write_header(folder / "small.gguf", shape)


def best(path: Path, devices: Sequence[Device], options: PlannerParams) -> Plan:
    found = plan(path, devices, PARAMS, options)
    for choice in found.choices:
        for device in choice.memory.devices[:-1]:
            assert device.free >= options.margin, str(choice.flags)
    scores = [score(c.modelled, found.goal) for c in found.choices]
    assert scores == sorted(scores)
    return found


def try_line(
    file: ModelFile,
    devices: Sequence[Device],
    placement: PlacementParams,
    options: PlannerParams,
    mode: Mode | None = None,
) -> Planned | None:
    """What a line of flags would do; None if it does not fit."""
    mode = mode or Mode()
    params = replace(PARAMS, kv_offload=mode.kv_offload, op_offload=mode.op_offload)
    placement = replace(placement, no_host=mode.no_host, fit=False)
    try:
        choice = planned(file, devices, params, placement, options)
    except OutOfMemory:
        return None
    fits = all(d.free >= options.margin for d in choice.memory.devices[:-1])
    return choice if fits else None


def everything(n_layer: int) -> Iterator[PlacementParams]:
    """All placements of a mixture by layers and projections."""
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    subsets = [s for n in range(4) for s in itertools.combinations(names, n)]
    for n_cpu in range(n_layer + 1):
        for chosen in itertools.product(subsets, repeat=n_layer - n_cpu):
            rules = [
                Rule(rf"blk\.{n_cpu + i}\.{name}", "CPU")
                for i, moved in enumerate(chosen)
                for name in moved
            ]
            yield PlacementParams(n_gpu_layers=n_layer + 1 - n_cpu, rules=tuple(rules))


@pytest.mark.parametrize("goal", ["generation", "mix"])
def test_nothing_is_better_than_the_best_of_two_layers(tmp_path, goal) -> None:
    check_against_everything(small(tmp_path, "mixtral-8x22b", 2), "rtx3060:3GiB", goal, 2)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["generation", "prompt", "mix"])
@pytest.mark.parametrize("gib", [1.3, 1.75])
def test_nothing_is_better_than_the_best_for_small_experts(tmp_path, goal, gib) -> None:
    check_against_everything(small(tmp_path, "qwen3-30b-a3b", 2), f"rtx3060:{gib}GiB", goal, 2)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["generation", "mix"])
def test_nothing_is_better_than_the_best_of_three_layers(tmp_path, goal) -> None:
    check_against_everything(small(tmp_path, "mixtral-8x22b", 3), "rtx4070:4GiB", goal, 3)


def check_against_everything(path: Path, card: str, goal: str, n_layer: int) -> None:
    devices = machine(card)
    options = PlannerParams(goal=goal, margin=64 * MIB, ram=ROOM)
    found = best(path, devices, options)
    file = open_model(path, allow_no_data=True)
    lines = (try_line(file, devices, p, options, m) for p in everything(n_layer) for m in MODES)
    tried = [score(c.modelled, goal) for c in lines if c is not None]
    assert len(tried) > 20
    assert len({round(t, 7) for t in tried}) > 10
    assert score(found.choices[0].modelled, goal) <= min(tried) * (1 + CLOSE)


# ---------------------------------------------------------------- lines of people
PAIRS = {
    "mixtral-8x22b": "rtx3090",
    "qwen3-30b-a3b": "rtx3060ti",
    "gpt-oss-120b": "rtx4080",
    "glm-4.5-air": "rtx3060",
    "deepseek-r1": "rtx4090",
}


def by_hand(n_layer: int) -> Iterator[PlacementParams]:
    """What people tried: experts to the CPU by projection, first layers, last layers."""
    whole = 99
    for text in (
        "exps=CPU",
        "ffn_up_exps=CPU",
        "ffn_gate_exps=CPU",
        "ffn_down_exps=CPU",
        "ffn_up_exps=CPU,ffn_gate_exps=CPU",
        "ffn_up_exps=CPU,ffn_down_exps=CPU",
        "ffn_gate_exps=CPU,ffn_down_exps=CPU",
        r"\.ffn_(up|down|gate)_exps\.=CPU",
    ):
        yield PlacementParams(n_gpu_layers=whole, rules=parse_rules(text))
    for n in (2, 4, 8, 16):
        kept = "|".join(map(str, range(n)))
        text = rf"blk\.({kept})\.ffn_.*exps=CUDA0,exps=CPU"
        yield PlacementParams(n_gpu_layers=whole, rules=parse_rules(text))
        yield PlacementParams(n_gpu_layers=n)
    for n in range(2, n_layer, 6):
        yield PlacementParams(n_gpu_layers=whole, rules=n_cpu_moe(n))
    yield PlacementParams(n_gpu_layers=0)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["generation", "mix"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_the_best_line_beats_those_of_people_and_of_fit(tmp_path, name, goal) -> None:
    path = write_header(tmp_path / "model.gguf", name)
    devices = machine(PAIRS[name])
    options = PlannerParams(goal=goal, ram=ROOM)
    found = score(best(path, devices, options).choices[0].modelled, goal)
    lines = {f"-ngl {p.n_gpu_layers} {p.rules}": p for p in by_hand(60)}
    with load(path, devices=devices, n_ctx=PARAMS.n_ctx, no_alloc=True) as fitted:
        lines["-fit"] = fitted.model.placement.params
    file = open_model(path, allow_no_data=True)
    tried = {
        text: score(choice.modelled, goal)
        for text, p in lines.items()
        if (choice := try_line(file, devices, p, options)) is not None
    }
    assert "-fit" in tried and len(tried) > 6  # those of people that fit
    assert {text: t for text, t in tried.items() if t < found * (1 - 1e-9)} == {}


# ---------------------------------------------------------------- the rest
def test_layers_are_spread_over_two_devices(tmp_path) -> None:
    path = small(tmp_path, "qwen3-30b-a3b", 8)
    options = PlannerParams(goal="generation", margin=64 * MIB, ram=ROOM)
    one = best(path, machine("rtx3060:2GiB"), options).choices[0]
    two = best(path, machine("rtx3060:2GiB", "rtx3060:2GiB"), options).choices[0]
    assert two.flags.tensor_split and "-ts" in str(two.flags)
    assert {"CUDA0", "CUDA1"} <= set(two.layers)
    assert two.modelled.token < one.modelled.token


def test_a_dense_model(smollm2) -> None:
    options = PlannerParams(goal="generation", margin=0, ram=ROOM)
    params = ContextParams(n_ctx=256)
    whole = plan(smollm2, machine("rtx3060:1GiB"), params, options).choices[0]
    assert str(whole.flags) == "-ngl 99"
    little = plan(smollm2, machine("rtx3060:160MiB"), params, options).choices[0]
    assert little.memory.devices[0].free >= 0
    assert little.modelled.token > whole.modelled.token
    assert "CPU" in little.layers or "ffn_" in little.flags.rules


def test_what_does_not_fit_into_memory_of_the_host_is_read_from_disk(tmp_path) -> None:
    path = small(tmp_path, "mixtral-8x22b", 4)
    devices = machine("rtx3060:3GiB")
    options = PlannerParams(goal="generation", margin=0, ram=ROOM)
    rich = best(path, devices, options).choices[0]
    assert rich.modelled.missing == 0 and "disk" not in reason(rich)
    poor_options = replace(options, ram=1 << 30, disk_gbs=2.0)
    poor = best(path, devices, poor_options).choices[0]
    missing = missing_share(poor.host_bytes, devices[-1], poor_options)
    assert 0 < missing < 1 and poor.modelled.missing == missing
    read = poor.modelled.token_estimate.host_weights * missing
    expected = poor.modelled.token_estimate.seconds + read / 2e9
    assert poor.modelled.token == pytest.approx(expected)
    share = 100 * (1 - poor.modelled.token_estimate.seconds / poor.modelled.token)
    assert f"read from disk each time, which takes {share:.0f} % of a token's time" in reason(poor)
    assert not poor.flags.mode.no_host  # repacked weights would have to stay in memory


def test_the_output_stays_on_the_cpu_if_it_does_not_fit(tmp_path) -> None:
    path = small(tmp_path, "gpt-oss-120b", 2)  # an output of 600 MiB, layers of 1.6 GiB
    options = PlannerParams(goal="prompt", margin=0, ram=ROOM)
    params = replace(PARAMS, n_ubatch=64, n_ctx=512)
    choice = plan(path, machine("rtx3060:500MiB"), params, options).choices[0]
    assert "^output.w=CPU" in choice.flags.rules
    assert "output's matrix" in reason(choice)


def test_a_card_may_have_the_output_only(tmp_path) -> None:
    path = small(tmp_path, "qwen3-30b-a3b", 2)
    choice = best(path, machine("rtx3060:3GiB"), PlannerParams(ram=ROOM)).choices[0]
    assert reason(replace(choice, layers=("CPU",) * 2, moved={})).startswith(
        "The CPU has all of 2 layers. "
    )
    one = reason(replace(choice, layers=("CPU", "CUDA0"), moved={}))
    assert one.startswith("CUDA0 has 1 of 2 layers, the CPU the first 1. ")


def test_reasons_name_what_was_moved(tmp_path) -> None:
    path = small(tmp_path, "qwen3-30b-a3b", 4)
    options = PlannerParams(margin=64 * MIB, ram=ROOM)
    for choice in best(path, machine("rtx3060:1.5GiB"), options).choices:
        text = reason(choice)
        assert text.startswith("CUDA0 has") and text.endswith(".")
        if choice.moved:
            assert "the CPU their experts" in text


def test_reasons_count_the_layers_that_have_experts(tmp_path) -> None:
    path = small(tmp_path, "deepseek-r1", 5)  # of which three have none
    options = PlannerParams(margin=64 * MIB, ram=ROOM)
    choices = best(path, machine("rtx3060:8GiB"), options).choices
    (choice,) = [c for c in choices if "-cmoe" in str(c.flags)][:1]
    assert "down, gate and up of 2" in reason(choice)


def test_mistakes(tmp_path) -> None:
    path = small(tmp_path, "qwen3-30b-a3b", 2)
    with pytest.raises(ConfigError, match="there is no GPU to plan for"):
        plan(path, machine(), PARAMS)
    with pytest.raises(ConfigError, match="--for speed: one of generation, prompt, mix"):
        PlannerParams(goal="speed")
    with pytest.raises(OutOfMemory, match="use a smaller --ctx-size"):
        plan(path, machine("rtx3060:512MiB"), PARAMS, PlannerParams(ram=ROOM))
