"""--dry-run: what it prints, and that its JSON is what docs/dry-run.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import Run
from model_shapes import write_header
from tool_here import tool_with

from pyggml.backend import Memory
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.reference.device import RefDevice
from pyggml.llama import load

DOC = Path(__file__).parent.parent.parent / "docs" / "dry-run.md"
TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list}


def documented() -> dict[str, type]:
    """Paths of the JSON object and their types."""
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", DOC.read_text(), re.MULTILINE)
    return {path: TYPES[name] for path, name in rows}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for part in value:
            yield from leaves(part, f"{path}[]")
    else:
        yield path, value


def plan(run: Run, *args: str) -> dict[str, Any]:
    result = run(*args, "--dry-run", "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_the_object_has_the_documented_schema(run: Run, tiny_models: dict[str, str]) -> None:
    cards = ("--sim-device", "rtx3060:1GiB")
    found = plan(run, "-m", tiny_models["qwen35"], "-c", "512", *cards, "-ot", "ffn_up=CPU")
    schema = documented()
    assert list(found) == list(dict.fromkeys(re.split(r"\W", path)[0] for path in schema))
    seen = set()
    for path, value in leaves(found):
        assert type(value) is schema[path], path
        seen.add(path)
    assert seen == schema.keys()


def test_it_is_the_memory_of_the_real_run(run: Run, tiny_models: dict[str, str]) -> None:
    path = tiny_models["gemma3"]
    found = plan(run, "-m", path, "-c", "512", "-ub", "64", "--no-warmup")
    with load(path, n_ctx=512, n_ubatch=64, warmup=False) as llama:
        weights, caches = llama.model.weights.tensors, llama.context().memory.caches
        (device,) = llama.memory_table().devices
    (cpu,) = found["devices"]
    assert (cpu["model"], cpu["context"], cpu["compute"]) == (
        device.use.model,
        device.use.context,
        device.use.compute,
    )
    assert [t["name"] for t in found["tensors"]] == list(weights)
    assert [tuple(t["ne"]) for t in found["tensors"]] == [
        t.ne[: t.n_dims] for t in weights.values()
    ]
    sizes = {p["layer"]: p["bytes"] for p in found["kv"]}
    assert sizes == {il: c.k[il].nbytes + c.v[il].nbytes for c in caches for il in c.layers}
    assert {p["buffer"] for p in found["kv"]} == {"CPU"}


def test_rules_and_devices(run: Run, tiny_models: dict[str, str]) -> None:
    found = plan(
        run,
        *("-m", tiny_models["llama"], "-c", "512"),
        *("--sim-device", "rtx3060:1GiB", "--sim-device", "rtx4090:1GiB", "-ts", "1,3"),
        *("-ot", r"blk\.0\.ffn_(up|gate)=CPU", "-ot", "cache_k_l0=CPU"),
    )
    weights = {t["name"]: t for t in found["tensors"]}
    moved = [weights[f"blk.0.ffn_{part}.weight"] for part in ("up", "gate")]
    keys = [p for p in found["kv"] if p["layer"] == 0 and p["buffer"] == "CPU"]
    assert found["rules"] == [
        {
            "rule": r"-ot blk\.0\.ffn_(up|gate)=CPU",
            "tensors": 2,
            "bytes": sum(t["bytes"] for t in moved),
        },
        {"rule": "-ot cache_k_l0=CPU", "tensors": 1, "bytes": keys[0]["bytes"]},
    ]
    assert all(t["buffer"].startswith("CPU") for t in moved)
    names = [(d["name"], d["description"], d["simulated"]) for d in found["devices"][:-1]]
    assert names == [
        ("CUDA0", "NVIDIA GeForce RTX 3060 [simulated]", True),
        ("CUDA1", "NVIDIA GeForce RTX 4090 [simulated]", True),
    ]
    for d in found["devices"][:-1]:
        mine = [t["bytes"] for t in weights.values() if t["buffer"] == d["name"]]
        assert sum(mine) <= d["model"] < sum(mine) + 128 * len(mine)
        assert d["context"] == sum(p["bytes"] for p in found["kv"] if p["buffer"] == d["name"])
        assert d["total"] == 1 << 30
    assert not found["devices"][-1]["simulated"]
    assert found["graph"]["pp"]["splits"] > 3


def test_a_header_will_do_here_only(
    run: Run, tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "header.gguf")
    assert tool_with(capsys)("header", tiny_models["llama"], path).code == 0
    of_header = plan(run, "-m", path, "-c", "512")
    of_file = plan(run, "-m", tiny_models["llama"], "-c", "512")
    for part in ("tensors", "kv", "rules", "graph"):
        assert of_header[part] == of_file[part]
    refused = run("-m", path, "-p", "hello")
    assert refused.code == 1 and "holds only the header" in refused.err
    assert "--dry-run" in refused.err


def test_text_for_people(run: Run, tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", "qwen3-30b-a3b")
    result = run("-m", str(path), "-c", "4096", "--dry-run")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "Qwen3 30B A3B · qwen3moe 31B Q4_K - Medium"
    assert lines[1].startswith("| memory breakdown [MiB] | total   free ")
    assert re.match(r"\|   - Host +\| .* = +\d+ \+ +384 \+ +\d+ ", lines[2])
    assert "graph: pp 2886 nodes in 1 split, tg 2886 nodes in 1 split" in lines
    weights = r"^weights: [\d,.]+ MiB in CPU_Mapped, [\d,.]+ MiB in CPU_REPACK$"
    assert re.search(weights, result.out, re.MULTILINE)
    assert "keys and values: 384.0 MiB in CPU" in lines
    assert re.fullmatch(r"modelled pp: 512 tokens in [\d,.]+ ms, [\d,.]+ t/s", lines[-4])
    assert re.fullmatch(r"modelled tg: 1 token in [\d,.]+ ms, [\d,.]+ t/s", lines[-2])
    assert re.fullmatch(r"  CPU computes [\d,.]+ ms in 1 split", lines[-1])


def test_times_of_a_device_that_nobody_knows_are_null(
    run: Run, tiny_models: dict[str, str], reference_device: RefDevice
) -> None:
    found = plan(run, "-m", tiny_models["llama"], "-c", "512")
    assert found["modelled"] is None
    assert [d["description"] for d in found["devices"]] == [reference_device.description]
    assert "modelled" not in run("-m", tiny_models["llama"], "-c", "512", "--dry-run").out


def test_what_does_not_fit_is_told_with_what_helps(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory", lambda self: Memory(8 << 30, 16 << 30))
    path = write_header(tmp_path / "m.gguf", "deepseek-r1")
    result = run("-m", str(path), "-c", "4096", "--dry-run")
    assert result.code == 0
    assert re.search(
        r"warning: CPU lacks 38\d,\d+\.\d MiB: 39\d,\d+\.\d MiB are wanted", result.err
    )
    assert "\nwhat helps: " in result.err and "(-c)" in result.err


def test_json_is_a_form_of_plans(run: Run, tiny_models: dict[str, str]) -> None:
    result = run("-m", tiny_models["llama"], "--json", "-p", "hello")
    assert result.code == 1
    assert result.err == "error: --json is the form of a plan: give --dry-run as well\n"


# ---------------------------------------------------------------- 671 billion weights
@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_header(tmp_path_factory.mktemp("r1") / "r1.gguf", "deepseek-r1"))


LINES = {
    "all layers, experts on the CPU": ("-ngl", "99", "-ot", "exps=CPU"),
    "some layers, quantized keys": (
        *("-ngl", "24", "-ot", r"\.ffn_.*_exps\.=CPU", "-ctk", "q8_0", "-ctv", "q8_0"),
    ),
    "gate of two layers on the card": (
        *("-ngl", "62", "-ot", r"\.(3|4)\.ffn_gate_exps=CUDA0", "-ot", "exps=CPU"),
    ),
}


@pytest.mark.parametrize("flags", LINES.values(), ids=LINES.keys())
def test_a_card_for_a_model_that_is_far_too_large(
    run: Run, r1: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory", lambda self: Memory(500 << 30, 512 << 30))
    lines = ("-m", r1, "-c", "8192", "--sim-device", "rtx3090", *flags, "--dry-run")
    result = run(*lines)
    assert (result.code, result.err) == (0, "")
    assert re.search(r"\|   - CUDA0 \(RTX 3090 \[simulated\]\) +\| 24576 = +\d+ \+", result.out)
    assert re.search(r"\|   - Host +\| +3\d{5} = 3\d{5} \+", result.out)
    for line in (
        r"modelled pp: 512 tokens in [\d,.]+ ms, [\d.]+ t/s",
        r"modelled tg: 1 token in [\d,.]+ ms, [\d.]+ t/s",
        r"  CUDA0 computes [\d,.]+ ms in \d+ splits, gets [\d,.]+ MiB, gives [\d,.]+ MiB",
    ):
        assert re.search(f"^{line}$", result.out, re.MULTILINE), line
    found = json.loads(run(*lines, "--json").out)
    assert sum(rule["tensors"] for rule in found["rules"]) == 3 * 58
    experts = [t for t in found["tensors"] if "_exps" in t["name"]]
    assert sum(rule["bytes"] for rule in found["rules"]) == sum(t["bytes"] for t in experts)
    cuda, cpu = found["devices"]
    assert cuda["model"] + cpu["model"] == pytest.approx(sum(t["bytes"] for t in found["tensors"]))
    assert cuda["free"] > 0 and cuda["model"] < 16 << 30


def test_weights_beyond_the_hosts_memory_are_told(
    run: Run, r1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory", lambda self: Memory(8 << 30, 8 << 30))
    line = ("-m", r1, "-c", "4096", "--sim-device", "rtx3090", "-ngl", "99", "-cmoe", "--dry-run")
    assert re.search(
        r"^warning: 376,\d{3}\.\d MiB of weights are more than the 8,192\.0 MiB of memory here: "
        "times do not contain reading them from disk",
        run(*line).err,
        re.MULTILINE,
    )


def test_experts_on_the_cpu_ask_two_cards_for_no_more_than_one(run: Run, r1: str) -> None:
    def computing(*cards: str) -> list[int]:
        given = [flag for card in cards for flag in ("--sim-device", card)]
        found = plan(run, "-m", r1, "-c", "8192", *given, "-ngl", "99", "-ot", "exps=CPU")
        return [d["compute"] for d in found["devices"]]

    one, two = computing("rtx3090"), computing("rtx3090", "rtx3090")
    # evaluations in flight would want copies of all experts, which are 366 GiB, per card
    assert max(two) < 2 * max(one) < 10 << 30
