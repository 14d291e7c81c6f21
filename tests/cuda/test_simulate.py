"""Descriptions of simulated cards, and the machine that they make."""

import json

import pytest
from simulated import CPU_RATES, Chain, simulation

from pyggml.backend import DeviceType
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cuda.cards import CARDS, GIB, MIB
from pyggml.backends.cuda.simulate import Simulation, parse_spec
from pyggml.errors import ConfigError
from pyggml.registry import cpu_device


def test_a_name_is_enough() -> None:
    spec = parse_spec("RTX 3060")
    assert (spec.key, spec.card) == ("rtx3060", CARDS["rtx3060"])
    assert spec.card.memory == 12 * GIB and spec.card.compute_capability == 86


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * GIB), ("10.5g", 21 * GIB // 2), ("8G", 8 * GIB), ("600MiB", 600 * MIB)],
)
def test_sizes(text: str, size: int) -> None:
    card = parse_spec(f"rtx3060:{text}").card
    assert card.memory == size
    assert card.reserved == min(CARDS["rtx3060"].reserved, size // 8)


def test_options() -> None:
    card = parse_spec("a100:40GiB,pcie=12.5,vram=1000,peer=off,reserved=1GiB,buffer=4GiB").card
    assert (card.link_gbs, card.gbs, card.peer_gbs) == (12.5, 1000, 0)
    assert (card.reserved, card.max_buffer) == (GIB, 4 * GIB)
    rates = card.rates
    assert (rates.h2d_gbs, rates.d2h_gbs, rates.peer_gbs) == (12.5, 12.5, 0)
    assert rates.gbs == pytest.approx(820) and not rates.measured
    assert parse_spec("rtx3060,peer=on").card.peer_gbs > 0
    assert parse_spec("a100,peer=on").card.peer_gbs == CARDS["a100"].peer_gbs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no card ''", "cards: ", "rtx3060", "h200"]),
        ("rtx306O", ["no card 'rtx306O'", "cards: "]),
        ("rtx3060:", ["'' is not a size", "rtx3060:10GiB"]),
        ("rtx3060:12", ["'12' is not a size"]),
        ("rtx3060:0GiB", ["'0GiB' is not a size"]),
        ("rtx3060:-4GiB", ["'-4GiB' is not a size"]),
        ("rtx3060,pci=16", ["'pci=16' is no option", "options: pcie=GB/s", "peer=on|off"]),
        ("rtx3060,pcie", ["'pcie' is no option"]),
        ("rtx3060,", ["'' is no option"]),
        ("rtx3060,pcie=fast", ["'pcie=fast' should be pcie=GB/s"]),
        ("rtx3060,pcie=0", ["should be pcie=GB/s"]),
        ("rtx3060,pcie=inf", ["should be pcie=GB/s"]),
        ("rtx3060,pcie=nan", ["should be pcie=GB/s"]),
        ("rtx3060,peer=maybe", ["should be peer=on|off"]),
        ("rtx3060,buffer=4", ["should be buffer=SIZE"]),
    ],
)
def test_mistakes_are_told_with_what_there_is(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(text)
    message = str(error.value)
    assert message.startswith(f"--sim-device {text}") and len(message.splitlines()) <= 3
    assert all(word in message for word in words), message


@pytest.mark.parametrize("key", CARDS)
def test_the_table_is_plausible(key: str) -> None:
    """Caught so far: figures in the wrong column."""
    card = CARDS[key]
    rates = card.rates
    assert 4 * GIB <= card.memory <= 200 * GIB
    assert 100 <= card.gbs <= 10_000 and card.gbs / card.tflops < 200
    assert 5 <= card.tflops <= 150 and 2 * card.tflops <= card.tensor_tflops <= 1000
    assert 10 <= card.link_gbs <= 60 and card.link_gbs < card.gbs
    assert card.compute_capability in (75, 80, 86, 89, 90, 120)
    assert rates.tensor_gflops > rates.gflops and rates.gbs < card.gbs
    assert key.endswith("laptop") == ("Laptop" in card.name)
    assert key.split("-")[0] in card.name.lower().replace(" ", "")


def test_devices() -> None:
    sim = simulation("rtx3060", "h200:64GiB")
    first, second, cpu = sim.devices
    assert [d.name for d in sim.devices] == ["CUDA0", "CUDA1", "CPU"]
    assert first.description == "NVIDIA GeForce RTX 3060 [simulated]"
    assert first.type == DeviceType.GPU and second.memory().total == 64 * GIB
    assert first.caps.is_async and first.caps.events and first.caps.host_buffer
    assert first.rates() == CARDS["rtx3060"].rates and cpu.rates() == CPU_RATES
    real = cpu_device()
    assert isinstance(cpu, CpuDevice) and isinstance(real, CpuDevice)
    assert cpu is not real and cpu.library is real.library
    assert sim.driver.is_simulated and sim.driver.n_devices() == 2


def test_ways_to_execute() -> None:
    with pytest.raises(ConfigError, match="host, dry"):
        Simulation(["rtx3060"], "native")


def test_the_processor_is_measured_when_nobody_says_how_fast_it_is() -> None:
    sim = Simulation(["rtx3060"])
    rates = sim.cpu.rates()
    assert rates.measured and rates.gbs > 0 and sim.cpu.rates() is rates
    assert sim.clock.bus.gbs == rates.gbs


@pytest.mark.parametrize("execute", ["host", "dry"])
def test_report_and_trace(execute: str) -> None:
    sim = simulation("rtx3060:64MiB", "rtx4090:64MiB", execute=execute, trace=True)
    first, second, cpu = sim.devices
    chain = Chain([first, second, cpu] * 2)
    sched = chain.scheduler(sim.devices)
    for seed in range(3):
        result = chain.run(sched, seed)
    assert result.any() == (execute == "host")
    lines = sim.report().splitlines()
    assert len(lines) == 5 and "NVIDIA GeForce RTX 4090 [simulated]" in lines[2]
    assert all("simulated" in line or "modelled, not measured" in line for line in lines)
    trace = json.loads(json.dumps(sim.chrome_trace()))
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {
        "CPU (its share is modelled)",
        "CUDA0: NVIDIA GeForce RTX 3060 [simulated]",
        "CUDA1: NVIDIA GeForce RTX 4090 [simulated]",
    }
    assert {e["pid"] for e in slices} == set(names)
    assert any(e["name"].startswith("MUL_MAT ") for e in slices)
    assert max(e["ts"] + e["dur"] for e in slices) <= 1e6 * sim.clock.now * (1 + 1e-9)
    # nothing overlaps in one row
    for row in {(e["pid"], e["tid"]) for e in slices}:
        mine = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == row)
        for (start, length), (following, _) in zip(mine, mine[1:], strict=False):
            assert start + length <= following * (1 + 1e-9)
    assert trace["otherData"] == {"note": "modelled, not measured"}


def test_reports_can_begin_anew() -> None:
    sim = simulation("rtx3060:64MiB", trace=True)
    chain = Chain([*sim.devices] * 2)
    sched = chain.scheduler(sim.devices)
    chain.run(sched)
    sim.restart()
    card = sim.driver.cards[0]
    assert card.counters.launches == 0 and sum(unit.busy for unit in card.units) == 0
    assert sim.report().endswith("0.00 ms of 0.00 ms (modelled, not measured)")
    chain.run(sched)
    events = [e for e in sim.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in events) < 100  # microseconds
    assert card.counters.launches == sum("compute" in s.unit for s in sim.clock.trace or ())


def test_both_ways_to_execute_take_the_same_time() -> None:
    times = []
    for execute in ("host", "dry"):
        sim = simulation("rtx3060:64MiB", "rtx4090:64MiB", execute=execute)
        first, second, cpu = sim.devices
        chain = Chain([first, second, cpu] * 2)
        sched = chain.scheduler(sim.devices)
        for seed in range(3):
            chain.run(sched, seed)
        times.append(sim.clock.now)
    assert times[0] == times[1]
