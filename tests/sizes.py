"""Print how large the code is, and fail where a file or a function is over its budget."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("pyggml", "backends", "llama", "tools", "tests")
MAX_FILE, MAX_FUNCTION = 500, 50


def main() -> int:
    problems: list[str] = []
    print(f"{'folder':<24}{'files':>6}{'lines':>8}{'longest':>9}")
    for folder, files in by_folder().items():
        lines = [len(f.read_text().splitlines()) for f in files]
        print(f"{folder:<24}{len(files):>6}{sum(lines):>8}{max(lines):>9}")
        for file, n in zip(files, lines, strict=True):
            name = file.relative_to(ROOT)
            if n > MAX_FILE:
                problems.append(f"{name}: {n} lines, the budget is {MAX_FILE}")
            problems += [
                f"{name}:{line}: {function} has {n} lines, the budget is {MAX_FUNCTION}"
                for function, line, n in long_functions(file)
            ]
    print("\n".join(problems))
    return 1 if problems else 0


def by_folder() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for top in FOLDERS:
        for file in sorted((ROOT / top).rglob("*.py")):
            # the mounted folders are links: count each file once
            if file.resolve() == file:
                found.setdefault(str(file.parent.relative_to(ROOT)), []).append(file)
    return found


def long_functions(file: Path) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n = (node.end_lineno or node.lineno) - node.lineno + 1
            if n > MAX_FUNCTION:
                yield node.name, node.lineno, n


if __name__ == "__main__":
    sys.exit(main())
