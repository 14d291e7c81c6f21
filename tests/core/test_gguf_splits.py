"""Models in several files: found, ordered, and refused when they do not fit together."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import raw_gguf
from raw_gguf import RawGguf, RawTensor

from pyggml.errors import GgufError, ModelError
from pyggml.gguf import open_gguf


@pytest.fixture
def split(tmp_path: Path) -> Callable[..., list[Path]]:
    """Write the parts of a split model under their usual names."""

    def write(files: list[bytes]) -> list[Path]:
        n = len(files)
        paths = [tmp_path / f"model-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]
        for path, content in zip(paths, files, strict=True):
            path.write_bytes(content)
        return paths

    return write


Split = Callable[[list[bytes]], list[Path]]


@pytest.mark.parametrize("count", [2, 3, 70])
def test_parts_are_found_from_the_first(split: Split, count: int) -> None:
    paths = split(raw_gguf.split_files(count, tensors_per_part=2))
    with open_gguf(paths[0]) as model:
        assert [part.path for part in model.parts] == paths
        assert list(model.tensors) == [f"blk.{i}.w" for i in range(2 * count)]
        for i, (name, tensor) in enumerate(model.tensors.items()):
            assert tensor.part == i // 2
            assert bytes(model.data(name)) == raw_gguf.pattern((4, 3), i)
        assert model.nbytes == 2 * count * 48
        assert model.metadata.get_str("general.architecture") == "llama"


def test_a_first_part_without_tensors(split: Split) -> None:
    files = raw_gguf.split_files(2)
    keys = [raw_gguf.u16("split.no", 0), raw_gguf.u16("split.count", 2)]
    files[0] = RawGguf([*keys, raw_gguf.i32("split.tensors.count", 1)]).build()
    with open_gguf(split(files)[0]) as model:
        assert model.tensors["blk.1.w"].part == 1


def test_a_late_part_names_the_first(split: Split, tmp_path: Path) -> None:
    paths = split(raw_gguf.split_files(3))
    for i in (1, 2):
        with pytest.raises(GgufError) as caught:
            open_gguf(paths[i])
        assert f"part {i + 1} of 3" in str(caught.value)
        assert f"open its first part, {paths[0]}" in str(caught.value)
    renamed = paths[1].rename(tmp_path / "other.gguf")
    with pytest.raises(GgufError, match=r"first part, whose name .* in -00001-of-00003\.gguf"):
        open_gguf(renamed)


def test_listed_parts_are_ordered_by_their_metadata(split: Split, tmp_path: Path) -> None:
    paths = split(raw_gguf.split_files(3))
    names = [paths[0].rename(tmp_path / "z.gguf"), paths[1].rename(tmp_path / "a.gguf"), paths[2]]
    for order in ([2, 0, 1], [1, 2, 0], [0, 1, 2]):
        shuffled = [names[i] for i in order]
        with open_gguf(shuffled[0], splits=shuffled) as model:
            assert [part.path for part in model.parts] == names
            assert model.path == names[0]
            assert bytes(model.data("blk.1.w")) == raw_gguf.pattern((4, 3), 1)


def test_listed_parts_must_be_all(split: Split, tmp_path: Path) -> None:
    paths = split(raw_gguf.split_files(3))
    with pytest.raises(GgufError, match="invalid split count, given: 2 files, but expected 3"):
        open_gguf(paths[0], splits=paths[:2])
    with pytest.raises(GgufError, match="invalid split file index: 2, expected 1"):
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(paths[2].read_bytes())
        open_gguf(paths[0], splits=[paths[2], copy])
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(raw_gguf.sample_file())
    with pytest.raises(GgufError, match="given: 2 files, but expected 1"):
        open_gguf(alone, splits=[alone, paths[0]])


def test_a_renamed_first_part(split: Split, tmp_path: Path) -> None:
    path = split(raw_gguf.split_files(2))[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match=r"invalid split file name.*-00001-of-00002\.gguf"):
        open_gguf(path)


def test_a_missing_part(split: Split) -> None:
    paths = split(raw_gguf.split_files(3))
    paths[1].unlink()
    with pytest.raises(GgufError, match="00002-of-00003.gguf: part 2 of 3 is missing"):
        open_gguf(paths[0])


def test_a_wrong_part_under_the_right_name(split: Split) -> None:
    files = raw_gguf.split_files(3)
    files[1], files[2] = files[2], files[1]
    paths = split(files)
    with pytest.raises(GgufError, match="invalid split file index: 2, expected 1"):
        open_gguf(paths[0])
    paths[1].write_bytes(raw_gguf.sample_file())
    with pytest.raises(GgufError, match="invalid split file index: none, expected 1"):
        open_gguf(paths[0])


@pytest.mark.parametrize("name", ["model-00001-of-00003.gguf", "joined.gguf"])
def test_parts_joined_with_cat(tmp_path: Path, name: str) -> None:
    files = raw_gguf.split_files(3)
    for joined in (files, files[1:]):
        (tmp_path / name).write_bytes(b"".join(joined))
        with pytest.raises(GgufError, match="joined byte by byte; merge them with"):
            open_gguf(tmp_path / name)


def test_the_same_tensor_in_two_parts(split: Split) -> None:
    files = raw_gguf.split_files(2)
    paths = split([files[0], files[1].replace(b"blk.1.w", b"blk.0.w")])
    with pytest.raises(GgufError) as caught:
        open_gguf(paths[0])
    assert f"{paths[1]}: invalid model: tensor 'blk.0.w' is duplicated" in str(caught.value)
    assert str(paths[0]) in str(caught.value)


@pytest.mark.parametrize("wrong", [2, 4, 0, -1])
def test_a_wrong_total_of_tensors(split: Split, wrong: int) -> None:
    files = raw_gguf.split_files(3)
    right = raw_gguf.i32("split.tensors.count", 3)
    files[0] = files[0].replace(right, raw_gguf.i32("split.tensors.count", wrong))
    with pytest.raises(GgufError, match=f"corrupted model: {wrong} tensors expected but 3 found"):
        open_gguf(split(files)[0])


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_split_keys_of_a_wrong_type(split: Split, key: str) -> None:
    numbers = {"split.no": 0, "split.count": 2, "split.tensors.count": 2}
    keys = {
        "split.no": raw_gguf.u16("split.no", 0),
        "split.count": raw_gguf.u16("split.count", 2),
        "split.tensors.count": raw_gguf.i32("split.tensors.count", 2),
    }
    keys[key] = raw_gguf.u32(key, numbers[key])
    files = raw_gguf.split_files(2)
    files[0] = RawGguf(list(keys.values()), [RawTensor("blk.0.w")]).build()
    with pytest.raises(ModelError, match=f"key {key} has wrong type u32 but expected type [ui]"):
        open_gguf(split(files)[0])


def test_a_damaged_later_part_is_named(split: Split) -> None:
    paths = split(raw_gguf.split_files(3))
    os.truncate(paths[2], paths[2].stat().st_size - 40)
    with pytest.raises(GgufError, match="00003-of-00003.gguf: tensor 'blk.2.w' data is not within"):
        open_gguf(paths[0])
