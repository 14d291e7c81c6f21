"""Tiny models, a device that compiles nothing, and a stand-in for a llama-bench binary."""

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from pyggml import registry
from pyggml.backends.reference.device import RefDevice


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {arch: str(tiny.write_tiny(folder / arch, arch)) for arch in ("llama", "gemma3")}


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
