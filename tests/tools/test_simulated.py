"""--sim-device and --sim-trace: the same text, and what is told of the modelled machine."""

import json
import re
from pathlib import Path

import pytest
import tiny
from cli_process import Run

HELLO = ("-p", "Hello", "-n", "6", "--temp", "0", "-fa", "off", "-c", "256")
CARD = ("--sim-device", "rtx3060:4GiB")
NOTE = "(modelled, not measured)"
NUMBER = r"[\d.]+"


def test_the_text_is_that_of_the_cpu(run: Run) -> None:
    want = run(*HELLO)
    for flags in (CARD, (*CARD, "-ngl", "1"), (*CARD, *CARD, "-ts", "1,1"), (*CARD, "-ngl", "0")):
        result = run(*HELLO, *flags)
        assert (result.code, result.out) == (0, want.out), result.err


def test_experts_on_the_cpu(run: Run, tmp_path: Path) -> None:
    path = str(tiny.write_tiny(tmp_path / "moe.gguf", "qwen3moe", weight_type="Q8_0"))
    want = run("-m", path, *HELLO)
    result = run(
        "-m", path, *HELLO, "-ngl", "99", "-ot", "exps=CPU", "--sim-device", "rtx3060:12GiB"
    )
    assert (result.code, result.out) == (0, want.out), result.err
    told = next(line for line in result.err.splitlines() if "simulated: CPU" in line)
    assert float(re.findall(rf"computing ({NUMBER}) ms", told)[0]) > 0
    assert " 0 kernels" not in result.err


def test_the_run_ends_with_what_was_modelled(run: Run) -> None:
    lines = run(*HELLO, *CARD).err.splitlines()
    told = [line for line in lines if line.startswith("simulated: ")]
    assert lines[-len(told) :] == told and len(told) == 4
    assert re.fullmatch(
        rf"simulated: prompt \d+ tokens in {NUMBER} ms, {NUMBER} t/s, "
        rf"generation 5 tokens in {NUMBER} ms, {NUMBER} t/s \(modelled, not measured\)",
        told[0],
    )
    assert "CUDA0: NVIDIA GeForce RTX 3060 [simulated]: at most" in told[1]
    assert "of 4096.0 MiB" in told[1] and " 0 kernels" not in told[1]
    assert told[2].endswith(NOTE) and told[3].endswith(NOTE)
    (tokens, ms, rate) = re.findall(
        rf"generation (\d+) tokens in ({NUMBER}) ms, ({NUMBER})", told[0]
    )[0]
    assert float(rate) == pytest.approx(1e3 * int(tokens) / float(ms), rel=0.02)


def test_slower_cards_take_longer(run: Run) -> None:
    def rate(*flags: str) -> float:
        told = run(*HELLO, *flags).err
        return float(re.findall(rf"generation .* ms, ({NUMBER}) t/s", told)[0])

    assert rate("--sim-device", "rtx3060,vram=1") < rate("--sim-device", "rtx3060")


def test_the_trace_is_of_the_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = run(*HELLO, *CARD, "--sim-trace", str(path))
    assert result.code == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert "CUDA0: NVIDIA GeForce RTX 3060 [simulated]" in names
    computed = [e for e in events if e["ph"] == "X" and e["name"].startswith("MUL_MAT ")]
    assert computed and min(e["ts"] for e in events if e["ph"] == "X") < 1000


def test_a_trace_that_is_not_made_leaves_the_old_one(run: Run, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    for path in (old, new):
        assert run(*HELLO, *CARD, "-ot", "x=FOO", "--sim-trace", str(path)).code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "old"


def test_rules_and_memory_are_told_without_being_asked(run: Run) -> None:
    lines = run(*HELLO, *CARD, "-ot", r"ffn_down=CPU,cache_k_l0=CPU,nothing=CPU").err.splitlines()
    assert "warning: -ot nothing=CPU places no tensor: no name matches" in lines
    rules = [line for line in lines if line.startswith("-ot ")]
    assert [re.sub(NUMBER + " MiB", "", rule) for rule in rules] == [
        "-ot ffn_down=CPU: 2 tensors,  in CPU",
        "-ot cache_k_l0=CPU: 1 tensor,  in CPU",
    ]
    table = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert table == ["memory breakdown [MiB]", "- CUDA0 (RTX 3060 [simulated])", "- Host"]
    loud = run(*HELLO, *CARD, "-ot", "ffn_down=CPU", "-lv", "4").err
    assert loud.count("-ot ffn_down=CPU: ") == 1 and loud.count("memory breakdown") == 1
    quiet = run(*HELLO, *CARD, "-ot", "ffn_down=CPU", "-lv", "2")
    assert quiet.code == 0 and not quiet.err
    assert "breakdown" not in run(*HELLO).err


def test_a_model_on_a_server_is_for_the_planner(run: Run) -> None:
    for flags in ((), ("--dry-run",)):
        result = run("-m", "https://localhost/m.gguf", *HELLO, *CARD, *flags)
        assert result.code == 1 and not result.out
        assert "--model https://localhost/m.gguf: download the file first" in result.err


def test_devices_are_listed(run: Run) -> None:
    result = run("--list-devices", *CARD, "--sim-device", "h200,reserved=1GiB")
    assert result.out.splitlines() == [
        "Available devices:",
        "  CUDA0: NVIDIA GeForce RTX 3060 [simulated] (4096 MiB, 3716 MiB free)",
        "  CUDA1: NVIDIA H200 [simulated] (144384 MiB, 143360 MiB free)",
    ]


def test_the_environment_names_several_cards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGGML_ARG_SIM_DEVICE", "rtx3060:1GiB;rtx4090:2GiB")
    assert "CUDA1: NVIDIA GeForce RTX 4090" in run("--list-devices").out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--sim-device", "rtx9999"), "there is no card 'rtx9999'"),
        (("--sim-device", "rtx3060:1"), "'1' is not a size of memory"),
        (("--sim-trace", "trace.json"), "--sim-trace is about simulated cards"),
        (
            (*CARD, "--sim-trace", "/nowhere/trace.json"),
            "--sim-trace /nowhere/trace.json: no such file",
        ),
        (("--sim-device", "rtx3060", "-dev", "CUDA1"), "CUDA1"),
    ],
)
def test_mistakes(flags: tuple[str, ...], words: str, run: Run) -> None:
    result = run(*HELLO, *flags)
    assert result.code == 1 and words in result.err and not result.out


def test_a_dry_run_knows_the_cards(run: Run) -> None:
    result = run("--dry-run", "--json", *CARD)
    plan = json.loads(result.out)
    card = plan["devices"][0]
    assert (card["name"], card["simulated"], card["total"]) == ("CUDA0", True, 4 << 30)
    assert plan["modelled"]["tg_ms"] > 0
