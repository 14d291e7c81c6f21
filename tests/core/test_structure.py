"""The house rules that a machine can check: imports, mounts, packaging."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# what a layer may import, lowest first
LAYERS = ("pyggml", "pyggml.backends", "pyggml.llama", "pyggml.tools")
FOLDERS = {"pyggml": "pyggml", "backends": "pyggml.backends", "llama": "pyggml.llama"}
FOLDERS["tools"] = "pyggml.tools"


def rank(module: str) -> int:
    return max(i for i, layer in enumerate(LAYERS) if f"{module}.".startswith(f"{layer}."))


def sources() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.resolve() == file:
                parts = file.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join((package, *parts)).removesuffix(".__init__"), file


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_one_way() -> None:
    upward = [
        f"{module} imports {name}"
        for module, file in sources()
        for name in imports(file)
        if name.startswith("pyggml.")
        and rank(name) > rank(module)
        # `python -m pyggml` is a program
        and module != "pyggml.__main__"
    ]
    assert upward == []


def test_the_core_needs_only_numpy() -> None:
    allowed = {"numpy", "pyggml", *sys.stdlib_module_names}
    foreign = {
        f"{module} imports {name}"
        for module, file in sources()
        for name in imports(file)
        if rank(module) == 0 and name.split(".")[0] not in allowed
    }
    assert foreign == set()


@pytest.mark.parametrize("name", ["backends", "llama", "tools"])
def test_mounts_are_links(name: str) -> None:
    link = ROOT / "pyggml" / name
    assert link.is_symlink() and link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["backends", "llama", "tools"])
def test_short_names_are_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"import pyggml.{name}, not {name}" in done.stderr


def copy_of_sources(folder: Path) -> Path:
    """What a wheel is built from: building leaves files, which must not lie in the repository."""
    folder.mkdir()
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, folder)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # pip takes what lies there as installed
    source = copy_of_sources(tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"pyggml"}
    for part in (
        "backends/cpu/kernels/simd.py",
        "llama/models/llama.py",
        "tools/main.py",
        "tools/sched_page/main.js",
    ):
        assert f"pyggml/{part}" in names
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel, "click"], check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/pyllama-cli", "--version"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pyggml" in done.stdout
