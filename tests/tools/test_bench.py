"""pyllama-bench: lists of parameters and whole runs on a tiny model."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyggml.backends.reference.device import RefDevice
from pyggml.errors import ConfigError, UserError
from pyggml.threads import usable_cpus
from pyggml.tools import bench, bench_measure, bench_memory, bench_modes, bench_startup
from pyggml.tools.bench_pyggml import PyggmlSide
from pyggml.tools.bench_tasks import (
    Grid,
    Task,
    n_cores,
    numbers,
    parse_grid,
    tasks,
    thread_params,
    varied,
)
from pyggml.tools.main import run_tool
from pyggml.tools.options import ToolCommand


def parsed(*args: str) -> dict[str, Any]:
    """What the tool would be given for a command line."""
    found: dict[str, Any] = {}
    ToolCommand("bench", found.update).main(args=list(args), standalone_mode=False)
    return found


def grid_of(model: str | os.PathLike[str], *args: str) -> Grid:
    return parse_grid(parsed("-m", str(model), *args))


# ---------------------------------------------------------------- lists
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("1,2,2", [1, 2, 2]),
        ("1-4", [1, 2, 3, 4]),
        ("128-512+128", [128, 256, 384, 512]),
        ("128-500+128", [128, 256, 384]),
        ("1-64*4", [1, 4, 16, 64]),
        ("7-7*1", [7]),
        ("8,1-2, 0", [8, 1, 2, 0]),
    ],
)
def test_numbers_and_ranges(text: str, expected: list[int]) -> None:
    assert numbers("-p", text) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1-", "1,,2", "4-1", "1-4*1", "0-4*2", "1-9+0", "1-2-3", "0-20000"]
)
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"-p {text}: ")):
        numbers("-p", text)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-ctk", "f16,q9_9"), "-ctk q9_9: one of f32, f16, bf16, q8_0"),
        (("-fa", "maybe"), "-fa maybe: one of auto, on, off"),
        (("-lm", "floppy"), "-lm floppy: one of auto, none"),
        (("--repack", "2"), "--repack 2: one of 0, 1"),
        (("-t", "0"), "-t 0: it must be at least 1"),
        (("-pg", "512"), "-pg 512: it takes two numbers"),
    ],
)
def test_bad_values_name_flag_and_way_out(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    (tmp_path / "m").touch()
    with pytest.raises(ConfigError, match=said):
        grid_of(tmp_path / "m", *args)


def test_defaults_are_llama_benchs(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    grid = grid_of(tmp_path / "m")
    assert [(t.name, t.n_batch, t.n_ubatch, t.type_k, t.flash_attn) for t in tasks(grid)] == [
        ("pp512", 2048, 512, "f16", "auto"),
        ("tg128", 2048, 512, "f16", "auto"),
    ]
    assert grid["n_threads"] == (n_cores(),)
    assert varied(grid) == []


def test_the_product_has_llama_benchs_order(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    args = [
        "-p",
        "0,4",
        "-p",
        "8",
        "-n",
        "2",
        "-pg",
        "3,1",
        "-b",
        "16,32",
        "-t",
        "1-2",
        "-d",
        "0,5",
    ]
    grid = grid_of(f"{tmp_path / 'a'},{tmp_path / 'b'}", *args)
    rows = [(Path(t.model).name, t.n_batch, t.n_threads, t.name) for t in tasks(grid)]
    names = ["pp4", "pp8", "tg2", "pp3+tg1"]
    assert rows == [
        (model, n_batch, n_threads, name + depth)
        for model in "ab"
        for n_batch in (16, 32)
        for n_threads in (1, 2)
        for depth in ("", " @ d5")
        for name in names
    ]
    assert varied(grid) == ["n_batch"]


def test_older_spellings(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    grid = grid_of(tmp_path / "m", "-mmp", "0,1", "-fa", "1", "-rpk", "0")
    assert (grid["load_mode"], grid["flash_attn"], grid["repack"]) == (
        ("none", "mmap"),
        ("on",),
        (False,),
    )
    assert varied(grid) == ["flash_attn", "load_mode", "repack"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [((), (True,)), (("-nr",), (False,)), (("--repack", "1", "--no-repack"), (True, False))],
)
def test_weights_stay_as_they_are_on_demand(
    tmp_path: Path, args: tuple[str, ...], expected: tuple[bool, ...]
) -> None:
    (tmp_path / "m").touch()
    assert grid_of(tmp_path / "m", *args)["repack"] == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--vs-llama-cpp",), "auto"),
        (("--vs-llama-cpp", "-r", "3"), "auto"),
        (("--vs-llama-cpp", "xllamacpp", "-r", "3"), "xllamacpp"),
        (("--vs_llama_cpp=/bin/llama-bench",), "/bin/llama-bench"),
    ],
)
def test_the_reference_may_be_left_out(args: tuple[str, ...], expected: str) -> None:
    values = parsed("-p", "1", *args)
    assert values["reference"] == expected
    assert values["n_prompt"] == ("1",)
    assert values.get("repetitions", 3) == 3


# ---------------------------------------------------------------- whole runs
@pytest.mark.usefixtures("reference_device")
def test_a_run_prints_json_and_csv(
    tiny_models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "-p",
        "6",
        "-n",
        "2",
        "-pg",
        "3,2",
        "-d",
        "0,4",
        "-t",
        "1",
        "-r",
        "2",
        "-o",
        "json",
        "-oe",
        "csv",
    ]
    run_tool("bench", ["-m", tiny_models["llama"], *args])
    out, err = capsys.readouterr()
    records = json.loads(out)
    found = [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in records]
    assert found == [(6, 0, 0), (0, 2, 0), (3, 2, 0), (6, 0, 4), (0, 2, 4), (3, 2, 4)]
    for r in records:
        assert len(r["samples_ns"]) == len(r["samples_ts"]) == 2
        n_tokens = r["n_prompt"] + r["n_gen"]
        assert r["samples_ts"][0] == pytest.approx(1e9 * n_tokens / r["samples_ns"][0])
        assert r["avg_ts"] == pytest.approx(sum(r["samples_ts"]) / 2, rel=1e-5)
        assert r["model_filename"] == tiny_models["llama"]
        assert (r["backends"], r["cpu_info"], r["n_threads"]) == ("CPU", "NumPy reference", 1)
    assert len(err.splitlines()) == 1 + len(records)


@pytest.mark.usefixtures("reference_device")
def test_a_comparison_shows_both_sides(
    tiny_models: dict[str, str],
    fake_llama_bench: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_measure, "busy_seconds", lambda: None)
    path = fake_llama_bench()
    args = ["-p", "8", "-n", "0", "-t", "1", "-r", "2", "--vs-llama-cpp", path, "--progress"]
    run_tool("bench", ["-m", tiny_models["llama"], *args])
    out, err = capsys.readouterr()
    header, _, row = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()[:3]
    )
    named = dict(zip(header, row, strict=True))
    assert named["test"] == "pp8" and named["threads"] == "1"
    assert named["llama.cpp t/s"] == "2000.00 ± 0.00 (2000.00)"
    mine = float(named["pyggml t/s"].split("(")[1].rstrip(")"))
    assert float(named["ratio"]) == pytest.approx(mine / 2000, abs=0.01)
    assert named["foreign"] == "n/a"
    assert "llama.cpp: llama-bench abc (7)" in out
    assert "pyllama-bench: benchmark 1/1: run 2/2" in err


def test_without_warm_up_kernels_are_compiled_before(
    tiny_models: dict[str, str],
    reference_device: RefDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []
    monkeypatch.setattr(reference_device, "compile_kernels", lambda: calls.append("compiled"))
    monkeypatch.setattr(PyggmlSide, "warm_up", lambda self, work: calls.append("warm-up"))
    args = ["-m", tiny_models["llama"], "-p", "4", "-n", "0", "-r", "1", "-o", "jsonl"]
    run_tool("bench", [*args, "--no-warmup"])
    assert calls == ["compiled"]
    run_tool("bench", args)
    assert calls == ["compiled", "warm-up"]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["-p", "1"], 1, "--model is required"),
        (["-m", "/nowhere/x.gguf"], 1, "-m /nowhere/x.gguf: there is no such file"),
        (["-m", "{m}", "-r", "0"], 1, "-r 0: it must be at least 1"),
        (["-m", "{m}", "-p", "0", "-n", "0"], 1, "nothing to measure"),
        (["-m", "{m}", "-ctv", "q9_9"], 1, "-ctv q9_9: one of f32, f16, bf16"),
        (["-m", "{m}", "-o", "xml"], 2, "'xml' is not one of"),
        (["-m", "{m}", "-cnv"], 2, "No such option"),
    ],
)
@pytest.mark.usefixtures("reference_device")
def test_mistakes_are_sentences(
    tiny_models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    said: str,
) -> None:
    with pytest.raises(SystemExit) as left:
        run_tool("bench", [a.format(m=tiny_models["llama"]) for a in args])
    assert left.value.code == code
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- threads
FIRST, LAST = min(usable_cpus()), max(usable_cpus())


def test_flags_of_threads_are_lists(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    mask = f"0x0,{1 << LAST:x}"
    args = ["-C", mask, "--cpu-strict", "0,1", "--poll", "0,50", "-d", "0,7", "-p", "1", "-n", "0"]
    grid = grid_of(tmp_path / "m", *args, "--numa", "isolate", "-t", "1")
    found = [(t.cpu.cpus, t.cpu_strict, t.n_depth, t.poll) for t in tasks(grid)]
    assert found == [
        (cpus, strict, depth, poll)
        for cpus in (None, frozenset({LAST}))
        for strict in (0, 1)
        for depth in (0, 7)
        for poll in (0, 50)
    ]
    assert {t.numa for t in tasks(grid)} == {"isolate"}
    assert {t.mask for t in tasks(grid)} == {"0x0", hex(1 << LAST)}
    assert varied(grid) == ["cpu_mask", "cpu_strict", "poll", "numa"]
    both_flags = ("-C", f"{1 << LAST:x}", "-Cr", f"{FIRST}-{FIRST}")
    (both,) = tasks(grid_of(tmp_path / "m", *args[-4:], *both_flags))
    assert both.cpu.cpus == {FIRST, LAST} and both.mask == hex(1 << FIRST | 1 << LAST)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-C", "0xg"), "-C '0xg' is not a hexadecimal number"),
        (("-C", "1" + 20 * "0"), "-C 1(0+): this process cannot run on CPU 80"),
        (("-Cr", "5"), "-Cr '5' is not a range of CPUs"),
        (("--cpu-strict", "2"), "--cpu-strict 2: allowed are 0 to 1"),
        (("--poll", "0,101"), "--poll 0,101: allowed are 0 to 100"),
    ],
)
def test_wrong_threads(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    (tmp_path / "m").touch()
    with pytest.raises(ConfigError, match=said):
        grid_of(tmp_path / "m", *args)
    with pytest.raises(ConfigError, match=said):
        thread_params(parsed(*args))


@pytest.mark.usefixtures("reference_device")
def test_a_run_says_how_threads_ran(
    tiny_models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    opened = PyggmlSide.open

    def record(side: PyggmlSide, task: Task) -> None:
        opened(side, task)
        seen.append((side.context.params.cpu, side.model.numa))

    monkeypatch.setattr(PyggmlSide, "open", record)
    threads = ["-Cr", f"{LAST}-{LAST}", "--cpu-strict", "1", "--poll", "7", "--numa", "distribute"]
    args = ["-m", tiny_models["llama"], "-p", "4", "-n", "0", "-t", "1", "-r", "1", *threads]
    run_tool("bench", [*args, "-o", "jsonl", "-oe", "md"])
    out, err = capsys.readouterr()
    record_ = json.loads(out)
    assert (record_["cpu_mask"], record_["poll"]) == (hex(1 << LAST), 7)
    assert record_["cpu_strict"] is True
    ((cpu, numa),) = seen
    assert (cpu.cpus, cpu.cpu_strict, cpu.poll, numa) == ({LAST}, 1, 7, "distribute")
    titles = [cell.strip() for cell in err.splitlines()[0].split("|")]
    assert {"range", "strict", "poll", "numa"} <= set(titles) and "cpu_mask" not in titles


@pytest.mark.parametrize(
    "flag",
    [
        *("--poll 0", "--cpu-strict 1", "--numa distribute", "-nr", "-rpk 0", "-lm none"),
        *("-p 8", "-n 8", "-pg 8,8", "-d 8", "-b 8", "-ub 8", "-ctk f32", "-ctv f32", "-fa on"),
        *("--memory", "--delay 1", "--no-warmup", "--progress", "--types f16"),
        *("-ngl 1", "-ot x=CPU", "-nkvo 1", "--sim-device rtx3060"),
    ],
)
def test_startup_refuses_what_it_does_not_pass_on(
    flag: str, tiny_models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_tool("bench", ["-m", tiny_models["llama"], "--startup", *flag.split()])
    said = "--startup starts commands with -m and -t alone: leave"
    assert f"{said} {flag.split()[0]} away" in capsys.readouterr().err


def test_startup_hears_all_other_flags(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = ["-m", tiny_models["llama"], "--startup", "-t", "1", "-r", "2", "--prio", "0"]
    started: list[list[str]] = []

    def first_byte(command: list[str]) -> int:
        started.append(command)
        return 5

    monkeypatch.setattr(bench_startup, "first_byte", first_byte)
    run_tool("bench", [*taken, "-o", "csv", "-oe", "none"])
    assert len(started) == 1 + 2 and tiny_models["llama"] in started[0]
    assert tiny_models["llama"] in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--types f16", "--shapes 8x32x1", "--experts 4,2"])
def test_models_have_no_operations(
    flag: str, tiny_models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_tool("bench", ["-m", tiny_models["llama"], *flag.split()])
    said = "only with --op there are operations to choose: leave"
    assert f"{said} {flag.split()[0]} away" in capsys.readouterr().err


def test_modes_heed_flags_that_there_are() -> None:
    for mode in (bench_modes.STARTUP, bench_modes.OP, bench_modes.MODELS):
        assert mode.targets < bench_modes.FLAGS.keys()


def test_priority_is_a_nice_value(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: given.append(value))
    for level in (-1, 0, 1, 2, 3):
        bench.set_priority(level)
    assert given == [5, -5, -10, -20]

    def refuse(which: int, who: int, value: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    with pytest.raises(UserError, match="--prio 2: the system refuses"):
        bench.set_priority(2)


# ---------------------------------------------------------------- memory and start
@pytest.mark.usefixtures("reference_device")
def test_the_memory_process_prints_its_peak(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = json.dumps({"model": tiny_models["llama"], "n_threads": 1, "n_prompt": 4, "n_gen": 1})
    monkeypatch.setattr(sys, "argv", ["bench_memory", "pyggml", task])
    bench_memory.main()
    assert int(capsys.readouterr().out) > 10 << 20


def test_peak_of_a_binary(fake_llama_bench: Callable[..., str]) -> None:
    task = Task(model="m", n_threads=1, n_prompt=1)
    small = bench_memory.peak(fake_llama_bench(""), task)
    large = bench_memory.peak(fake_llama_bench("a = bytearray(b'x') * (300 << 20)"), task)
    assert large > max(small, 300 << 20)
    with pytest.raises(UserError, match="failed with 3"):
        bench_memory.peak(fake_llama_bench("sys.exit(3)"), task)


def test_startup_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [[sys.executable, "-c", f"print('{x}')"] for x in "ab"]
    monkeypatch.setattr(bench_startup, "commands", lambda *args, **kwargs: commands)
    found = bench_startup.measure("m", 1, 2, 1, compare=True)
    assert len(found.seconds(0)) == len(found.seconds(1)) == 2
    assert min(found.seconds(0)) > 0
    assert found.ratio == pytest.approx(found.median(1) / found.median(0))


def test_startup_asks_for_one_token() -> None:
    mine, *_ = bench_startup.commands("m.gguf", 2, compare=False)
    joined = " ".join(mine)
    assert "-m m.gguf -p hi -n 1" in joined and "-t 2" in joined
    with pytest.raises(UserError, match="failed with 1: oh"):
        bench_startup.first_byte([sys.executable, "-c", "import sys; sys.exit('oh')"])
