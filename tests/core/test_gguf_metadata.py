"""Typed getters of the metadata and overrides from the command line."""

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_gguf
from raw_gguf import SCALARS, RawGguf

from pyggml.errors import ConfigError, ModelError
from pyggml.gguf import (
    Metadata,
    Override,
    ValueType,
    open_gguf,
    parse_override,
    parse_overrides,
)


@pytest.fixture
def metadata(tmp_path: Path) -> Callable[..., Metadata]:
    """Metadata of a file with the given pairs."""

    def read(*pairs: bytes) -> Metadata:
        path = tmp_path / "model.gguf"
        path.write_bytes(RawGguf(list(pairs)).build())
        with open_gguf(path) as model:
            return model.metadata

    return read


# --- typed getters -----------------------------------------------------------------------------


@pytest.fixture
def scalars(metadata: Callable[..., Metadata]) -> Metadata:
    """One key of every type, named as gguf prints the type."""
    return metadata(*(raw_gguf.pair(k, t, raw_gguf.value(t, v)) for k, t, v in SCALARS))


GETTERS: list[tuple[str, str, Any]] = [
    ("get_int", "u32", 2**32 - 1),
    ("get_float", "f32", -0.15625),
    ("get_bool", "bool", True),
    ("get_str", "str", "Grüße\n😀"),
]


@pytest.mark.parametrize(("getter", "key", "value"), GETTERS, ids=[g[0] for g in GETTERS])
def test_getters_insist_on_the_exact_type(
    scalars: Metadata, getter: str, key: str, value: Any
) -> None:
    get = getattr(scalars, getter)
    assert get(key) == value
    assert get("missing", None) is None
    with pytest.raises(ModelError, match="key not found in model: missing"):
        get("missing")
    with pytest.raises(ModelError, match=f"key f64 has wrong type f64 but expected type {key}"):
        get("f64", value)


@pytest.mark.parametrize(
    "value_type",
    [t for t in ValueType if "INT" in t.name],
    ids=lambda t: t.label,
)
def test_get_int_reads_the_integer_type_it_is_told(
    scalars: Metadata, value_type: ValueType
) -> None:
    expected = {t: value for _, t, value in SCALARS}[value_type]
    assert scalars.get_int(value_type.label, value_type=value_type) == expected


def test_array_getters(metadata: Callable[..., Metadata]) -> None:
    def numbers(key: str, item: ValueType, items: list[Any]) -> bytes:
        return raw_gguf.pair(key, ValueType.ARRAY, raw_gguf.array(item, items))

    keys = metadata(
        numbers("u32", ValueType.UINT32, [1, 2**32 - 1]),
        numbers("i32", ValueType.INT32, [-1, 2]),
        numbers("bool", ValueType.BOOL, [0, 1, 2]),
        numbers("f32", ValueType.FLOAT32, [0.5]),
        numbers("u8", ValueType.UINT8, [7]),
        numbers("str", ValueType.STRING, ["a"]),
        raw_gguf.u32("scalar", 3),
    )
    assert keys.get_ints("u32").tolist() == [1, 2**32 - 1]
    assert keys.get_ints("i32").tolist() == [-1, 2]
    assert keys.get_ints("bool").tolist() == [0, 1, 1]
    assert keys.get_floats("f32").tolist() == [0.5]
    assert keys.get_array("u8").dtype == np.uint8
    assert keys.get_array("bool").dtype == np.bool_
    assert keys.get_strings("none", None) is None
    assert keys.type_label("u32") == "arr[u32,2]" and keys.type_label("scalar") == "u32"
    assert keys.type_label("u8").startswith("arr[u8,")
    wrong: list[tuple[str, Callable[[str], Any]]] = [
        ("f32", keys.get_ints),
        ("u8", keys.get_ints),
        ("u32", keys.get_floats),
        ("u32", keys.get_strings),
        ("u32", keys.get_string_bytes),
        ("str", keys.get_array),
        ("scalar", keys.get_ints),
        ("scalar", keys.array_len),
        ("scalar", keys.array_type),
    ]
    for key, getter in wrong:
        with pytest.raises(ModelError, match=f"key {key} has wrong type"):
            getter(key)
    with pytest.raises(ModelError, match="key not found in model: none"):
        keys.get_floats("none")


def test_per_layer_values_are_one_for_all_or_one_each(metadata: Callable[..., Metadata]) -> None:
    each = raw_gguf.array(ValueType.UINT32, [4, 2, 4])
    flags = raw_gguf.array(ValueType.BOOL, [1, 0, 1])
    keys = metadata(
        raw_gguf.u32("one", 8),
        raw_gguf.pair("each", ValueType.ARRAY, each),
        raw_gguf.pair("flags", ValueType.ARRAY, flags),
    )
    assert keys.get_per_layer("one", 3) == [8, 8, 8]
    assert keys.get_per_layer("each", 3) == [4, 2, 4]
    assert keys.get_per_layer("flags", 3) == [1, 0, 1]
    assert keys.get_per_layer("none", 3, 1) == [1, 1, 1]
    assert keys.get_per_layer("none", 3, None) is None
    with pytest.raises(ModelError, match="each has wrong array length: expected 4 .* got 3"):
        keys.get_per_layer("each", 4)
    with pytest.raises(ModelError, match="key not found in model: none"):
        keys.get_per_layer("none", 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=int:-12", Override("a.b", "int", -12)),
        ("a=float:1e-5", Override("a", "float", 1e-5)),
        ("a=bool:true", Override("a", "bool", True)),
        ("a=bool:false", Override("a", "bool", False)),
        ("a=str:x=y:z", Override("a", "str", "x=y:z")),
        ("a=str:", Override("a", "str", "")),
    ],
)
def test_override_texts(text: str, expected: Override) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "=int:1", "a=int", "a=1", "a=int:", "a=int:x", "a=int:1.5", "a=bool:1"),
        *("a=bool:True", "a=float:x", "a=u32:1", "a=str:" + "x" * 128, "k" * 128 + "=int:1"),
    ],
)
def test_bad_override_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--override-kv"):
        parse_override(text)


def test_override_lists_are_comma_separated_with_quotes() -> None:
    assert parse_overrides('a=int:1,"b=str:x,y",c=bool:true') == [
        Override("a", "int", 1),
        Override("b", "str", "x,y"),
        Override("c", "bool", True),
    ]


def test_overrides_replace_and_add_but_do_not_show_in_the_mapping(
    metadata: Callable[..., Metadata], caplog: pytest.LogCaptureFixture
) -> None:
    plain = metadata(raw_gguf.u32("n", 7), raw_gguf.text("s", "file"))
    keys = plain.with_overrides(
        parse_overrides("n=int:9,n=int:10,s=str:mine,f=float:0.5,b=bool:true")
    )
    with caplog.at_level(logging.INFO, "pyggml.gguf"):
        assert keys.get_int("n") == 9
    assert "using metadata override (  int) 'n' = 9" in caplog.text
    assert (keys.get_str("s"), keys.get_float("f"), keys.get_bool("b")) == ("mine", 0.5, True)
    assert keys["n"] == 7 and "f" not in keys
    assert plain.get_int("n") == 7


def test_an_override_of_the_wrong_class_is_reported_and_not_used(
    metadata: Callable[..., Metadata], caplog: pytest.LogCaptureFixture
) -> None:
    keys = metadata(raw_gguf.u32("n", 7)).with_overrides(parse_overrides("n=float:9,m=str:x"))
    with caplog.at_level(logging.WARNING, "pyggml.gguf"):
        assert keys.get_int("n") == 7
    assert "key 'n', expected int but got float" in caplog.text
    with pytest.raises(ModelError, match="key not found in model: m"):
        keys.get_int("m")


def test_an_override_must_fit_the_integer_type(metadata: Callable[..., Metadata]) -> None:
    keys = metadata(raw_gguf.u32("n", 7)).with_overrides([Override("n", "int", -1)])
    with pytest.raises(ConfigError, match=r"n=int:-1: the key is u32"):
        keys.get_int("n")
    assert keys.get_int("n", value_type=ValueType.INT32) == -1


def test_arrays_cannot_be_overridden(
    metadata: Callable[..., Metadata], caplog: pytest.LogCaptureFixture
) -> None:
    payload = raw_gguf.array(ValueType.UINT32, [1, 2])
    keys = metadata(raw_gguf.pair("a", ValueType.ARRAY, payload))
    keys = keys.with_overrides([Override("a", "int", 5)])
    with caplog.at_level(logging.WARNING, "pyggml.gguf"):
        assert keys.get_per_layer("a", 2) == [1, 2]
    assert "arrays cannot be overridden" in caplog.text


@pytest.mark.parametrize(
    "pair",
    [
        raw_gguf.text("llama.block_count", "4"),
        raw_gguf.pair("llama.block_count", ValueType.FLOAT32, struct.pack("<f", 4)),
        raw_gguf.i32("llama.block_count", -4),
        raw_gguf.pair("llama.block_count", ValueType.ARRAY, raw_gguf.array(ValueType.UINT32, [4])),
        None,
    ],
    ids=["string", "float", "negative", "array", "missing"],
)
def test_a_required_key_that_is_missing_or_mistyped(tmp_path: Path, pair: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(RawGguf([pair] if pair else []).build())
    with open_gguf(path) as model, pytest.raises(ModelError) as caught:
        model.metadata.get_int("llama.block_count")
    message = str(caught.value)
    assert "llama.block_count" in message and "expected" in message and "u32" in message
