"""The formats of pyllama-bench against golden text."""

import csv
import json
import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from pyggml.tools.bench import emit
from pyggml.tools.bench_measure import Sample
from pyggml.tools.bench_output import make_format
from pyggml.tools.bench_report import Machine, ModelInfo, Result, layout
from pyggml.tools.bench_startup import Startup
from pyggml.tools.bench_startup import layout as startup_layout
from pyggml.tools.bench_tasks import OUTER, TESTS, Task
from pyggml.version import __version__

GRID = {"numa": ("",), **{p.field: p.default for p in (*OUTER, *TESTS)}}


class Reference:
    """Only its version is asked for."""

    version = "llama-bench abc (7)"


def result(*ns: int, other: Sequence[int] = (), peaks: Sequence[int] = (), **task: Any) -> Result:
    sides = zip(ns, other, strict=True) if other else ((n,) for n in ns)
    rounds = [tuple(Sample(n, n / 1e9, 0.01) for n in side) for side in sides]
    settings = {"model": "it's.gguf", "n_threads": 2, "n_prompt": 512, **task}
    return Result(
        Task(**settings),
        ModelInfo('llama "135M" Q4_1', 96_576_768, 134_515_008),
        Machine("AMD EPYC"),
        "2026-10-01T12:00:00Z",
        rounds,
        Reference.version if other else "",
        peaks,
    )


PLAIN = result(1_000_000_000, 1_024_000_000)


def text(name: str, *results: Result, **options: Any) -> str:
    look = layout(GRID | options.pop("grid", {}), **options)
    form = make_format(name, look)
    return form.header() + "".join(map(form.record, results)) + form.footer()


def test_markdown_is_llama_benchs_table() -> None:
    generation = result(4_000_000_000, n_prompt=0, n_gen=128, n_depth=4096)
    assert text("md", PLAIN, generation) == (
        "| model                          |       size |     params | backend    | threads |"
        "            test |                  t/s |\n"
        "| ------------------------------ | ---------: | ---------: | ---------- | ------: |"
        " --------------: | -------------------: |\n"
        '| llama "135M" Q4_1              |  92.10 MiB |   134.52 M | CPU        |       2 |'
        "           pp512 |        506.00 ± 8.49 |\n"
        '| llama "135M" Q4_1              |  92.10 MiB |   134.52 M | CPU        |       2 |'
        "   tg128 @ d4096 |         32.00 ± 0.00 |\n"
        f"\nbuild: {__version__} (0)\n"
    )


def test_markdown_shows_parameters_that_vary() -> None:
    grid = {"n_batch": (512, 2048), "flash_attn": ("on",), "repack": (False,)}
    row = result(10**9, n_batch=512, flash_attn="on", repack=False)
    lines = text("md", row, grid=grid).splitlines()
    assert lines[0].endswith(
        "| threads | n_batch |  fa | rpk |            test |                  t/s |"
    )
    assert lines[2].endswith(
        "|       2 |     512 |   1 |   0 |           pp512 |        512.00 ± 0.00 |"
    )


def test_markdown_of_a_comparison() -> None:
    row = result(10**9, 2 * 10**9, other=(2 * 10**9, 2 * 10**9), peaks=(300 << 20, 200 << 20))
    lines = text("md", row, reference=Reference(), has_memory=True).splitlines()
    assert lines[0] == (
        "| model                          |       size | threads |            test |"
        "                 pyggml t/s |              llama.cpp t/s |  ratio | foreign |"
        "  peak memory |  llama.cpp's |"
    )
    assert lines[2] == (
        '| llama "135M" Q4_1              |  92.10 MiB |       2 |           pp512 |'
        "   384.00 ± 181.02 (384.00) |     256.00 ± 0.00 (256.00) |   1.50 |    0.01 |"
        "    300.0 MiB |    200.0 MiB |"
    )
    assert lines[-1] == f"build: {__version__} (0), llama.cpp: llama-bench abc (7)"


def test_json_is_one_array() -> None:
    out = text("json", PLAIN, PLAIN)
    assert out.startswith(
        '[\n  {\n    "build_commit": "' + __version__ + '",\n    "build_number": 0,\n'
    )
    assert '\n    "avg_ts": 506.000000,\n    "stddev_ts": 8.485281,\n' in out
    assert out.endswith(
        '    "samples_ns": [ 1000000000, 1024000000 ],\n    "samples_ts": [ 512, 500 ]\n  }\n]\n'
    )
    assert "\n  },\n  {\n" in out
    first, second = json.loads(out)
    assert first == second
    expected = {
        "cpu_strict": False,
        "repack": True,
        "flash_attn": -1,
        "model_type": 'llama "135M" Q4_1',
    }
    assert {name: first[name] for name in expected} == expected
    assert [k for k in first if "samples" not in k] == [f.name for f in layout(GRID).fields]


def test_json_lines_are_objects() -> None:
    out = text("jsonl", PLAIN, PLAIN)
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["avg_ns"] for r in records] == [1_012_000_000] * 2
    assert records[0] == json.loads(text("json", PLAIN))[0]


def test_csv_quotes_every_value() -> None:
    out = text("csv", PLAIN)
    header, row = out.splitlines()
    assert header.startswith("build_commit,build_number,cpu_info,gpu_info,backends,model_filename,")
    assert row.startswith(
        f'"{__version__}","0","AMD EPYC","","CPU","it\'s.gguf","llama ""135M"" Q4_1",'
    )
    assert row.endswith('"2026-10-01T12:00:00Z","1012000000","16970562","506.000000","8.485281"')
    assert next(csv.DictReader(out.splitlines()))["model_type"] == 'llama "135M" Q4_1'


def test_sql_can_be_executed() -> None:
    out = text("sql", PLAIN, PLAIN)
    assert out.startswith("CREATE TABLE IF NOT EXISTS llama_bench (\n  build_commit TEXT,\n")
    assert "\n  stddev_ts REAL\n);\n\nINSERT INTO llama_bench (build_commit, " in out
    with sqlite3.connect(":memory:") as base:
        base.executescript(out)
        rows = base.execute("SELECT model_filename, n_prompt, repack, avg_ts FROM llama_bench")
        assert rows.fetchall() == [("it's.gguf", 512, 1, 506.0)] * 2
    base.close()


def test_fields_have_llama_benchs_order() -> None:
    names = (
        "build_commit build_number cpu_info gpu_info backends model_filename model_type model_size "
        "model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v "
        "n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split "
        "tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack "
        "fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts"
    )
    assert [f.name for f in layout(GRID).fields] == names.split()


def test_a_comparison_adds_fields() -> None:
    row = result(10**9, 2 * 10**9, other=(4 * 10**9, 4 * 10**9), peaks=(300, 200))
    record = json.loads(text("jsonl", row, reference=Reference(), has_memory=True))
    expected = {
        "median_ts": 384.0,
        "llama_cpp": "llama-bench abc (7)",
        "llama_cpp_median_ts": 128.0,
        "ratio": 3.0,
        "n_disturbed": 0,
        "peak_rss": 300,
        "llama_cpp_peak_rss": 200,
        "llama_cpp_samples_ns": [4 * 10**9] * 2,
    }
    assert {name: record[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["csv", "json", "jsonl", "md", "sql"])
def test_values_fit_the_types_of_their_fields(name: str) -> None:
    row = result(10**9, other=(10**9,), peaks=(3, 2))
    look = layout(GRID, Reference(), has_memory=True)
    for field in look.fields:
        assert type(field.value(row)) is field.kind, field.name
    assert "it's" in text(name, row, reference=Reference()) or name in ("md", "sql")


def test_results_show_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def results() -> Any:
        for _ in range(2):
            yield PLAIN
            seen.append(capsys.readouterr().out.count("pp512"))

    emit(layout(GRID), results(), [("md", sys.stdout)])
    assert seen == [1, 1]


def test_startup_table() -> None:
    rounds = [
        tuple(Sample(n, 1.0, 0.0) for n in ns)
        for ns in ((10**9, 3 * 10**9), (2 * 10**9, 5 * 10**9))
    ]
    look = startup_layout(compare=True)
    form = make_format("md", look)
    found = Startup("models/x.gguf", 2, rounds)
    assert form.record(found) == (
        "| x                                  |       2 |  1.50 (1.00 to 2.00) |"
        "  4.00 (3.00 to 5.00) |   2.67 |    0.00 |\n"
    )
    assert "pyllama-cli -m FILE -t N -p hi -n 1" in form.footer()
    assert "from llama_cpp import Llama" in form.footer()
    record = json.loads(make_format("jsonl", look).record(found))
    assert record["median_s"] == 1.5 and record["llama_cpp_samples_s"] == [3, 5]
