"""pyllama-gguf set and dump."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import LlamaCpp
from raw_gguf import (
    CODES,
    RawGguf,
    RawTensor,
    array,
    pair,
    sample_file,
    split_files,
    text,
    u32,
    value,
)
from tiny import write_tiny
from tool_here import Tool

from pyggml.gguf import ValueType, open_gguf
from pyggml.tools.gguf import TYPE_NAMES
from pyggml.tools.gguf_set import TYPES


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(sample_file())
    return path


def metadata(path: Path) -> dict[str, Any]:
    with open_gguf(path, allow_no_data=True) as model:
        return {
            key: np.array(v).tolist() for key, v in model.metadata.items() if "nested" not in key
        }


def tensor_bytes(path: Path) -> dict[str, bytes]:
    with open_gguf(path) as model:
        return {name: bytes(model.data(name)) for name in model.tensors}


# ---------------------------------------------------------------- set
NEW = {
    **dict.fromkeys(("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"), ("7", 7)),
    **dict.fromkeys(("f32", "f64"), ("-1.5", -1.5)),
    "bool": ("false", False),
    "str": ("longer than it was, Grüße", "longer than it was, Grüße"),
}


@pytest.mark.parametrize("label", NEW)
def test_every_type(label: str, sample: Path, gguf_tool: Tool) -> None:
    given, wanted = NEW[label]
    before, data = metadata(sample), tensor_bytes(sample)
    key = "general.architecture" if label == "str" else f"test.{TYPES[label].name.lower()}"
    done = gguf_tool("set", sample, key, given)
    assert (done.code, done.err) == (0, "") and f"{key} ({label}): " in done.out
    assert metadata(sample) == {**before, key: wanted} and tensor_bytes(sample) == data
    new = gguf_tool("set", sample, "new.key", given, "--type", label)
    assert new.code == 0 and "new -> " in new.out
    assert metadata(sample) == {**before, key: wanted, "new.key": wanted}
    assert tensor_bytes(sample) == data
    with open_gguf(sample) as model:
        assert model.metadata.type_of("new.key") == TYPES[label]
    assert [p.name for p in sample.parent.iterdir()] == ["m.gguf"]


def test_only_the_value_changes_where_the_size_is_the_same(sample: Path, gguf_tool: Tool) -> None:
    inode = sample.stat().st_ino
    assert gguf_tool("set", sample, "general.architecture", "gemma").code == 0
    assert gguf_tool("set", sample, "test.int64", "-2").code == 0
    assert sample.stat().st_ino == inode
    name = pair("test.int64", ValueType.INT64, b"")
    before = sample_file().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gemma")
    expected = before.replace(name + bytes([1, *[0] * 7]), name + bytes([254, *[255] * 7]))
    assert sample.read_bytes() == expected != sample_file()


def test_a_rewritten_file_keeps_name_links_and_permissions(sample: Path, gguf_tool: Tool) -> None:
    link = sample.with_name("link")
    link.symlink_to(sample)
    sample.chmod(0o640)
    assert gguf_tool("set", link, "general.architecture", "x").code == 0
    assert link.is_symlink() and metadata(sample)["general.architecture"] == "x"
    assert stat.S_IMODE(sample.stat().st_mode) == 0o640
    assert sorted(p.name for p in sample.parent.iterdir()) == ["link", "m.gguf"]


def test_a_new_alignment_moves_the_tensors(sample: Path, gguf_tool: Tool) -> None:
    data = tensor_bytes(sample)
    assert gguf_tool("set", sample, "general.alignment", "128").code == 0
    assert tensor_bytes(sample) == data
    with open_gguf(sample) as model:
        assert {t.offset % 128 for t in model.tensors.values()} == {0}


def test_parts_and_headers_can_be_changed(sample: Path, gguf_tool: Tool, tmp_path: Path) -> None:
    part = tmp_path / "p-00002-of-00002.gguf"
    part.write_bytes(split_files(2)[1])
    assert gguf_tool("set", part, "note", "hello", "--type", "str").code == 0
    with open_gguf(part, alone=True) as model:
        assert model.metadata["note"] == "hello" and model.metadata["split.no"] == 1
    header = tmp_path / "h.gguf"
    gguf_tool("header", sample, header)
    assert gguf_tool("set", header, "note", "hello" * 50, "--type", "str").code == 0
    assert metadata(header)["note"] == "hello" * 50


def test_llama_cpp_obeys(gguf_tool: Tool, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", "llama")
    with LlamaCpp(path) as model:
        before = model.logits([5, 6, 7])
    assert gguf_tool("set", path, "llama.rope.freq_base", "100").code == 0
    assert gguf_tool("set", path, "general.name", "a name", "--type", "str").code == 0
    with LlamaCpp(path) as model:
        assert abs(model.logits([5, 6, 7]) - before).max() > 1e-3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("test.uint8", "256"), "test.uint8 is u8: '256' is not a whole number in 0..255"),
        (("test.uint8", "-1"), "'-1' is not a whole number in 0..255"),
        (("test.int8", "1.0"), "'1.0' is not a whole number in -128..127"),
        (("test.bool", "yes"), "'yes' is not true or false"),
        (("test.float32", "1e40"), "'1e40' is not a number up to 3.4e+38"),
        (("test.float32", "x"), "'x' is not a number"),
        (("general.architecture", "\udcff"), "is not text in UTF-8"),
        (("test.words", "x"), "test.words is arr[str,43]: arrays cannot be set"),
        (("test.uint9", "1"), "no key test.uint9 (did you mean test.uint8?); --type u32"),
        (("test.uint8", "1", "--type", "i8"), "test.uint8 is u8: leave --type away"),
        (("general.alignment", "3"), "general.alignment must be u32 and a power of two"),
        (("general.alignment", "0"), "general.alignment must be u32 and a power of two"),
        (("new\nkey", "0", "--type", "u8"), "a key is printable text of 1 to 65,535 bytes"),
        (("", "0", "--type", "u8"), "a key is printable text"),
        (("k" * 65536, "0", "--type", "u8"), "a key is printable text"),
        (("\udcff", "0", "--type", "u8"), "a key is printable text"),
    ],
)
def test_mistakes(args: tuple[str, ...], said: str, sample: Path, gguf_tool: Tool) -> None:
    done = gguf_tool("set", sample, *args)
    assert (done.code, done.out) == (1, "") and said in done.err and done.err.count("\n") == 1
    assert sample.read_bytes() == sample_file()


def test_an_alignment_of_another_type(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(RawGguf().build())
    done = gguf_tool("set", path, "general.alignment", "64", "--type", "u64")
    assert done.code == 1 and "must be u32" in done.err
    assert gguf_tool("set", path, "general.alignment", "64", "--type", "u32").code == 0
    assert gguf_tool("dump", path).code == 0


def test_usage(sample: Path, gguf_tool: Tool) -> None:
    assert sorted(TYPES) == sorted(TYPE_NAMES)
    for args in (("a", "b", "--type", "u9"), ("a",), ("a", "b", "--tipe", "u8")):
        done = gguf_tool("set", sample, *args)
        assert done.code == 2 and done.err.endswith("pyllama-gguf set --help lists the options\n")


# ---------------------------------------------------------------- dump
def test_json_is_the_whole_header(sample: Path, gguf_tool: Tool) -> None:
    found = json.loads(gguf_tool("dump", sample, "--json").out)
    with open_gguf(sample) as model:
        assert [t["name"] for t in found["tensors"]] == list(model.tensors)
        for shown, tensor in zip(found["tensors"], model.tensors.values(), strict=True):
            assert tuple(shown["ne"]) == tensor.ne[: tensor.n_dims]
            wanted = (tensor.type.label, tensor.offset, tensor.nbytes)
            assert (shown["type"], shown["offset"], shown["nbytes"]) == wanted
    values = {key: entry["value"] for key, entry in found["metadata"].items()}
    assert values.pop("test.nested") == [[1, 2], ["x", "y"]]
    assert values == metadata(sample)
    assert found["metadata"]["test.words"].items() >= {"type": "arr", "of": "str"}.items()
    assert found["metadata"]["test.uint8_array"]["of"] == "u8"


def test_text_is_short_unless_all_is_wanted(sample: Path, gguf_tool: Tool) -> None:
    short, whole = gguf_tool("dump", sample).out, gguf_tool("dump", sample, "--all").out
    assert '"token 5", ... 37 more]' in short and '"token 6"' not in short
    assert '"token 39"' in whole and "a" * 300 in whole
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        assert name in short
    assert "q4_0  32 x 2" in short and "test.uint8_array" in short
    assert "4 tensors, " in short and "in all: 3 f32 (" in short


def test_nothing_reaches_a_terminal_as_an_order(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    nasty = 'a\x1b[2J\n\u009b0m\u202e"\\'
    path.write_bytes(RawGguf([text("k", nasty), text("raw", b"\xff\x1b")]).build())
    out = gguf_tool("dump", path, "--all").out
    assert r'"a\u001b[2J\n\u009b0m\u202e\"\\"' in out
    assert all(c.isprintable() for c in out.replace("\n", ""))


def test_numbers_that_json_lacks(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    floats = array(ValueType.FLOAT32, [float("inf"), float("nan"), 1.0])
    one = pair("one", ValueType.FLOAT64, value(ValueType.FLOAT64, float("-inf")))
    path.write_bytes(RawGguf([one, pair("many", ValueType.ARRAY, floats)]).build())

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(gguf_tool("dump", path, "--json").out, parse_constant=refuse)
    assert found["metadata"]["one"]["value"] == "-inf"
    assert found["metadata"]["many"]["value"] == ["inf", "nan", 1.0]


def test_a_part_and_a_header_say_what_they_are(
    sample: Path, gguf_tool: Tool, tmp_path: Path
) -> None:
    part = tmp_path / "p"
    part.write_bytes(split_files(3)[2])
    assert ", part 3 of 3\n" in gguf_tool("dump", part).out
    gguf_tool("header", sample, part, "-f")
    assert ", header only\n" in gguf_tool("dump", part).out
    assert json.loads(gguf_tool("dump", part, "--json").out)["has_data"] is False


def test_files_of_nothing(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(RawGguf().build())
    assert "0 keys\n\n0 tensors, 0 bytes" in gguf_tool("dump", path).out
    empty = [pair(f"k{t}", ValueType.ARRAY, array(t, [])) for t in CODES]
    path.write_bytes(RawGguf([u32("n", 1), *empty], [RawTensor("t", (0, 3))]).build())
    rows = [line.split() for line in gguf_tool("dump", path).out.splitlines()]
    assert ["k0", "arr[u8,0]", "[]"] in rows and ["k12", "arr[f64,0]", "[]"] in rows


def test_files_that_cannot_be_shown(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    for raw, said in ((b"", "is empty"), (b"hello world", "not a GGUF"), (b"GGUF", "damaged")):
        path.write_bytes(raw)
        done = gguf_tool("dump", path)
        assert (done.code, done.out) == (1, "") and said in done.err
    assert "no such file" in gguf_tool("dump", tmp_path / "nix").err
