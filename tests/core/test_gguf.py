"""Reading valid GGUF files: values, types, tensors, mapping, splits, overrides."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ggml_gguf
import gguf
import numpy as np
import pytest
import raw_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_gguf import SCALARS, RawGguf, RawTensor

from pyggml.dtypes import GGMLType
from pyggml.errors import GgufError
from pyggml.gguf import (
    Metadata,
    ValueType,
    open_gguf,
)
from pyggml.gguf_header import Cursor


@pytest.fixture
def write(tmp_path: Path) -> Callable[[RawGguf], Path]:
    def write_file(raw: RawGguf) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw.build())
        return path

    return write_file


@pytest.fixture
def metadata(write: Callable[[RawGguf], Path]) -> Callable[..., Metadata]:
    """Metadata of a file with the given pairs."""

    def read(*pairs: bytes) -> Metadata:
        with open_gguf(write(RawGguf(list(pairs)))) as model:
            return model.metadata

    return read


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A file made by the gguf package, and the arrays of its tensors."""
    path = tmp_path_factory.mktemp("gguf") / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value_type, value in SCALARS:
        writer.add_key_value(f"s.{key}", value, gguf.GGUFValueType(value_type))
    for key, value_type, value in SCALARS:
        item = gguf.GGUFValueType(value_type)
        writer.add_key_value(f"a.{key}", [value] * 3, gguf.GGUFValueType.ARRAY, item)
    writer.add_array("nested", [[1, 2], [3], ["x", "yz"]])
    random = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "token_embd.weight": random.random((6, 32), np.float32),
        "blk.0.ffn_up_exps.weight": random.random((2, 3, 64), np.float32).astype(np.float16),
        "four": random.random((2, 1, 3, 5), np.float32),
        "ids": np.arange(7, dtype=np.int32),
    }
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    blocks = gguf.quantize(tensors["token_embd.weight"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantized", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, {**tensors, "quantized": blocks}


@pytest.mark.parametrize(("key", "value_type", "value"), SCALARS, ids=[s[0] for s in SCALARS])
def test_scalars_and_arrays_of_every_type(
    written: tuple[Path, Any], key: str, value_type: ValueType, value: Any
) -> None:
    with open_gguf(written[0]) as model:
        found = model.metadata[f"s.{key}"]
        assert found == value and type(found) is type(value)
        assert model.metadata.type_of(f"s.{key}") is value_type
        items: Any = model.metadata[f"a.{key}"]
        assert list(items) == [value] * 3
        assert model.metadata.type_of(f"a.{key}") is ValueType.ARRAY
        assert model.metadata.array_type(f"a.{key}") is value_type
        assert model.metadata.array_len(f"a.{key}") == 3


def test_nested_arrays(written: tuple[Path, Any]) -> None:
    with open_gguf(written[0]) as model:
        nested: Any = model.metadata["nested"]
        first, second, third = nested
        assert (list(first), list(second), third) == ([1, 2], [3], ["x", "yz"])
        assert model.metadata.array_type("nested") is ValueType.ARRAY


def test_tensors_have_the_writers_shapes_types_and_bytes(written: tuple[Path, Any]) -> None:
    path, arrays = written
    with open_gguf(str(path)) as model:
        assert list(model.tensors) == list(arrays)
        for name, array in arrays.items():
            assert bytes(model.data(name)) == array.tobytes()
            assert model.tensors[name].nbytes == array.nbytes
            assert model.tensors[name].n_dims == array.ndim
        assert model.nbytes == sum(array.nbytes for array in arrays.values())
        assert model.tensors["four"].ne == (5, 3, 1, 2)
        assert model.tensors["quantized"].ne == (32, 6, 1, 1)
        assert model.tensors["quantized"].type is GGMLType.Q8_0
        assert model.tensors["blk.0.ffn_up_exps.weight"].type is GGMLType.F16
        assert (model.version, model.alignment, model.path) == (3, 32, path)


def test_keys_come_in_file_order(metadata: Callable[..., Metadata]) -> None:
    keys = metadata(*(raw_gguf.u32(key, 1) for key in ("z", "a", "m")))
    assert list(keys) == ["z", "a", "m"]
    assert len(keys) == 3 and "a" in keys and "b" not in keys
    assert keys.get("b") is None


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_have_one_layout(
    write: Callable[[RawGguf], Path], version: int
) -> None:
    path = write(RawGguf([raw_gguf.u32("n", 7)], [RawTensor(data=b"0123456789abcdef")], version))
    with open_gguf(path) as model:
        assert model.version == version
        assert model.metadata.get_int("n") == 7
        assert bytes(model.data("t")) == b"0123456789abcdef"


@pytest.mark.parametrize("alignment", [1, 2, 8, 32, 64, 4096])
def test_alignment_key_moves_the_data(write: Callable[[RawGguf], Path], alignment: int) -> None:
    tensors = [RawTensor(f"t{i}", (3,), data=raw_gguf.pattern((3,), i)) for i in range(3)]
    keys = [raw_gguf.u32("general.alignment", alignment)]
    with open_gguf(write(RawGguf(keys, tensors, alignment=alignment))) as model:
        assert model.alignment == alignment
        for tensor in tensors:
            assert bytes(model.data(str(tensor.name))) == tensor.data
            assert model.tensors[str(tensor.name)].offset % alignment == 0


def test_a_vocabulary_only_file_has_no_tensors(write: Callable[[RawGguf], Path]) -> None:
    with open_gguf(write(RawGguf([raw_gguf.u32("n", 7)]))) as model:
        assert model.tensors == {} and model.nbytes == 0


@pytest.mark.parametrize("ne", [(0,), (4, 0), (0, 4), (4, 0, 3), (4, 3, 0), (1, 2, 3, 0)])
def test_empty_tensors_load_as_empty(write: Callable[[RawGguf], Path], ne: tuple[int, ...]) -> None:
    tensors = [RawTensor("empty", ne), RawTensor("after", data=b"0123456789abcdef")]
    with open_gguf(write(RawGguf(tensors=tensors))) as model:
        assert len(model.data("empty")) == 0
        assert model.tensors["empty"].ne == (*ne, 1, 1, 1)[:4]
        assert bytes(model.data("after")) == b"0123456789abcdef"


# --- strings -----------------------------------------------------------------------------------

LOOKS_LIKE_A_PREFIX = b"\x05" + bytes(7) + b"hello"
STRINGS = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"", b"\0", b"a" * 255, b"b" * 256, b"c" * 5000, LOOKS_LIKE_A_PREFIX]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STRINGS, max_size=60), st.integers(1, 40))
def test_string_arrays_hold_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, strings: list[bytes], repeat: int
) -> None:
    """Long runs of short texts are found at once, anything else one by one: both must agree."""
    strings = strings * repeat
    payload = raw_gguf.array(ValueType.STRING, strings)
    pairs = [raw_gguf.pair("a", ValueType.ARRAY, payload), raw_gguf.u32("after", 9)]
    path = tmp_path_factory.getbasetemp() / "strings.gguf"
    path.write_bytes(RawGguf(pairs).build())
    with open_gguf(path) as model:
        assert model.metadata.get_string_bytes("a") == strings
        assert model.metadata.get_strings("a") == [s.decode("utf-8", "replace") for s in strings]
        assert model.metadata.get_int("after") == 9


def test_a_long_vocabulary_spans_many_reads(metadata: Callable[..., Metadata]) -> None:
    words = [f"{i:x}" * (i % 40 + 1) for i in range(60_000)]
    words[30_000] = "long" * 400_000
    words[40_000] = ""
    keys = metadata(
        raw_gguf.pair("a", ValueType.ARRAY, raw_gguf.array(ValueType.STRING, words)),
        raw_gguf.text("after", "end"),
    )
    assert keys.get_strings("a") == words
    assert keys["after"] == "end"


@pytest.mark.parametrize("first_read", [1, 3, 7, 30, 64, 111, 500])
def test_the_header_may_end_anywhere_in_a_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_read: int
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw_gguf.sample_file())
    with open_gguf(path) as model:
        whole, tensors = {key: model.metadata[key] for key in model.metadata}, model.tensors
    monkeypatch.setattr(Cursor, "FIRST_READ", first_read)
    with open_gguf(path) as model:
        assert repr({key: model.metadata[key] for key in model.metadata}) == repr(whole)
        assert model.tensors == tensors


def test_many_tensors_need_many_reads(write: Callable[[RawGguf], Path]) -> None:
    tensors = [RawTensor(f"blk.{i}.{'w' * 40}", (1,)) for i in range(15_000)]
    with open_gguf(write(RawGguf(tensors=tensors))) as model:
        assert list(model.tensors) == [tensor.name for tensor in tensors]
        assert min(t.offset for t in model.tensors.values()) > 1 << 20


def test_text_that_is_not_utf8_can_be_printed_and_read_raw(
    metadata: Callable[..., Metadata],
) -> None:
    keys = metadata(
        raw_gguf.text("s", b"a\xffb\0"),
        raw_gguf.pair("a", ValueType.ARRAY, raw_gguf.array(ValueType.STRING, [b"\xc3", b"ok"])),
    )
    assert keys.get_str("s") == "a\ufffdb\0"
    assert keys.get_strings("a") == ["\ufffd", "ok"]
    assert keys.get_string_bytes("a") == [b"\xc3", b"ok"]


def test_names_of_63_bytes_and_other_scripts_load(write: Callable[[RawGguf], Path]) -> None:
    names = ["n" * 63, "größe", "重み"]
    with open_gguf(write(RawGguf(tensors=[RawTensor(name) for name in names]))) as model:
        assert list(model.tensors) == names


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.gguf"
    ne = (256, 64)
    path.write_bytes(RawGguf(tensors=[RawTensor("w", ne, data=raw_gguf.pattern(ne, 5))]).build())
    return path


def test_address_points_at_the_mapped_bytes_and_does_not_keep_the_map(big: Path) -> None:
    with open_gguf(big) as model:
        part, tensor = model.parts[0], model.tensors["w"]
        expected = big.read_bytes()[tensor.offset :][: tensor.nbytes]
        assert ctypes.string_at(part.address(tensor.offset), tensor.nbytes) == expected
        mapping = part.map
        assert part.size == len(mapping) == big.stat().st_size
    with pytest.raises(ValueError, match="closed"):
        mapping.find(b"GGUF")


def test_dropped_pages_come_back_from_the_file(big: Path) -> None:
    with open_gguf(big) as model:
        part, tensor = model.parts[0], model.tensors["w"]
        before = bytes(model.data("w"))
        part.advise_dont_need(tensor.offset, tensor.nbytes)
        part.advise_dont_need(tensor.offset, 1)
        assert bytes(model.data("w")) == before


def test_reading_without_a_mapping(big: Path) -> None:
    with open_gguf(big) as model:
        part, tensor = model.parts[0], model.tensors["w"]
        numbers = np.empty(tensor.ne[1::-1], np.float32)
        part.read_into(tensor.offset, numbers.data)
        assert numbers.tobytes() == raw_gguf.pattern((256, 64), 5)


def test_a_view_outlives_the_model(big: Path) -> None:
    with open_gguf(big) as model:
        view = model.data("w")
    assert bytes(view) == raw_gguf.pattern((256, 64), 5)
    with pytest.raises(ValueError, match="closed"):
        model.data("w")


def test_a_closed_model_has_metadata_but_no_data(written: tuple[Path, Any]) -> None:
    with open_gguf(written[0]) as model:
        pass
    assert model.metadata["s.str"] == "Grüße\n😀"
    with pytest.raises(ValueError, match="closed"):
        model.parts[0].read(0, 4)


def test_a_file_truncated_while_open_is_reported(big: Path) -> None:
    with open_gguf(big) as model:
        os.truncate(big, 1000)
        with pytest.raises(GgufError, match="ends at byte 1,000"):
            model.parts[0].read(0, model.parts[0].size)
        with pytest.raises(GgufError, match="cannot be mapped"):
            model.data("w")


def test_opening_and_closing_leaks_no_descriptor(big: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(big.read_bytes()[:5000])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with open_gguf(big) as model:
            model.data("w").release()
        with pytest.raises(GgufError):
            open_gguf(bad)
        with pytest.raises(GgufError):
            open_gguf(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_real_model_reads_like_the_gguf_package(smollm2: Path) -> None:
    reader = gguf.GGUFReader(smollm2)
    with open_gguf(smollm2) as model:
        names = [key for key in reader.fields if not key.startswith("GGUF.")]
        assert list(model.metadata) == names
        for key in names:
            field, found = reader.fields[key], cast(Any, model.metadata[key])
            if len(field.data) <= 1:
                assert found == field.contents(), key
            else:
                assert len(found) == len(field.data)
                sample = range(0, len(field.data), 97)
                assert all(found[i] == field.contents(i) for i in sample), key
        assert [t.name for t in reader.tensors] == list(model.tensors)
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert ours.ne[: ours.n_dims] == tuple(theirs.shape)
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            assert int(ours.type) == theirs.tensor_type


@pytest.mark.parametrize("model_name", ["smollm2", "gemma3"])
def test_real_models_read_like_ggml(model_name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model_name)
    theirs = ggml_gguf.RealGguf(path)
    with open_gguf(path) as model:
        keys = model.metadata
        assert list(keys) == theirs.keys()
        assert [keys.type_of(key) for key in keys] == [theirs.type_of(key) for key in keys]
        for key in (key for key in keys if keys.type_of(key) is ValueType.ARRAY):
            assert keys.array_type(key) == theirs.array_type(key)
            if keys.array_type(key) is ValueType.STRING:
                assert keys.get_string_bytes(key) == theirs.strings(key)
            else:
                assert keys.get_array(key).tobytes() == theirs.array_bytes(key)
        assert [(t.name, t.type, t.offset, t.nbytes) for t in model.tensors.values()] == (
            theirs.tensors()
        )
        assert keys.get_str("general.architecture") == theirs.string("general.architecture")
