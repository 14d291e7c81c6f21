"""pyllama-plan: what it prints, where it reads headers, what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from file_server import served
from model_shapes import SHAPES, write_header
from tool_here import Tool, tool_with

from pyggml.llama import load
from pyggml.llama.placement_rules import parse_rules
from pyggml.tools import plan as tool

DOC = Path(__file__).parent.parent.parent / "docs" / "planner.md"
CARD = ("--sim-device", "rtx3060:2GiB")
MIXTURE = replace(SHAPES["mixtral-8x22b"], n_layer=3)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Tool:
    return tool_with(capsys, "plan")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_header(tmp_path_factory.mktemp("mixture") / "three layers.gguf", MIXTURE)


def test_three_lines_with_their_tables_and_reasons(planned, mixture) -> None:
    result = planned("-m", mixture, *CARD, "-c", 2048, "-ctk", "q8_0", "--for", "generation")
    assert result.code == 0, result.err
    numbered = re.findall(r"^(\d)\. (-ngl .*)$", result.out, re.MULTILINE)
    assert [n for n, _ in numbered] == ["1", "2", "3"]
    assert len({flags for _, flags in numbered}) == 3
    assert result.out.count("memory breakdown [MiB]") == 3
    rates = re.findall(r"generation ([\d.]+) t/s \(modelled\)", result.out)
    assert [float(r) for r in rates] == sorted(map(float, rates), reverse=True)
    assert tool.NOTE in result.out and "CUDA0 has" in result.out
    for line in re.findall(r"^   (pyllama-cli .*)$", result.out, re.MULTILINE):
        words = shlex.split(line)
        assert words[:3] == ["pyllama-cli", "-m", str(mixture)]
        assert words[words.index("-ctk") + 1] == "q8_0" and words[-1] == CARD[1]


def test_the_cpu_is_measured_with_the_threads_that_are_asked_for(
    planned, mixture, monkeypatch
) -> None:
    from pyggml.backends.cuda.sim_cpu import SimCpuDevice
    from pyggml.cost import Rates

    asked = []

    def rates(self, threads=None):
        asked.append(threads and threads.n_threads)
        n = threads.n_threads if threads else 16
        return Rates(gbs=10.0 * n, gflops=50.0 * n)

    monkeypatch.setattr(SimCpuDevice, "rates", rates)
    args = ("-m", mixture, *CARD, "-c", 2048, "--for", "generation", "--json")
    one, three = (json.loads(planned(*args, "-t", n).out)["plans"][0] for n in (1, 3))
    assert asked.count(1) == asked.count(3) == 1
    assert three["generation_rate"] > 2 * one["generation_rate"]


def rows(text: str) -> dict[str, Any]:
    """Paths of documented values and the names of their types."""
    return dict(re.findall(r"^\| `([^`]+)` \| (\w+)", text, re.MULTILINE))


def leaves(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, f"{path}[]")
    else:
        yield path, type(value).__name__


def test_the_object_is_the_documented_one(planned, mixture) -> None:
    result = planned("-m", mixture, *CARD, "-c", 2048, "--json")
    found = set(leaves(json.loads(result.out)))
    documented = rows(DOC.read_text())
    verified = {path for path in documented if path.startswith("verified.")}
    assert {path for path, _ in found} == documented.keys() - verified
    for path, kind in found:
        assert documented[path] == kind or (path == "disk_gbs" and kind == "NoneType"), path


def test_the_lines_do_what_the_tables_say(planned, mixture) -> None:
    """The flags, read as pyllama-cli reads them, give the memory of the answer."""
    from pyggml.backends.cuda.simulate import Simulation
    from pyggml.llama.planner_rules import rules_of

    answer = json.loads(planned("-m", mixture, *CARD, "-c", 2048, "--json").out)
    for found in answer["plans"]:
        words = shlex.split(found["flags"])
        rules = " ".join(
            shlex.quote(w) for w in words[2:] if w not in ("--no-host", "--no-op-offload", "-nkvo")
        )
        with load(
            mixture,
            devices=Simulation(CARD[1:], "dry").devices,
            n_ctx=2048,
            no_alloc=True,
            n_gpu_layers=int(words[1]),
            rules=rules_of(rules),
            no_host="--no-host" in words,
            op_offload="--no-op-offload" not in words,
            kv_offload="-nkvo" not in words,
            fit=False,
        ) as llama:
            (card, _) = llama.memory_table().devices
        told = found["devices"][0]
        assert (told["name"], told["model"], told["context"], told["compute"], told["free"]) == (
            *(card.name, card.use.model, card.use.context, card.use.compute, card.free),
        )


def test_rules_have_no_comma_but_between_them(planned, mixture) -> None:
    # llama.cpp cuts at every comma
    answer = json.loads(planned("-m", mixture, *CARD, "-c", 2048, "--json").out)
    for found in answer["plans"]:
        words = shlex.split(found["flags"])
        if "-ot" in words:
            text = words[words.index("-ot") + 1]
            assert len(parse_rules(text)) == len(text.split(","))


def test_a_header_from_a_server(planned, tmp_path, mixture) -> None:
    with served(tmp_path / "served") as server:
        (server.folder / "m.gguf").write_bytes(mixture.read_bytes())
        url = f"{server.address}/files/m.gguf"
        result = planned("-m", url, *CARD, "-c", 2048)
        assert result.code == 0, result.err
        assert "pyllama-cli -m m.gguf -c 2048" in result.out  # once it is here
        refused = planned("-m", url.replace("/files/", "/whole/"), *CARD)
        assert refused.code == 1 and "does not answer ranged requests" in refused.err


def test_weights_that_memory_cannot_keep_are_read_from_disk(planned, mixture, monkeypatch) -> None:
    from pyggml.backend import Memory
    from pyggml.backends.cpu import device

    monkeypatch.setattr(device, "host_memory", lambda: Memory(1 << 30, 1 << 31))
    monkeypatch.setattr(tool, "disk_gbs", lambda path, folder: 1.5)
    result = planned("-m", mixture, *CARD, "-c", 2048)
    assert result.code == 0, result.err
    assert "is read from disk each time" in result.out
    assert "1.5 GB/s" in result.out


def test_a_verified_plan_shows_both(planned, tmp_path) -> None:
    path = tiny.write_tiny(tmp_path / "tiny.gguf", "qwen3moe")
    args = ("-m", path, "--sim-device", "rtx3060:1GiB", "-c", 256, "-fitt", 0, "--verify")
    found = json.loads(planned(*args, "--json").out)["verified"]
    assert found["how"] == "simulated"
    for what in ("prompt", "generation"):
        assert found[f"modelled_{what}"] == pytest.approx(found[f"measured_{what}"], rel=0.15)
    text = planned(*args).out
    assert re.search(r"prompt +modelled +[\d.]+ t/s, simulated +[\d.]+ \([+-][\d.]+ %\)", text)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--model is required"),
        (("-m", "gone.gguf", *CARD), "gone.gguf"),
        (("-m", "{mixture}"), "there is no GPU to plan for"),
        (("-m", "{mixture}", "--sim-device", "rtx1"), "there is no card 'rtx1'"),
        (("-m", "{mixture}", *CARD, "-fitt", "-5"), "--fit-target -5"),
        (("-m", "{mixture}", *CARD, "--verify"), "is only its header"),
        (("-m", "https://example.com/m.gguf", *CARD, "--verify"), "download it first"),
        (("-m", "{mixture}", "--sim-device", "rtx3060:256MiB"), "use a smaller --ctx-size"),
        (("-m", "http://example.com/m.gguf", *CARD), "only https:// is used"),
    ],
)
def test_mistakes(planned, mixture, args, message) -> None:
    result = planned(*(str(a).replace("{mixture}", str(mixture)) for a in args))
    assert result.code == 1 and message in result.err
    assert "Traceback" not in result.err


def test_a_goal_that_there_is_not(planned, mixture) -> None:
    result = planned("-m", mixture, *CARD, "--for", "speed")
    assert result.code == 2 and "speed" in result.err
