"""Damaged, hostile and foreign GGUF files: each is refused with a sentence that names the cause."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import raw_gguf
from raw_gguf import RawGguf, RawTensor

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError, ModelError
from pyggml.gguf import ValueType, open_gguf

Refuse = Callable[[bytes], str]
F16 = GGMLType.F16


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """Open a file that must be refused, at little cost; returns the message."""

    def open_bad(content: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises((GgufError, ModelError)) as caught:
                open_gguf(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        message = str(caught.value)
        assert peak < 1_000_000 + 8 * len(content)
        assert message.startswith(f"{path}: ") and message.isprintable()
        return message.removeprefix(f"{path}: ")

    return open_bad


def keys_only(*pairs: bytes, count: int | None = None) -> bytes:
    return RawGguf(list(pairs), n_pairs=count).build()


def tensors_only(*tensors: RawTensor, count: int | None = None) -> bytes:
    return RawGguf(tensors=list(tensors), n_tensors=count).build()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"none\.gguf: no such file"):
        open_gguf(tmp_path / "none.gguf")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="is a directory: name the .gguf file inside"):
        open_gguf(tmp_path)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GgufError, match="is not a regular file"):
        open_gguf(tmp_path / "pipe")


def test_a_path_no_system_accepts(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cannot be opened"):
        open_gguf(tmp_path / "a\0b")
    with pytest.raises(GgufError, match="cannot be opened: File name too long"):
        open_gguf(tmp_path / ("a" * 300))


def test_an_empty_file(refuse: Refuse) -> None:
    assert "is empty (0 bytes)" in refuse(b"")


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (b"PK\x03\x04", "zip archive or PyTorch"),
        (b"version https://git-lfs", "git-lfs pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"tjgg\x03\0\0\0", "GGJT"),
        (b'\x10\0\0\0\0\0\0\0{"__meta', r"starts with b'\x10\x00\x00\x00'"),
        (b"FUGG\0\0\0\x03", "starts with b'FUGG'"),
        (b"gguf\x03\0\0\0", "starts with b'gguf'"),
    ],
)
def test_other_formats_are_named(refuse: Refuse, start: bytes, named: str) -> None:
    message = refuse(start.ljust(64, b"\0"))
    assert message.startswith("not a GGUF file but ") and named in message


@pytest.mark.parametrize("version", [0, 4, 5, 0x7FFFFFFF, 0xFFFFFFFF])
def test_versions_of_the_future_are_named(refuse: Refuse, version: int) -> None:
    assert f"GGUF version {version} is unknown" in refuse(RawGguf(version=version).build())


def test_version_one_is_named(refuse: Refuse) -> None:
    assert "GGUF version 1 is no longer supported" in refuse(RawGguf(version=1).build())


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_is_named(refuse: Refuse, version: int) -> None:
    content = b"GGUF" + struct.pack(">IQQ", version, 0, 1) + bytes(64)
    message = refuse(content)
    assert f"version {version} with big-endian byte order" in message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = raw_gguf.sample_file()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    with open_gguf(path) as model:
        first = min(t.offset for t in model.tensors.values())
        end = max(t.offset + t.nbytes for t in model.tensors.values())
    cuts = [*range(1, first + 1), *range(first, end, 97), end - 1]
    assert len(cuts) > 2000
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(GgufError) as caught:
            open_gguf(path)
        assert "(at byte " in str(caught.value), cut
        assert "damaged or incomplete" in str(caught.value), cut
    path.write_bytes(whole[:end])
    open_gguf(path).close()


def test_cut_tensor_data_names_the_tensor(refuse: Refuse) -> None:
    whole = tensors_only(RawTensor("first"), RawTensor("last", (100,)))
    assert "tensor 'last' data is not within the file bounds" in refuse(whole[:-200])
    assert "tensor 'first' data is not within the file bounds" in refuse(whole[:-450])


# --- counts and lengths that lie ---------------------------------------------------------------

COUNTS = [-1, -2, 2**60, 2**63 - 1, 2**32, 1_000_000, 3]


@pytest.mark.parametrize("count", COUNTS)
def test_counts_that_lie(refuse: Refuse, count: int) -> None:
    key = raw_gguf.u32("a", 1)
    keys = refuse(keys_only(key, raw_gguf.u32("b", 1), count=count))
    tensors = refuse(tensors_only(RawTensor("a"), RawTensor("b"), count=count))
    if count != 3:
        assert f"the number of keys is {count % 2**64:,}, more than the file can hold" in keys
        assert f"the number of tensors is {count % 2**64:,}, more than the file can" in tensors


def test_counts_have_limits_even_in_large_files(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    for n_tensors, n_pairs, named in [
        (2**20, 0, "the number of tensors is 1,048,576, the limit is 65,536"),
        (0, 2**20, "the number of keys is 1,048,576, the limit is 65,536"),
    ]:
        path.write_bytes(RawGguf(n_tensors=n_tensors, n_pairs=n_pairs).build())
        os.truncate(path, 2**40)
        with pytest.raises(GgufError, match=named):
            open_gguf(path)


# lengths are replaced in a file whose only long string lies at the end of the header
LENGTHS = [2**64 - 1, 2**63, 2**63 - 1, 2**30, 2**32 + 5]


def lying_files(length: int) -> dict[str, bytes]:
    """One file for each place where a length prefix can lie."""
    lie = struct.pack("<Q", length)
    good = raw_gguf.u32("good", 1)
    name = raw_gguf.string("t", length) + struct.pack("<IQIQ", 1, 4, 0, 0)
    element = struct.pack("<IQ", ValueType.STRING, 3) + raw_gguf.string("ok") + lie + b"abcdefghij"
    return {
        "key": keys_only(good, lie + b"key" + struct.pack("<II", 4, 1)),
        "value": keys_only(good, raw_gguf.pair("v", ValueType.STRING, lie + b"text")),
        "element": keys_only(good, raw_gguf.pair("v", ValueType.ARRAY, element)),
        "tensor name": RawGguf([good], n_tensors=1).header() + name + bytes(64),
    }


@pytest.mark.parametrize("place", lying_files(0))
def test_string_lengths_that_lie(refuse: Refuse, place: str) -> None:
    size = len(lying_files(0)[place])
    at = {"key": 28 + 20, "value": 28 + 33, "element": 28 + 50, "tensor name": 24 + 20}[place]
    for length in [*LENGTHS, size, size - at + 1]:
        message = refuse(lying_files(length)[place])
        assert "the length of" in message
        assert f"{length:,}" in message


def test_a_length_may_lie_anywhere_in_a_long_array(refuse: Refuse) -> None:
    words = [f"word {i}" for i in range(5000)]
    payload = raw_gguf.array(ValueType.STRING, words)
    content = bytearray(keys_only(raw_gguf.pair("words", ValueType.ARRAY, payload)))
    for i in (0, 15, 16, 300, 4321, 4999):
        at = content.index(raw_gguf.string(words[i]))
        good = content[at : at + 8]
        for length in (2**64 - 1, len(content), len(content) - at - 7):
            content[at : at + 8] = struct.pack("<Q", length)
            assert "string in key 'words'" in refuse(bytes(content))
        content[at : at + 8] = good


@pytest.mark.parametrize("item", [t for t in ValueType if t is not ValueType.STRING])
@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**61, 2**30, 65])
def test_array_lengths_that_lie(refuse: Refuse, item: ValueType, count: int) -> None:
    payload = struct.pack("<IQ", item, count) + bytes(20)
    message = refuse(keys_only(raw_gguf.pair("a", ValueType.ARRAY, payload)))
    assert "in key 'a'" in message and f"{count:,}" in message


@pytest.mark.parametrize("second", [raw_gguf.u32("same", 1), raw_gguf.text("same", "x")])
def test_duplicate_keys(refuse: Refuse, second: bytes) -> None:
    assert "key 'same' is duplicated" in refuse(keys_only(raw_gguf.u32("same", 1), second))


def test_duplicate_tensors(refuse: Refuse) -> None:
    message = refuse(tensors_only(RawTensor("same"), RawTensor("other"), RawTensor("same", (2,))))
    assert "tensor 'same' is duplicated" in message


BAD_NAMES = [b"a\0b", b"a\nb", b"\x1b[2J", b"\xff\xfe", b"a\xc3", "a\u202eb".encode()]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_printed(refuse: Refuse, name: bytes) -> None:
    key = refuse(keys_only(raw_gguf.pair(name, 4, bytes(4))))
    assert f"the name of key 0 is {name!r}: not printable" in key
    tensor = refuse(tensors_only(RawTensor(name)))
    assert f"the name of tensor 0 is {name!r}: not printable" in tensor


def test_names_of_wrong_length(refuse: Refuse) -> None:
    assert "the name of key 0 has 0 bytes" in refuse(keys_only(raw_gguf.u32("", 1)))
    assert "the name of key 0 has 65,536" in refuse(keys_only(raw_gguf.u32("k" * 65536, 1)))
    for length in (0, 64, 1000):
        message = refuse(tensors_only(RawTensor("n" * length)))
        assert f"the name of tensor 0 has {length:,} bytes, must have 1 to 63" in message


@pytest.mark.parametrize("id", [13, 14, 255, 2**31, 2**32 - 1])
def test_unknown_value_types(refuse: Refuse, id: int) -> None:
    assert f"the type of key 'a' is {id}" in refuse(keys_only(raw_gguf.pair("a", id, bytes(8))))
    payload = struct.pack("<IQ", id, 1) + bytes(8)
    message = refuse(keys_only(raw_gguf.pair("a", ValueType.ARRAY, payload)))
    assert f"the element type of key 'a' is {id}" in message


def test_arrays_nested_too_deep(refuse: Refuse) -> None:
    payload = raw_gguf.array(ValueType.UINT8, [1])
    for _ in range(4):
        payload = raw_gguf.array(ValueType.ARRAY, [payload])
    assert "key 'a' nests arrays more than 4" in refuse(
        keys_only(raw_gguf.pair("a", ValueType.ARRAY, payload))
    )
    bomb = struct.pack("<IQ", ValueType.ARRAY, 1) * 100_000
    assert "nests arrays" in refuse(keys_only(raw_gguf.pair("a", ValueType.ARRAY, bomb)))


def test_too_many_nested_arrays(refuse: Refuse) -> None:
    empty = struct.pack("<IQ", ValueType.UINT8, 0)
    payload = struct.pack("<IQ", ValueType.ARRAY, 40_000) + empty * 40_000
    pairs = [raw_gguf.pair(key, ValueType.ARRAY, payload) for key in "ab"]
    assert "key 'b' has more than 65,536 arrays" in refuse(keys_only(*pairs))


@pytest.mark.parametrize("alignment", [0, 3, 24, 33, 2**32 - 1])
def test_alignment_must_be_a_power_of_two(refuse: Refuse, alignment: int) -> None:
    message = refuse(keys_only(raw_gguf.u32("general.alignment", alignment)))
    assert f"general.alignment is {alignment}, it must be a power of two" in message


@pytest.mark.parametrize(
    ("pair", "label"),
    [
        (raw_gguf.i32("general.alignment", 32), "i32"),
        (raw_gguf.pair("general.alignment", ValueType.UINT64, struct.pack("<Q", 32)), "u64"),
        (raw_gguf.text("general.alignment", "32"), "str"),
        (
            raw_gguf.pair(
                "general.alignment", ValueType.ARRAY, raw_gguf.array(ValueType.UINT32, [32])
            ),
            r"arr[u32,1]",
        ),
    ],
    ids=["i32", "u64", "str", "arr"],
)
def test_alignment_must_be_u32(refuse: Refuse, pair: bytes, label: str) -> None:
    message = refuse(keys_only(pair))
    assert message == f"key general.alignment has wrong type {label} but expected type u32"


def test_a_giant_alignment_is_no_giant_seek(refuse: Refuse) -> None:
    keys = [raw_gguf.u32("general.alignment", 2**31)]
    content = RawGguf(keys, [RawTensor("t")]).build()
    assert "tensor 't' data is not within the file bounds" in refuse(content)


@pytest.mark.parametrize("n_dims", [0, 5, 6, 2**31, 2**32 - 1])
def test_number_of_dimensions(refuse: Refuse, n_dims: int) -> None:
    message = refuse(tensors_only(RawTensor("t", (1,) * min(n_dims, 6), n_dims=n_dims)))
    assert f"tensor 't' has {n_dims} dimensions, must have 1 to 4" in message


@pytest.mark.parametrize(
    ("ne", "named"),
    [
        ((-1,), "has a negative dimension"),
        ((4, -1), "has a negative dimension"),
        ((4, 2, 2, -(2**63)), "has a negative dimension"),
        ((2**63 - 1,), "is too large"),
        ((2**31, 2**31, 4), "is too large"),
        ((2**62, 2**62, 2**62, 2**62), "is too large"),
        ((2**62, 2**62, 0), "is too large"),
        ((2**62,), "is too large"),
        ((2**60,), "data is not within the file bounds"),
        ((2**40,), "data is not within the file bounds"),
    ],
)
def test_dimensions_that_overflow(refuse: Refuse, ne: tuple[int, ...], named: str) -> None:
    message = refuse(tensors_only(RawTensor("t", ne, data=b"1234")))
    assert "tensor 't' " + named in message


def test_sizes_whose_sum_overflows(refuse: Refuse) -> None:
    size = 2**61 - 32
    tensors = [
        RawTensor(f"t{i}", (size // 4,), data=b"", offset=i * size % 2**64) for i in range(16)
    ]
    assert "tensor 't0' data is not within the file bounds" in refuse(tensors_only(*tensors[:9]))
    assert "tensor 't9' has data offset" in refuse(tensors_only(*tensors))


@pytest.mark.parametrize(
    ("type", "label", "ne0", "block"),
    [(GGMLType.Q4_0, "q4_0", 33, 32), (GGMLType.Q4_K, "q4_K", 128, 256)],
)
def test_rows_must_be_whole_blocks(
    refuse: Refuse, type: GGMLType, label: str, ne0: int, block: int
) -> None:
    message = refuse(tensors_only(RawTensor("t", (ne0, 256), type, bytes(40_000))))
    assert f"tensor 't' of type {label} has rows of {ne0} elements" in message
    assert f"block size {block}" in message


@pytest.mark.parametrize(
    ("id", "hint"),
    [
        *((id, "which ggml removed") for id in (4, 5, 31, 32, 33, 36, 37, 38)),
        *((id, "made for a fork") for id in (43, 97, 1000, -1, 2**31)),
    ],
)
def test_unknown_and_retired_types(refuse: Refuse, id: int, hint: str) -> None:
    message = refuse(tensors_only(RawTensor("t", (256, 2), id, bytes(600))))
    assert f"tensor 't' has type {id & 0xFFFFFFFF}" in message and hint in message


@pytest.mark.parametrize("offset", [1, 16, 32, 2**63, 2**64 - 1])
def test_offsets_must_be_consecutive(refuse: Refuse, offset: int) -> None:
    message = refuse(tensors_only(RawTensor("t", offset=offset)))
    assert f"tensor 't' has data offset {offset:,}, expected 0" in message


@pytest.mark.parametrize("offset", [0, 16, 31, 64, 2**63])
def test_tensors_must_not_overlap_or_leave_gaps(refuse: Refuse, offset: int) -> None:
    message = refuse(tensors_only(RawTensor("a"), RawTensor("b", offset=offset)))
    assert f"tensor 'b' has data offset {offset:,}, expected 32" in message


def test_tensor_data_is_not_judged_by_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    numbers = np.array([1, np.nan, np.inf, 0], np.float16)
    path.write_bytes(tensors_only(RawTensor("t", (4,), F16, numbers.tobytes())))
    with open_gguf(path) as model:
        assert bytes(model.data("t")) == numbers.tobytes()
