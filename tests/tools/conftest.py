"""Tiny models, tools run in this process, and a stand-in for a llama-bench binary."""

import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from cli_process import Result, Run
from tool_here import Tool, tool_with

from pyggml import registry
from pyggml.backends.reference.device import RefDevice
from pyggml.tools import environment
from pyggml.tools.main import run_tool

MODELS = ("llama", "gemma3", "qwen35")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {arch: str(tiny.write_tiny(folder / arch, arch)) for arch in MODELS}


@pytest.fixture
def reference_device(monkeypatch: pytest.MonkeyPatch) -> RefDevice:
    """Everything runs on the NumPy reference."""
    device = RefDevice()
    monkeypatch.setattr(registry, "devices", lambda: [device])
    return device


@pytest.fixture
def fake_llama_bench(tmp_path: Path) -> Callable[..., str]:
    """Writes an executable that logs its arguments to `args` beside it; returns its path.

    Without a body it prints a record: 4 ms.
    """
    record = {"build_commit": "abc", "build_number": 7, "samples_ns": [4_000_000]}

    def make(body: str = f"print(json.dumps({record}))") -> str:
        path, log = tmp_path / "llama-bench", str(tmp_path / "args")
        note = f"open({log!r}, 'w').write(json.dumps(sys.argv[1:]))"
        path.write_text(f"#!{sys.executable}\nimport json, sys\n{note}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags come from the command line only."""
    for name in list(os.environ):
        if name.startswith(environment.PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def run(
    tiny_models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """Runs pyllama-cli in this process, with the tiny model unless -m names another."""
    on_interrupt = signal.getsignal(signal.SIGINT)

    def start(*args: str, stdin: bytes = b"", typed: bool = False) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: typed)
        model = () if "-m" in args else ("-m", tiny_models["llama"])
        code = 0
        try:
            run_tool("cli", [*model, *args])
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield start
    signal.signal(signal.SIGINT, on_interrupt)


@pytest.fixture
def gguf_tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs pyllama-gguf in this process."""
    return tool_with(capsys)
