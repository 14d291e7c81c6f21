"""The flags of devices and placement: their order, the environment, and what is refused when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyggml.errors import ConfigError, UserError
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.placement_rules import cpu_moe
from pyggml.tools.options import ToolCommand
from pyggml.tools.placement import placement
from pyggml.tools.settings import check

Run = Callable[..., Any]


def params(*args: str) -> PlacementParams:
    """What a command line means."""
    found: dict[str, Any] = {}
    ToolCommand("cli", found.update).main(args=list(args), standalone_mode=False)
    return placement(found)


def rules(*args: str) -> list[str]:
    return [str(rule) for rule in params(*args).rules]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-ot a=CPU -ncmoe 3", ["-ot a=CPU", "--n-cpu-moe 3"]),
        ("-ncmoe 3 -ot a=CPU", ["--n-cpu-moe 3", "-ot a=CPU"]),
        ("-ot a=CPU -cmoe -ot b=CPU,c=CPU", ["-ot a=CPU", "--cpu-moe", "-ot b=CPU", "-ot c=CPU"]),
        ("-ncffn 1 -ncmoe 2 -ncffn 3", ["--n-cpu-ffn 1", "--n-cpu-moe 2", "--n-cpu-ffn 3"]),
        ("--override-tensor=a=CPU", ["-ot a=CPU"]),
        ("--override_tensor a=CPU", ["-ot a=CPU"]),
        ("-cmoe -cmoe", ["--cpu-moe"]),
        ("-ncmoe 0", []),
    ],
)
def test_rules_keep_the_order_of_their_flags(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rules(*line.split()) == expected
    assert capsys.readouterr().err == ""  # nothing is lost that a warning would have to tell


def test_rules_of_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_CPU_MOE", "2")
    monkeypatch.setenv("PYGGML_ARG_OVERRIDE_TENSOR", "a=CPU,b=CPU")
    monkeypatch.setenv("LLAMA_ARG_CPU_MOE", "0")
    assert rules("-ncffn", "1") == ["-ot a=CPU", "-ot b=CPU", "--n-cpu-moe 2", "--n-cpu-ffn 1"]


def test_the_command_line_replaces_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_ARG_OVERRIDE_TENSOR", "a=CPU")
    assert rules("-cmoe", "-ot", "b=CPU") == ["--cpu-moe", "-ot b=CPU"]
    assert "will be overwritten by command line argument --override-tensor" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("N_GPU_LAYERS", "all", "n_gpu_layers", -2),
        ("DEVICE", "CUDA1,CUDA0", "devices", ("CUDA1", "CUDA0")),
        ("DEVICE", "none", "devices", ()),
        ("SPLIT_MODE", "none", "split_mode", "none"),
        ("TENSOR_SPLIT", "3/1", "tensor_split", (3.0, 1.0)),
        ("MAIN_GPU", "2", "main_gpu", 2),
        ("NO_HOST", "1", "no_host", True),
        (
            "CPU_MOE",
            "on",
            "rules",
            cpu_moe(),
        ),
    ],
)
def test_the_environment(
    variable: str, value: str, field: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LLAMA_ARG_{variable}", value)
    assert getattr(params(), field) == expected


def test_offloading_is_a_matter_of_the_context() -> None:
    found: dict[str, Any] = {}
    command = ToolCommand("cli", found.update)
    command.main(["-nkvo", "--no-op-offload"], standalone_mode=False)
    assert found == {"context.kv_offload": False, "context.op_offload": False}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"placement.split_mode": "row"}, "--split-mode row: no device here"),
        ({"placement.tensor_split": "1;2"}, "--tensor-split 1;2: a share for each device"),
        ({"placement.devices": ""}, "--device '': names of devices"),
        ({"rules": [("--override-tensor", "attn")]}, "available buffer types: CPU"),
        ({"rules": [("--n-cpu-moe", -1)]}, "--n-cpu-moe -1: a number of layers"),
        (
            {"rules": [("--override-tensor", "x[=CPU")], "sim_device": ("rtx3060",)},
            "position 1\navailable buffer types: CPU, CUDA0",
        ),
    ],
)
def test_mistakes_are_seen_before_the_model_is_read(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        check({"model": "is-not-there.gguf", **values})
    assert isinstance(error.value, ConfigError) and said in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-ot", "attn=FOO"), "-ot attn=FOO: unknown buffer type 'FOO'"),
        (("-dev", "SIM7"), "--device SIM7: no GPU is called so"),
        (("-mg", "9"), "--main-gpu 9: there is no such GPU (available devices: 2)"),
        (
            ("-ts", "1,1,1"),
            "--tensor-split has 3 shares, more than there are devices: CUDA0, CUDA1",
        ),
    ],
)
def test_devices_that_do_not_exist(run: Run, args: tuple[str, ...], said: str) -> None:
    cards = ("--sim-device", "rtx3060") * 2
    result = run("-m", "is-not-there.gguf", "-p", "x", "-n", "1", *cards, *args)
    assert result.code == 1 and said in result.err
    assert "is-not-there" not in result.err and "Traceback" not in result.err


def test_what_rules_placed_is_in_the_log(run: Run) -> None:
    line = ("-p", "a", "-n", "2", "--temp", "0", "-c", "256", "--sim-device", "rtx3060")
    plain = run("-p", "a", "-n", "2", "--temp", "0", "-c", "256")
    result = run(*line, "-ot", "ffn_up=CPU,nothing=CPU", "-v")
    assert result.code == 0 and result.out == plain.out
    assert "-ot ffn_up=CPU: 2 tensors" in result.err
    assert "warning: -ot nothing=CPU places no tensor: no name matches" in result.err
    assert "tensor blk.0.ffn_up.weight (0 MiB f32) buffer type overridden to CPU" in result.err
    assert "layer   0 assigned to device CUDA0, is_swa = 0" in result.err
    assert "offloaded 3/3 layers to GPU" in result.err


def test_no_gpu_is_a_warning(run: Run) -> None:
    line = ("-p", "a", "-n", "1", "-c", "256")
    assert "no usable GPU found, --gpu-layers option will be ignored" in run(*line, "-ngl", "3").err
    assert "no usable GPU" not in run(*line, "-ngl", "0").err
    assert "no usable GPU" not in run(*line, "-ngl", "3", "--sim-device", "rtx3060").err
