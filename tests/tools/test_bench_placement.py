"""Placement in pyllama-bench: lists as llama-bench spells them, and simulated cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import ConfigError
from pyggml.llama.placement_rules import Rule
from pyggml.tools.bench_placement import short
from pyggml.tools.bench_tasks import Grid, Task, parse_grid, tasks, varied
from pyggml.tools.main import run_tool
from pyggml.tools.options import ToolCommand


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "m").touch()
    return tmp_path / "m"


def grid_of(file: Path, *args: str) -> Grid:
    found: dict[str, Any] = {}
    ToolCommand("bench", found.update).main(["-m", str(file), *args], standalone_mode=False)
    return parse_grid(found)


def prompts_of(file: Path, *args: str) -> list[Task]:
    return [t for t in tasks(grid_of(file, *args)) if not t.n_gen]


def test_rules_of_a_test_are_joined_by_semicolons(file: Path) -> None:
    first, second, third = prompts_of(
        file, "-ot", r"a=CPU;blk\.\d{1,2}\.b=CUDA0,none", "--override-tensor", "c=CPU"
    )
    assert first.placement.rules == (Rule("a", "CPU"), Rule(r"blk\.\d{1,2}\.b", "CUDA0"))
    assert second.placement.rules == ()
    assert third.placement.rules == (Rule("c", "CPU"),)
    assert first.overrides == r"a=CPU;blk\.\d{1,2}\.b=CUDA0"


def test_rules_come_before_the_shorter_word(file: Path) -> None:
    [task] = prompts_of(file, "-ot", "a=CPU", "-ncmoe", "6")
    assert [str(rule) for rule in task.placement.rules] == ["-ot a=CPU", "--n-cpu-moe 6"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1/9", [(1, 9)]),
        ("1,9", [(1, 9)]),  # which llama-bench reads as two tests
        ("1/9,1/1", [(1, 9), (1, 1)]),
        ("0", [(0,)]),
    ],
)
def test_shares_of_a_test(file: Path, text: str, expected: list[tuple[float, ...]]) -> None:
    found = [task.placement.tensor_split for task in prompts_of(file, "-ts", text)]
    assert found == [split if any(split) else () for split in expected]


@pytest.mark.parametrize(
    ("args", "field", "expected"),
    [
        (("-ngl", "0,99,auto,all,-1"), "n_gpu_layers", [0, 99, -1, -2, -1]),
        (("-dev", "CUDA0/CUDA1,none,auto"), "devices", [("CUDA0", "CUDA1"), (), None]),
        (("-sm", "none,layer"), "split_mode", ["none", "layer"]),
        (("-mg", "1,-1"), "main_gpu", [1, -1]),
        (("--no-host", "0,1"), "no_host", [False, True]),
    ],
)
def test_lists_of_placements(
    file: Path, args: tuple[str, ...], field: str, expected: list[Any]
) -> None:
    assert [getattr(task.placement, field) for task in prompts_of(file, *args)] == expected
    assert varied(grid_of(file, *args)) == [field]


def test_models_are_loaded_anew_only_for_another_placement(file: Path) -> None:
    keys = [task.model_key for task in prompts_of(file, "-ngl", "1,2", "-nkvo", "0,1")]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-ot", "a=CPU;b"), "'b' is no PATTERN=TYPE"),
        (("-ts", "1/x"), "--tensor-split 1/x: a share for each device"),
        (("-ts", "-1"), "--tensor-split -1: shares are 0 or more"),
        (("-sm", "row"), "--split-mode row: no device here"),
        (("-mg", "x"), "-mg x: numbers of GPUs"),
        (("-ngl", "1.5"), "--gpu-layers 1.5: a number of layers"),
        (("-nkvo", "2"), "-nkvo 2: one of 0, 1"),
        (("-ncmoe", "x"), "-ncmoe x: 'x' is neither a number nor a range"),
    ],
)
def test_wrong_placements(file: Path, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid_of(file, *args)


def test_long_rules_are_cut_in_the_table() -> None:
    assert short("exps=CPU") == "exps=CPU"
    text = short(r"blk\.(0|1|2|3|4|5|6|7|8)\.ffn_up_exps=CPU")
    assert len(text.replace("\\|", "|")) == 29
    assert text.startswith(r"blk\.(0\|1") and text.endswith("exps=CPU")


def bench(*args: str) -> None:
    run_tool("bench", ["-p", "40", "-n", "2", "-t", "1", "-r", "2", *args])


def test_modelled_tests(tiny_models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    rules = "attn_q=CPU;attn_k=CPU,ffn_(up|down)=CPU;ffn_gate=CUDA0"
    args = ["-m", tiny_models["llama"], "--sim-device", "rtx3060", "-ot", rules]
    bench(*args, "-o", "jsonl", "-oe", "md")
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["tensor_buft_overrides"] for r in records] == [
        rule for rule in rules.split(",") for _ in range(2)
    ]
    assert {r["gpu_info"] for r in records} == {"NVIDIA GeForce RTX 3060 [simulated]"}
    # the virtual clock knows no noise
    assert all(len(set(r["samples_ns"])) == 1 and r["avg_ns"] > 0 for r in records)
    assert records[0]["avg_ns"] != records[2]["avg_ns"]
    assert "modelled t/s" in err and "times are modelled, not measured" in err
    n_columns = {line.replace("\\|", "").count("|") for line in err.splitlines() if "|" in line}
    assert len(n_columns) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sim-device", "rtx3060", "--memory"), "--memory measures: leave --sim-device away"),
        (("--sim-device", "rtx3060", "--vs-llama-cpp"), "--vs-llama-cpp measures: leave"),
        (("-ngl", "3", "--vs-llama-cpp"), "--vs-llama-cpp compares CPUs: leave -ngl"),
        (("--sim-device", "rtx3060", "-dev", "CUDA1"), "no GPU is called so"),
        (("-ot", "a=FOO"), "available buffer types: CPU"),
    ],
)
def test_what_cannot_be_benchmarked(
    tiny_models: dict[str, str],
    args: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        bench("-m", tiny_models["llama"], *args)
    assert said in capsys.readouterr().err
