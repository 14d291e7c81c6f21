"""pyllama-bench --op: what is asked for, what is computed and what is shown."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pyggml import quants
from pyggml.backend import tensor_get
from pyggml.backends.cpu.device import CpuDevice
from pyggml.dtypes import GGMLType as T
from pyggml.errors import ConfigError
from pyggml.threads import ThreadParams, usable_cpus
from pyggml.tools import bench_op
from pyggml.tools.bench_op import Operation, OpTask, op_tasks, random_bytes
from pyggml.tools.main import run_tool
from pyggml.tools.options import ToolCommand

ONE = [ThreadParams(1)]


def parsed(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ToolCommand("bench", found.update).main(args=list(args), standalone_mode=False)
    return found


def asked(*args: str) -> list[OpTask]:
    return op_tasks(parsed("--op", *args), ONE)


# ---------------------------------------------------------------- what is asked for
def test_lists_multiply() -> None:
    args = ("--types", "q4_k,F16", "--shapes", "16x256x1,8x512x3", "--repack", "1,0")
    tasks = asked("mul_mat", *args)
    assert [(t.type, t.shape, t.repack) for t in tasks] == [
        (type, shape, repack)
        for type in (T.Q4_K, T.F16)
        for shape in ("16x256x1", "8x512x3")
        for repack in (True, False)
    ]
    assert not asked("mul_mat", "--no-repack")[0].repack
    (experts,) = asked("mul_mat_id", "--types", "q8_0", "--shapes", "8x32x1", "--experts", "4,3")
    assert (experts.n_experts, experts.n_used, experts.experts) == (4, 3, "3/4")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--types", "q9_9"), "--types q9_9: one of f32, f16, q4_0"),
        (("--types", "i32"), "--types i32: one of f32"),
        (("--shapes", "4096x4096"), "--shapes 4096x4096: it must be MxKxN, as in 4096x4096x1"),
        (("--shapes", "8x0x1"), "--shapes 8x0x1: it must be MxKxN"),
        (("--types", "q4_K", "--shapes", "8x100x1"), "a row of q4_K holds a multiple of 256"),
        *(
            (tuple(flag.split()), f"--op measures one .*: leave {flag.split()[0]} away")
            for flag in (
                *("-m x.gguf", "--vs-llama-cpp", "--memory", "--startup", "-lm none", "-mmp 0"),
                *("-p 8", "-n 8", "-pg 8,8", "-d 8", "-b 8", "-ub 8", "-ctk f32", "-ctv f32"),
                *("-fa on", "--delay 1", "--progress", "-ngl 1", "--sim-device rtx3060"),
            )
        ),
        (("--experts", "4,2"), "--experts are those of --op mul_mat_id"),
        (("--repack", "2"), "--repack 2: one of 0, 1"),
    ],
)
def test_mistakes_name_what_exists(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked("mul_mat", *args)


@pytest.mark.parametrize("text", ["8", "2,3", "8,0", "x,y"])
def test_wrong_experts(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--experts {text}: all experts"):
        asked("mul_mat_id", "--experts", text)


def test_an_unknown_operation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_tool("bench", ["--op", "soft_max"])
    assert "'mul_mat', 'mul_mat_id'" in capsys.readouterr().err


@pytest.mark.usefixtures("reference_device")
def test_without_the_cpu_backend() -> None:
    with pytest.raises(Exception, match="--op: the CPU backend is not among the devices"):
        asked("mul_mat")


# ---------------------------------------------------------------- what is computed
def result(operation: Operation, index: int) -> np.ndarray:
    node = operation._nodes[index]
    out = np.empty(node.ne[::-1], np.float32)
    tensor_get(node, memoryview(out).cast("B"))
    return out


def activations(operation: Operation, index: int) -> np.ndarray:
    x = operation._nodes[index].src[1]
    assert x is not None
    out = np.empty(x.ne[::-1], np.float32)
    tensor_get(x, memoryview(out).cast("B"))
    return out


@pytest.mark.parametrize("repack", [True, False])
def test_every_copy_is_multiplied(repack: bool) -> None:
    task = OpTask("mul_mat", T.Q8_0, 16, 64, 3, ThreadParams(2), repack)
    operation = Operation(task, CpuDevice(), cache=2000)
    assert (operation.n_copies, operation.repacked) == (8, repack)  # 4 * 2000 / 1088, rounded up
    assert operation.weight_bytes == 1088
    assert operation.run(2) > 0
    weights = quants.dequantize(random_bytes(T.Q8_0, 16, 64), T.Q8_0).reshape(16, 64)
    for i in range(8):
        want = activations(operation, i)[0, 0] @ weights.T
        assert np.allclose(result(operation, i)[0, 0], want, atol=0.02 * np.abs(want).max())
    operation.close()


def test_experts_are_multiplied() -> None:
    task = OpTask("mul_mat_id", T.F32, 8, 32, 2, ThreadParams(1), n_experts=4, n_used=3)
    operation = Operation(task, CpuDevice(), cache=0)
    operation.run()
    weights = quants.dequantize(random_bytes(T.F32, 32, 32), T.F32).reshape(4, 8, 32)
    x, got, ids = activations(operation, 0)[0], result(operation, 0)[0], operation._ids[0]
    for column in range(2):
        assert len(set(ids[column])) == 3
        for slot in range(3):
            want = weights[ids[column, slot]] @ x[column, slot]
            assert np.allclose(got[column, slot], want, rtol=1e-4, atol=1e-5)
    assert operation.weight_bytes == len(set(ids.reshape(-1))) * 8 * 32 * 4
    operation.close()


def test_prompts_need_no_copies() -> None:
    task = OpTask("mul_mat", T.F16, 8, 32, 9, ThreadParams(1))
    operation = Operation(task, CpuDevice(), cache=1 << 20)
    assert operation.n_copies == 1 and not operation.repacked
    operation.close()


def test_random_bytes_are_finite() -> None:
    for type in (T.Q4_0, T.Q6_K, T.F16, T.IQ2_XXS):
        values = quants.dequantize(random_bytes(type, 3, 256), type)
        assert values.size == 768 and np.isfinite(values).all() and values.any()


def test_nothing_is_compiled_while_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    asked_for: set[str] = set()
    addresses = device.library.addresses

    def record(names: Any, *rest: Any) -> dict[str, int]:
        asked_for.update(names)
        return addresses(names, *rest)

    monkeypatch.setattr(device.library, "addresses", record)
    operation = Operation(OpTask("mul_mat", T.Q4_1, 8, 32, 1, ThreadParams(1)), device, 0)
    before = set(asked_for)
    operation.run()
    assert asked_for == before and "mul_mat_q4_1" in before
    operation.close()


# ---------------------------------------------------------------- what is shown
def test_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_op, "last_cache_bytes", lambda: 100_000)
    shapes = ["--types", "q8_0", "--shapes", "64x64x1,64x64x16"]
    run_tool(
        "bench", ["--op", "mul_mat", *shapes, "-t", "1,2", "-r", "2", "-o", "jsonl", "-oe", "md"]
    )
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    found = [(r["columns"], r["n_threads"], r["n_copies"]) for r in records]
    assert found == [(1, 1, 92), (1, 2, 92), (16, 1, 1), (16, 2, 1)]
    for r in records:
        us = sum(r["samples_us"]) / 2
        assert r["median_us"] == pytest.approx(us, rel=1e-4)
        assert r["gb_s"] == pytest.approx(64 * 68 / us / 1e3, rel=1e-3)
        assert r["gflop_s"] == pytest.approx(2 * 64 * 64 * r["columns"] / us / 1e3, rel=1e-3)
        assert r["read_percent"] == pytest.approx(100 * r["gb_s"] / r["read_gb_s"], rel=1e-3)
        assert r["dot_percent"] == pytest.approx(100 * r["gflop_s"] / r["dot_gop_s"], rel=1e-3)
        assert r["layout"] == "panels" and r["best_us"] <= r["median_us"]
    threads = ["-t", "2", "-C", hex(1 << min(usable_cpus())), "--poll", "0"]
    run_tool("bench", ["--op", "mul_mat", *shapes[:2], "--shapes", "8x32x1", *threads, "-r", "1"])
    assert f"| 2 on {min(usable_cpus())} poll 0 |" in capsys.readouterr().out
    rows = [line for line in err.splitlines() if line.startswith("| mul_mat")]
    assert len(rows) == 4 and "64x64x16" in rows[2]
