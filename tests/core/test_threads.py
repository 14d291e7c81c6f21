"""CPUs of threads: masks, ranges and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.errors import ConfigError
from pyggml.threads import ThreadParams, listed, parse_mask, parse_range

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("1", {0}), ("0xf", {0, 1, 2, 3}), ("0XA0", {5, 7}), ("ff", EIGHT), ("0003", {0, 1})],
)
def test_masks(text: str, cpus: set[int]) -> None:
    assert parse_mask(text, "-C", EIGHT) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3", {0, 1, 2, 3}), ("7-7", {7}), ("5-", {5, 6, 7}), ("-1", {0, 1}), ("-", EIGHT)],
)
def test_ranges(text: str, cpus: set[int]) -> None:
    assert parse_range(text, "-Cr", EIGHT) == cpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a hexadecimal number such as 0xf"),
        ("0x", "'0x' is not a hexadecimal number"),
        ("0xg", "'0xg' is not a hexadecimal number"),
        ("-1", "'-1' is not a hexadecimal number"),
        ("1_0", "'1_0' is not a hexadecimal number"),
        ("0", "0: no CPU is in this mask"),
        ("f" * 129, "a mask has at most 128 digits, not 129"),
        ("0x301", "0x301: this process cannot run on CPU 8-9\nit may use 0-7"),
    ],
)
def test_mistakes_in_masks(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_mask(text, "--cpu-mask", EIGHT)
    assert str(error.value).startswith("--cpu-mask")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "'3' is not a range of CPUs such as 0-3, 2- or -5"),
        ("a-b", "'a-b' is not a range"),
        ("0-1-2", "'0-1-2' is not a range"),
        ("\u0661-\u0662", "is not a range"),
        ("3-2", "3-2: CPU 3 comes after CPU 2"),
        ("9-", "9-: CPU 9 comes after CPU 7"),
        ("6-9", "6-9: this process cannot run on CPU 8-9\nit may use 0-7"),
        ("0-99999", "'0-99999' is not a range"),
    ],
)
def test_mistakes_in_ranges(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_range(text, "--cpu-range", EIGHT)
    assert str(error.value).startswith("--cpu-range ")
    assert said in str(error.value)


@given(st.frozensets(st.integers(0, 511), min_size=1))
def test_a_mask_is_the_sum_of_its_bits(cpus: frozenset[int]) -> None:
    text = hex(sum(1 << cpu for cpu in cpus))
    assert parse_mask(text, "-C", frozenset(range(512))) == cpus
    runs = [part.partition("-") for part in listed(cpus).split(",")]
    again = {cpu for low, _, high in runs for cpu in range(int(low), int(high or low) + 1)}
    assert again == cpus


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_threads": 0}, "n_threads 0: at least one thread"),
        ({"poll": 101}, "poll 101 is out of range: allowed are 0 to 100"),
        ({"poll": -1}, "poll -1 is out of range"),
        ({"priority": 4}, "priority 4 is out of range: allowed are -1 to 3"),
        ({"cpus": frozenset()}, "a set of CPUs for threads is empty"),
    ],
)
def test_mistakes_in_threads(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ThreadParams(**{"n_threads": 1, **given})
