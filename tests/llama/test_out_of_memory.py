"""What does not fit is refused with what it was, how much is missing, and the flags that help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from pyggml.backend import Memory
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cuda.simulate import Simulation
from pyggml.errors import OutOfMemory
from pyggml.llama import load

MIB = 1 << 20
ALL: dict[str, Any] = {"n_gpu_layers": 99, "fit": False, "warmup": False, "n_ctx": 512}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers, of 12 experts each: 11.5 MiB of weights."""
    path = tmp_path_factory.mktemp("oom") / "experts.gguf"
    return write_tiny(path, "qwen3moe", weight_type="F16", n_layer=12)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with weights that are repacked, 3.4 MiB."""
    path = tmp_path_factory.mktemp("oom") / "quantized.gguf"
    return write_tiny(path, "qwen3moe", weight_type="Q4_0", n_layer=12)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(OutOfMemory) as error, load(path, **options) as llama:
        llama.context()
    text = str(error.value)
    assert 2 <= len(text.splitlines()) <= 3 and "MiB are missing" in text
    return text


@pytest.mark.parametrize(
    ("size", "options", "what", "flags"),
    [
        (6, {}, "weights", ("--n-cpu-moe", "--gpu-layers")),
        (16, {"n_ctx": 8192}, "keys and values", ("--ctx-size", "--cache-type-k", "--gpu-layers")),
        (15, {"n_ubatch": 512}, "for a graph", ("-ub", "-c", "--gpu-layers")),
    ],
)
def test_on_a_card(
    experts: Path, size: int, options: dict[str, Any], what: str, flags: tuple[str, ...]
) -> None:
    simulation = Simulation([f"rtx3060:{size}MiB,reserved=1MiB"])
    before = simulation.driver.memory(0)
    text = refused(experts, devices=simulation.devices, **{**ALL, **options})
    assert what in text and "CUDA0" in text
    assert all(flag in text for flag in flags), text
    assert simulation.driver.memory(0) == before  # nothing stays allocated


@pytest.mark.parametrize(
    ("size", "options", "what", "flags"),
    [
        (2, {}, "the weights do not fit: a CPU_REPACK buffer", ("--no-repack",)),
        (2, {"repack": False, "load_mode": "none"}, "weights", ("--load-mode mmap",)),
        (20, {"n_ctx": 65536}, "keys and values", ("--ctx-size",)),
        (2, {"repack": False, "n_ubatch": 512}, "for a graph", ("-ub", "-c")),
    ],
)
def test_on_the_host(
    quantized: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    options: dict[str, Any],
    what: str,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setattr(CpuDevice, "memory", lambda self: Memory(size * MIB, 64 * MIB))
    text = refused(quantized, **{"n_ctx": 512, "warmup": False, **options})
    assert what in text, text
    assert all(flag in text for flag in flags), text
