"""The disk's rate: of a file that is there, or of one that is made."""

import os

import pytest

from pyggml import disk


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(disk, "SAMPLE", 4 << 20)
    monkeypatch.setattr(disk, "PIECE", 1 << 20)
    monkeypatch.setattr(disk, "LEAST", 2 << 20)


def counting(monkeypatch):
    read, preadv = [], os.preadv

    def watched(fd, buffers, offset):
        n = preadv(fd, buffers, offset)
        read.append((os.fstat(fd).st_size, offset, n))
        return n

    monkeypatch.setattr(os, "preadv", watched)
    return read


def test_a_large_file_is_read_in_pieces_from_all_over_it(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(16 << 20))
    read = counting(monkeypatch)
    assert disk.disk_gbs(path, tmp_path / "cache") > 0
    assert [offset for _, offset, _ in read] == [0, 4 << 20, 8 << 20, 12 << 20]
    assert sum(n for _, _, n in read) == disk.SAMPLE
    assert not (tmp_path / "cache").exists()


def test_for_a_header_a_file_is_made_and_removed(tmp_path, monkeypatch):
    header = tmp_path / "header.gguf"
    header.write_bytes(b"GGUF")
    read = counting(monkeypatch)
    assert disk.disk_gbs(header, tmp_path / "cache") > 0
    assert {size for size, _, _ in read} == {disk.SAMPLE}
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_with_holes_is_not_what_a_disk_reads(tmp_path, monkeypatch):
    sparse = tmp_path / "sparse.gguf"
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
    read = counting(monkeypatch)
    assert disk.disk_gbs(sparse, tmp_path / "cache") > 0
    assert {size for size, _, _ in read} == {disk.SAMPLE}


def test_where_nothing_can_be_written_nothing_is_known(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert disk.disk_gbs(tmp_path / "gone.gguf", tmp_path / "file" / "cache") == 0.0
