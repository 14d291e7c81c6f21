"""pyllama-gguf split, merge and header."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from cli_process import MODULE, environment
from ggml_gguf import RealGguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import LlamaCpp
from raw_gguf import SCALARS, RawGguf, RawTensor, array, pair, sample_file, string, text, u32, value
from tiny import write_tiny
from tool_here import Tool

from pyggml.dtypes import GGMLType
from pyggml.gguf import Gguf, ValueType, open_gguf
from pyggml.gguf_writer import NewFile, NewTensor
from pyggml.tools.gguf import write
from pyggml.tools.gguf_split import Limits, parts_of

TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.Q4_0, GGMLType.Q6_K, GGMLType.I8, GGMLType.MXFP4)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def part_names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]


# ---------------------------------------------------------------- round trips
KEYS = st.text("abcdefghij.", min_size=1, max_size=12).filter(lambda k: k != "split.no")
NUMBERS = [(kind, content) for _, kind, content in SCALARS if kind is not ValueType.STRING]


@st.composite
def values(draw: st.DrawFn) -> tuple[int, bytes]:
    """Type and payload of any value: scalars, strings, arrays of them, arrays of arrays."""
    kind, content = draw(st.sampled_from(NUMBERS))
    words = draw(st.lists(st.text(max_size=5), max_size=4))
    items = [content] * draw(st.integers(0, 3))
    inner = [array(kind, items), array(ValueType.STRING, words)]
    return draw(
        st.sampled_from(
            [
                (kind, value(kind, content)),
                (ValueType.STRING, string("".join(words))),
                (ValueType.ARRAY, array(kind, items)),
                (ValueType.ARRAY, array(ValueType.STRING, words)),
                (ValueType.ARRAY, array(ValueType.ARRAY, inner[: draw(st.integers(0, 2))])),
            ]
        )
    )


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Valid files of any shape, whose tensors hold different bytes."""
    alignment = draw(st.sampled_from([1, 8, 32, 64]))
    pairs = [] if alignment == 32 else [u32("general.alignment", alignment)]
    pairs += [pair(k, *v) for k, v in draw(st.dictionaries(KEYS, values(), max_size=5)).items()]
    tensors = []
    for i in range(draw(st.integers(0, 9))):
        kind = draw(st.sampled_from(TYPES))
        outer = draw(st.lists(st.integers(0, 3), max_size=3))
        ne = (draw(st.integers(0, 2)) * kind.block_size, *outer)
        nbytes = kind.row_size(int(np.prod(ne)))
        tensors.append(RawTensor(f"t{i}", ne, kind, data=bytes([i + 1]) * nbytes))
    version = draw(st.sampled_from([2, 3]))
    return RawGguf(pairs, tensors, version=version, alignment=alignment).build()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files(), st.integers(1, 4), st.booleans())
def test_merged_parts_are_the_file_they_were(
    tmp_path: Path, gguf_tool: Tool, raw: bytes, n_tensors: int, empty_first: bool
) -> None:
    whole, merged = tmp_path / "whole.gguf", tmp_path / "merged.gguf"
    whole.write_bytes(raw)
    flags = ["--no-tensor-first-split"] if empty_first else []
    done = gguf_tool("split", whole, tmp_path / "p", "--split-max-tensors", n_tensors, *flags)
    assert (done.code, done.err) == (0, "")
    parts = sorted(tmp_path.glob("p-*"))
    assert [p.name for p in parts] == part_names("p", len(parts))
    with open_gguf(parts[0]) as model, open_gguf(whole) as original:
        assert list(model.tensors) == list(original.tensors)
        assert all(len(only(path).tensors) <= n_tensors for path in parts)
    assert not empty_first or not only(parts[0]).tensors
    assert gguf_tool("merge", parts[0], merged).code == 0
    assert merged.read_bytes() == raw
    for path in (*parts, merged):
        path.unlink()


def only(path: Path) -> Gguf:
    """The header of one part."""
    with open_gguf(path, alone=True) as model:
        return model


def test_a_real_model(smollm2: Path, gguf_tool: Tool, tmp_path: Path) -> None:
    done = gguf_tool("split", smollm2, tmp_path / "p", "--split-max-size", "30M")
    parts = [tmp_path / name for name in part_names("p", 4)]
    assert done.code == 0 and names(tmp_path) == [p.name for p in parts]
    tensors = [t.name for path in parts for t in gguf.GGUFReader(path).tensors]
    assert tensors == [t.name for t in gguf.GGUFReader(smollm2).tensors]
    with LlamaCpp(smollm2) as one, LlamaCpp(parts[0]) as many:
        np.testing.assert_array_equal(one.logits([1, 2, 3, 4]), many.logits([1, 2, 3, 4]))
    assert gguf_tool("merge", parts[0], tmp_path / "merged").code == 0
    assert (tmp_path / "merged").read_bytes() == smollm2.read_bytes()


def file_of_four(path: Path) -> Path:
    """A file that ggml reads, which knows no arrays of arrays."""
    tensors = [RawTensor(f"t{i}", (5, i)) for i in range(1, 5)]
    pairs = [text("general.architecture", "llama"), u32("n", 3)]
    path.write_bytes(RawGguf(pairs, tensors).build())
    return path


def test_keys_of_parts(gguf_tool: Tool, tmp_path: Path) -> None:
    file_of_four(tmp_path / "m")
    assert gguf_tool("split", tmp_path / "m", tmp_path / "p", "--split-max-tensors", 2).code == 0
    for no, name in enumerate(part_names("p", 2)):
        part = RealGguf(tmp_path / name)
        own = part.keys()[-3:]
        assert own == ["split.no", "split.count", "split.tensors.count"]
        assert [part.type_of(key) for key in own] == [2, 2, 5]  # u16, u16, i32
        assert len(part.keys()) == 3 or no == 0
        kv = only(tmp_path / name).metadata
        assert [kv[key] for key in own] == [no, 2, 4]


def test_parts_can_be_split_again(gguf_tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(sample_file())
    first = [tmp_path / name for name in part_names("p", 4)]
    assert gguf_tool("split", tmp_path / "m", tmp_path / "p", "--split-max-tensors", 1).code == 0
    assert gguf_tool("split", first[0], tmp_path / "q", "--split-max-tensors", 3).code == 0
    second = tmp_path / part_names("q", 2)[0]
    assert gguf_tool("merge", second, tmp_path / "n").code == 0
    assert (tmp_path / "n").read_bytes() == sample_file()


# ---------------------------------------------------------------- where parts begin
def limits(size: int | None = None, n: int = 128, *, empty_first: bool = False) -> Limits:
    return Limits(size, n, empty_first)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (limits(), [6]),
        (limits(n=4), [4, 2]),
        (limits(n=3, empty_first=True), [0, 3, 3]),
        (limits(1 << 20), [6]),
        (limits(64), [2, 1, 2, 1]),  # 20 bytes are padded to 32; 100 bytes are too many
        (limits(160, empty_first=True), [0, 2, 2, 2]),
        (limits(128), [2, 1, 3]),
        (limits(1, empty_first=True), [0, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_where_parts_begin(limit: Limits, counts: list[int], tmp_path: Path) -> None:
    sizes = (5, 5, 25, 5, 5, 5)
    path = tmp_path / "m"
    path.write_bytes(RawGguf([], [RawTensor(f"t{i}", (n,)) for i, n in enumerate(sizes)]).build())
    parts = parts_of(list(only(path).tensors.values()), limit)
    assert [len(part) for part in parts] == counts


def test_sizes_count_in_thousands() -> None:
    assert Limits.of("3M", None, empty_first=False).nbytes == 3_000_000
    assert Limits.of("2G", None, empty_first=False).nbytes == 2_000_000_000
    assert Limits.of(None, None, empty_first=True) == limits(empty_first=True)


def test_a_dry_run_writes_nothing(gguf_tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(sample_file())
    ask = ("split", tmp_path / "m", tmp_path / "p", "--split-max-tensors", 3)
    dry = gguf_tool(*ask, "--dry-run")
    assert names(tmp_path) == ["m"]
    real = gguf_tool(*ask)
    assert dry.out == real.out + "nothing is written: this is a dry run\n"
    for line, name in zip(real.out.splitlines(), part_names("p", 2), strict=True):
        path = tmp_path / name
        assert line.startswith(f"{path}: {path.stat().st_size:,} bytes, ")


# ---------------------------------------------------------------- headers
def test_a_header_is_the_beginning_of_the_model(gguf_tool: Tool, tmp_path: Path) -> None:
    whole, short, again = tmp_path / "m", tmp_path / "h", tmp_path / "again"
    whole.write_bytes(sample_file())
    assert gguf_tool("header", whole, short).code == 0
    start = min(t.offset for t in only(whole).tensors.values())
    assert short.read_bytes() == sample_file()[:start]
    assert gguf_tool("header", short, again).code == 0
    assert again.read_bytes() == short.read_bytes()
    assert gguf_tool("split", whole, tmp_path / "p", "--split-max-tensors", 1).code == 0
    assert gguf_tool("header", tmp_path / part_names("p", 4)[0], again, "-f").code == 0
    assert again.read_bytes() == short.read_bytes()


def test_ggml_reads_headers(gguf_tool: Tool, tmp_path: Path) -> None:
    whole, short = file_of_four(tmp_path / "m"), tmp_path / "h"
    assert gguf_tool("header", whole, short).code == 0
    assert RealGguf(short).tensors() == RealGguf(whole).tensors()


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("split nix p", "nix: no such file: check the path"),
        ("split text p", "text: not a GGUF file but something else"),
        (
            "split cut p",
            "cut: tensor 'blk.0.ffn_up_exps.weight' data is not within the file bounds",
        ),
        ("split short p", "short: holds only the header of a model"),
        ("split m p --split-max-size 3", "--split-max-size 3: it must be a number of M or G"),
        ("split m p --split-max-size 0M", "--split-max-size 0M: it must be a number of M or G"),
        ("split m p --split-max-tensors 0", "--split-max-tensors 0: it must be 1 or greater"),
        ("split m p --split-max-tensors 1 --split-max-size 1G", "give one of them"),
        ("split m no/p", "no/p-00001-of-00001.gguf: there is no folder no: make it first"),
        ("split m q", "q-00001-of-00001.gguf: already exists: choose another name, or --force"),
        ("merge m x", "m: is not a part of a split model: nothing is to be merged"),
        ("merge r-00002-of-00002.gguf x", "open its first part, r-00001-of-00002.gguf"),
        ("merge s-00001-of-00002.gguf x", "s-00002-of-00002.gguf: part 2 of 2 is missing"),
        ("merge r-00001-of-00002.gguf m", "m: already exists"),
        ("merge r-00001-of-00002.gguf r-00002-of-00002.gguf -f", "is the file that is read"),
        ("header m m --force", "m: is the file that is read: choose another name"),
        ("header m .", ".: is a directory: name the file to write"),
    ],
)
def test_mistakes(
    args: str, said: str, gguf_tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").write_bytes(sample_file())
    Path("text").write_text("hello world")
    Path("cut").write_bytes(sample_file()[:-64])
    Path("q-00001-of-00001.gguf").touch()
    gguf_tool("header", "m", "short")
    gguf_tool("split", "m", "r", "--split-max-tensors", 2)
    gguf_tool("split", "m", "s", "--split-max-tensors", 2)
    Path("s-00002-of-00002.gguf").unlink()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    done = gguf_tool(*args.split())
    assert (done.code, done.out) == (1, "") and said in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") <= 3
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["merg"], "No such command 'merg'"),
        (["split"], "Missing argument 'IN'"),
        (["merge", "a", "b", "--forse"], "No such option"),
    ],
)
def test_usage(args: list[str], said: str, gguf_tool: Tool) -> None:
    done = gguf_tool(*args)
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"error: {said}")
    assert done.err.splitlines()[-1].startswith("pyllama-gguf")


def test_help_needs_no_numpy() -> None:
    code = (
        "import sys; from pyggml.tools.main import run_tool; run_tool('gguf', sys.argv[1:]); "
        "sys.exit('numpy' in sys.modules)"
    )
    for args in ([], ["--help"], ["split", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert done.returncode == 0 and "Usage: pyllama-gguf" in done.stdout


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_leaves_nothing_behind(number: int, code: int, tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense", "llama", weight_type="Q6_K")
    # noise makes it slow enough to be interrupted
    flags = ("--experts", "512", "--used", "1", "--noise", "1")
    command = [*MODULE, "gguf", "upcycle", dense, tmp_path / "out", *flags]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.part")) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == code and names(tmp_path) == ["dense"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_that_comes_into_a_finalizer(
    number: int, raised: type[BaseException], tmp_path: Path
) -> None:
    """Python drops what a handler raises there."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def chunks() -> Iterator[bytes]:
        Finalized()
        yield bytes(4)

    before = signal.getsignal(number)
    tensor = NewTensor("t", GGMLType.F32, (1,), 4, chunks)
    with pytest.raises(raised):
        write([NewFile(tmp_path / "out", {}, [tensor])], force=False)
    assert names(tmp_path) == [] and signal.getsignal(number) == before


def test_tiny_models_are_read_by_llama_cpp(gguf_tool: Tool, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", "gemma3", weight_type="Q4_K")
    ask = ("--split-max-tensors", 7, "--no-tensor-first-split")
    assert gguf_tool("split", path, tmp_path / "p", *ask).code == 0
    first = min(tmp_path.glob("p-*"))
    with LlamaCpp(path) as one, LlamaCpp(first) as many:
        np.testing.assert_array_equal(one.logits([5, 6, 7]), many.logits([5, 6, 7]))


def test_a_key_of_another_type_is_no_traceback(gguf_tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(RawGguf([text("split.count", "x")]).build())
    for command in ("dump", "merge"):
        done = gguf_tool(command, tmp_path / "m", *([tmp_path / "n"] if command == "merge" else []))
        assert done.code in (0, 1) and "a bug in pyggml" not in done.err
