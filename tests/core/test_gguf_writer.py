"""Written files: complete or not there, and every reader finds in them what was asked for."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from ggml_gguf import RealGguf
from raw_gguf import SCALARS, RawGguf, pair, pattern, sample_file, split_files, value

from pyggml import gguf_writer
from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf import ValueType, open_gguf
from pyggml.gguf_writer import NewFile, NewTensor, copy_of, number, string, write_files


def tensor(name: str, ne: tuple[int, ...], seed: int) -> NewTensor:
    raw = pattern(ne, seed)
    return NewTensor(name, GGMLType.F32, ne, len(raw), lambda: [raw[:7], raw[7:]])


def one(path: Path) -> NewFile:
    pairs = {"general.architecture": string("llama")}
    return NewFile(path, pairs, [tensor("a", (5,), 1), tensor("b", (4, 3), 2)])


def folder_of(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


# ---------------------------------------------------------------- what is written
def test_ggml_and_we_read_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_files([one(path)])
    assert path.stat().st_size == one(path).size
    with open_gguf(path) as model:
        assert model.metadata["general.architecture"] == "llama"
        assert bytes(model.data("a")) == pattern((5,), 1)
        assert bytes(model.data("b")) == pattern((4, 3), 2)
        ours = [(t.name, t.type, t.offset, t.nbytes) for t in model.tensors.values()]
    assert RealGguf(path).tensors() == ours


@pytest.mark.parametrize("kind", [kind for _, kind, _ in SCALARS], ids=str)
def test_values_are_stored_as_gguf_stores_them(kind: ValueType) -> None:
    for _, other, content in SCALARS:
        if other is kind:
            made = string(content) if kind is ValueType.STRING else number(kind, content)
            assert made.raw == value(kind, content)


def test_every_value_is_found_where_it_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(sample_file())
    with open_gguf(path) as model:
        kv = model.metadata
        pairs = [pair(key, kv.type_of(key), kv.stored(key)) for key in kv]
        assert len(pairs) > 25
        assert sample_file()[24:].startswith(b"".join(pairs))
        for key in kv:
            start, end = kv.place(key)
            assert sample_file()[start:end] == kv.stored(key)


def test_a_copy_is_the_same_file(tmp_path: Path) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "y.gguf"
    path.write_bytes(sample_file())
    with open_gguf(path) as model:
        tensors = [copy_of(model, t) for t in model.tensors.values()]
        write_files([NewFile(copy, gguf_writer.stored_pairs(model.metadata), tensors)])
    assert copy.read_bytes() == sample_file()


# ---------------------------------------------------------------- only a header
def test_a_header_alone_is_known_as_one(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    whole = one(path)
    write_files([NewFile(path, whole.pairs, whole.tensors, has_data=False)])
    with pytest.raises(GgufError, match=r"holds only the header of a model: .*--dry-run"):
        open_gguf(path)
    with open_gguf(path, allow_no_data=True) as model:
        assert not model.has_data and list(model.tensors) == ["a", "b"]
    write_files([whole], replace=True)
    with open_gguf(path, allow_no_data=True) as model:
        assert model.has_data
    raw = path.read_bytes()
    for end in (-17, -65, -95):  # in the data
        path.write_bytes(raw[:end])
        with pytest.raises(GgufError, match="damaged or incomplete"):
            open_gguf(path, allow_no_data=True)


def test_one_part_can_be_opened_alone(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(split_files(3)[1])
    with open_gguf(path, alone=True) as model:
        assert list(model.tensors) == ["blk.1.w"]


# ---------------------------------------------------------------- all or nothing
def test_permissions_are_those_of_new_files_or_of_the_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    before = os.umask(0o027)
    try:
        write_files([one(path)])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_files([one(path)], replace=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


class Stop(Exception):
    pass


def test_nothing_is_left_of_an_interrupted_file(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(4)
        raise Stop

    first, second = tmp_path / "1.gguf", tmp_path / "2.gguf"
    second.write_text("old")
    bad = NewFile(second, {}, [NewTensor("a", GGMLType.F32, (2,), 8, broken)])
    with pytest.raises(Stop):
        write_files([one(first), bad], replace=True)
    assert folder_of(tmp_path) == ["2.gguf"] and second.read_text() == "old"


def test_a_full_disk_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [one(tmp_path / "1.gguf"), one(tmp_path / "2.gguf")]
    needed = sum(file.size for file in files)

    def usage(free: int) -> None:
        answer = shutil._ntuple_diskusage(10**6, 0, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: answer)

    usage(needed - 1)
    with pytest.raises(GgufError) as caught:
        write_files(files)
    said = f"{tmp_path}: {needed:,} bytes are to be written but {needed - 1:,} are free"
    assert str(caught.value).startswith(said) and folder_of(tmp_path) == []
    usage(needed)
    write_files(files)


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GgufError, match=r"x\.gguf: cannot be written: no space left on device"):
        write_files([one(tmp_path / "x.gguf")])
    assert folder_of(tmp_path) == []


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    for name, said in {
        ".": "is a directory: name the file",
        "no/x.gguf": "there is no folder",
        "pipe": "is not a regular file",
        "dangling": "is not a regular file",
        "old": "already exists: choose another name, or --force",
    }.items():
        (tmp_path / "old").write_text("old")
        if name == "pipe":
            os.mkfifo(tmp_path / name)
        if name == "dangling":
            (tmp_path / name).symlink_to("nowhere")
        before = folder_of(tmp_path)
        with pytest.raises(GgufError) as caught:
            write_files([one(tmp_path / "new"), one(tmp_path / name)])
        assert said in str(caught.value) and folder_of(tmp_path) == before
    with pytest.raises(GgufError, match="old: is the file that is read"):
        write_files([one(tmp_path / "old")], sources=[tmp_path / "old"], replace=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(GgufError, match="cannot be written to"):
            write_files([one(tmp_path / "x.gguf")])
    finally:
        tmp_path.chmod(0o700)


def test_padding_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    file = NewFile(
        path, {"general.alignment": number(ValueType.UINT32, 1 << 26)}, one(path).tensors
    )
    write_files([file])
    assert path.stat().st_size == 3 << 26
    assert path.stat().st_blocks * 512 < 1 << 20
    with open_gguf(path) as model:
        assert bytes(model.data("b")) == pattern((4, 3), 2)


def test_a_hole_where_a_file_of_no_tensors_ends(tmp_path: Path) -> None:
    write_files([NewFile(tmp_path / "x.gguf", {}, [])])
    assert (tmp_path / "x.gguf").read_bytes() == RawGguf().build()
