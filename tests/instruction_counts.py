"""Counts the instructions of the product kernels, for every kind of CPU on any x86 machine.

Kernels are only compiled, for the CPU that a path names, in a process per path. What counts are
the innermost loops that multiply: the one with the fewest products ("short": of a quantized type
that for a single column) and the one with the most ("long": for a tile of columns). MUL_MAT_ID
runs the same loops.

    python tests/instruction_counts.py refresh [KERNEL...]

makes the counts of these kernels, or of all, the budget: after a deliberate change.

    python tests/instruction_counts.py show

prints the budget, also per byte of quantized weights: their size differs from type to type.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pyggml.backends.cpu.library import usable_cores
from pyggml.backends.cpu.panels import LAYOUTS, ROWS
from pyggml.backends.cpu.target import Target

BUDGET = Path(__file__).parent / "cpu" / "instruction_budget.csv"
COLUMNS = ("kernel", "path", "short", "short_spills", "long", "long_spills", "compiler")
GROWTH = 1.1
AT_ONCE = 4  # kernels that a process compiles
SPILLS = 2  # more than 10 % of few
KERNELS = [f"mul_mat_{name}" for name in (*(t.name.lower() for t in LAYOUTS), "f32", "f16", "bf16")]

_AVX2 = "+sse4.2,+popcnt,+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni"
PATHS = {
    "avx512-vnni": Target("icelake-server", _AVX512),
    "avx-vnni": Target("alderlake", f"{_AVX2},+avxvnni"),
    "avx2": Target("haswell", _AVX2),
    "portable": Target("x86-64", ""),
}

# what multiplies, or calls a function that does
PRODUCT = re.compile(r"(\{vex\}\s+)?v?(pdpbusd|pmadd|pmul|mulps|fmadd)|call")
JUMP = re.compile(r"j[a-z]+$")
SPILL = re.compile(r"v?mov.*,\s*-?\w*\(%rsp\)$")  # the destination comes last


# ---------------------------------------------------------------- assembly
@dataclass
class Block:
    """Instructions that run one after the other, and the blocks that may follow."""

    code: list[str] = field(default_factory=list)
    to: list[int] = field(default_factory=list)


def functions(assembly: str) -> Iterator[list[Block]]:
    """The control flow of each function."""
    lines: list[str] = []
    for raw in assembly.splitlines():
        line = raw.partition("#")[0].strip()
        if re.match(r"\.Lfunc_end\d+:", line):
            yield _blocks(lines)
        elif re.match(r"\.LBB\d+_\d+:", line) or (line and not line.startswith(".")):
            # a function begins with its own label
            lines = [] if line.endswith(":") and not line.startswith(".L") else lines
            lines.append(line)


def _blocks(lines: list[str]) -> list[Block]:
    blocks, at, jumps = [Block()], dict[str, int](), list[tuple[int, str]]()
    falls = True  # into the next line
    for line in lines:
        if line.endswith(":"):
            if falls:
                blocks[-1].to.append(len(blocks))
            at[line[:-1]] = len(blocks)
            blocks.append(Block())
            falls = True
            continue
        mnemonic, _, operand = line.partition("\t")
        blocks[-1].code.append(line)
        if JUMP.match(mnemonic):
            jumps.append((len(blocks) - 1, operand))
            falls = mnemonic != "jmp"
            if falls:
                blocks[-1].to.append(len(blocks))
            blocks.append(Block())
        elif mnemonic.startswith("ret"):
            falls = False
    for block, label in jumps:
        if label in at:
            blocks[block].to.append(at[label])
    return blocks


def product_loops(blocks: list[Block]) -> list[list[Block]]:
    """The blocks of each loop that multiplies and contains no other that does."""
    merged: dict[int, set[int]] = {}
    for tail, head in _back_edges(blocks):
        merged.setdefault(head, set()).update(_loop(blocks, tail, head))
    loops = {
        head: body
        for head, body in merged.items()
        if any(PRODUCT.match(line) for i in body for line in blocks[i].code)
    }
    return [
        [blocks[i] for i in sorted(body)]
        for head, body in loops.items()
        if not any(other != head and other in body for other in loops)
    ]


def _back_edges(blocks: list[Block]) -> list[tuple[int, int]]:
    """Edges to a block that is still open in a search from the entry."""
    found, state = [], {0: 1}
    stack = [(0, iter(blocks[0].to))]
    while stack:
        block, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            state[block] = 2
            stack.pop()
        elif following not in state:
            state[following] = 1
            stack.append((following, iter(blocks[following].to)))
        elif state[following] == 1:
            found.append((block, following))
    return found


def _loop(blocks: list[Block], tail: int, head: int) -> set[int]:
    """What leads to the tail without passing the head."""
    before: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        for j in block.to:
            before.setdefault(j, []).append(i)
    body, todo = {head}, [tail]
    while todo:
        block = todo.pop()
        if block not in body:
            body.add(block)
            todo += before.get(block, [])
    return body


# ---------------------------------------------------------------- counts
@dataclass(frozen=True)
class Counts:
    """Of one turn of the loops; spills are stores to the stack in them."""

    short: int
    short_spills: int
    long: int
    long_spills: int

    def over(self, budget: Counts) -> list[str]:
        """What has grown by more than it may, in words."""
        found = []
        for loop in ("short", "long"):
            for what, slack in ((loop, 0), (f"{loop}_spills", SPILLS)):
                mine, allowed = getattr(self, what), getattr(budget, what)
                if mine > max(GROWTH * allowed, allowed + slack):
                    unit = "stores to the stack" if slack else "instructions"
                    found.append(f"{mine} {unit} in the {loop} loop, the budget is {allowed}")
        return found


def count(assembly: str) -> Counts:
    """Of the loops with the fewest and with the most products; of several alike the longest."""
    loops = []
    for blocks in functions(assembly):
        for loop in product_loops(blocks):
            code = [line for block in loop for line in block.code]
            products = sum(bool(PRODUCT.match(line)) for line in code)
            loops.append((products, len(code), sum(bool(SPILL.match(line)) for line in code)))
    assert loops, "no loop multiplies"
    by_products = [
        max(found for found in loops if found[0] == n) for n, *_ in (min(loops), max(loops))
    ]
    (_, short, short_spills), (_, long, long_spills) = by_products
    return Counts(short, short_spills, long, long_spills)


def counts(path: str, kernels: Collection[str]) -> dict[str, Counts]:
    """By kernel, as compiled for the CPU of a path."""
    done = subprocess.run(
        [sys.executable, __file__, "count", path, *kernels],
        env={**os.environ, **PATHS[path].environment()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: Counts(*numbers) for name, numbers in json.loads(done.stdout).items()}


def all_counts(kernels: Collection[str]) -> dict[tuple[str, str], Counts]:
    """By kernel and path."""
    with ThreadPoolExecutor(usable_cores()) as executor:
        found = executor.map(lambda path: (path, counts(path, kernels)), PATHS)
        return {(k, path): c for path, by_kernel in found for k, c in by_kernel.items()}


def _print_counts(path: str, kernels: Sequence[str]) -> None:
    """In the process whose Numba generates code for a path."""
    from pyggml.backends.cpu.compile import compile_module, import_kernels

    import_kernels()
    machine = PATHS[path].machine()
    found = {}
    for name in kernels:
        c = count(machine.emit_assembly(compile_module(name)))
        found[name] = (c.short, c.short_spills, c.long, c.long_spills)
    print(json.dumps(found))


# ---------------------------------------------------------------- the budget
def compiler() -> str:
    """What besides the kernels decides about the counts."""
    return " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("numba", "llvmlite"))


def read_budget() -> dict[tuple[str, str], Counts]:
    """By kernel and path."""
    with BUDGET.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (r["kernel"], r["path"]): Counts(*(int(r[name]) for name in COLUMNS[2:6])) for r in rows
    }


def write_budget(found: Mapping[tuple[str, str], Counts]) -> None:
    """Replace these rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    if BUDGET.exists():
        with BUDGET.open(newline="") as file:
            rows = {(r[0], r[1]): r for r in list(csv.reader(file))[1:]}
    for key, c in found.items():
        numbers = (c.short, c.short_spills, c.long, c.long_spills)
        rows[key] = [*key, *map(str, numbers), compiler()]
    with BUDGET.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows[key] for key in sorted(rows))


def problems(found: Mapping[tuple[str, str], Counts]) -> list[str]:
    """What is over its budget, and what to do if that was meant."""
    budget = read_budget()
    lines = [
        f"{kernel} on {path}: {text}"
        for (kernel, path), c in found.items()
        for text in c.over(budget[kernel, path])
    ]
    if lines:
        names = " ".join(dict.fromkeys(line.split()[0] for line in lines))
        lines.append(f"compiled by {compiler()}; the budget names its own")
        lines.append(f"if that is meant: python tests/instruction_counts.py refresh {names}")
    return lines


def per_byte(kernel: str, c: Counts) -> str:
    """Instructions of the loop for one column per byte that the weights have in a file."""
    known = {f"mul_mat_{type.name.lower()}": type for type in LAYOUTS}
    if kernel not in known:
        return ""
    nbytes = ROWS * known[kernel].row_size(LAYOUTS[known[kernel]].values)
    return f"{c.short / nbytes:.3f}"


def show() -> None:
    """Print the budget as a table."""
    row = "{:16} {:12} {:>6} {:>9} {:>7} {:>6} {:>7}"
    print(row.format("kernel", "path", "short", "per byte", "spills", "long", "spills"))
    for (kernel, path), c in read_budget().items():
        numbers = (c.short, per_byte(kernel, c), c.short_spills, c.long, c.long_spills)
        print(row.format(kernel, path, *numbers))


def main(command: str = "", *args: str) -> None:
    """What the command line asks for."""
    if command == "count":
        _print_counts(args[0], args[1:])
    elif command == "refresh":
        kernels = list(args) or KERNELS
        for i in range(0, len(kernels), AT_ONCE):
            write_budget(all_counts(kernels[i : i + AT_ONCE]))
            print(*kernels[i : i + AT_ONCE], flush=True)
    elif command == "show":
        show()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
