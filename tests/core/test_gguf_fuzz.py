"""Mutated GGUF files: opened and read, or refused with our own errors, at little cost."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import raw_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_gguf import RawGguf, RawTensor

from pyggml.errors import GgufError, ModelError
from pyggml.gguf import Gguf, ValueType, open_gguf
from pyggml.gguf_header import Cursor


def vocabulary_file() -> bytes:
    """About 64 kB: long string and number arrays, then many tensors."""
    words = [f"word{i}"[: i % 9] for i in range(3000)]
    pairs = [
        raw_gguf.pair("words", ValueType.ARRAY, raw_gguf.array(ValueType.STRING, words)),
        raw_gguf.pair("scores", ValueType.ARRAY, raw_gguf.array(ValueType.FLOAT32, [0.5] * 3000)),
    ]
    return RawGguf(pairs, [RawTensor(f"blk.{i}.w", (3, 2)) for i in range(200)]).build()


SEEDS = {
    "every type": raw_gguf.sample_file(),
    "version 2": RawGguf([raw_gguf.u32("a", 1)], [RawTensor()], version=2).build(),
    "vocabulary": vocabulary_file(),
    "first part": raw_gguf.split_files(3)[0],
    "second part": raw_gguf.split_files(3)[1],
}
NUMBERS = [
    0,
    1,
    8,
    9,
    12,
    64,
    255,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**48,
    2**63 - 1,
    2**63,
    2**64 - 1,
]

Mutation = Callable[[bytearray, random.Random], bytearray]


def flip(content: bytearray, rng: random.Random) -> bytearray:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def cut(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def splice(content: bytearray, rng: random.Random) -> bytearray:
    """Copy a stretch over, or into, another place."""
    start, target = rng.randrange(len(content)), rng.randrange(len(content))
    stretch = content[start : start + rng.randrange(1, 200)]
    replaced = rng.choice([0, len(stretch)])
    return content[:target] + stretch + content[target + replaced :]


def drop(content: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randrange(1, 40) :]


def inflate(content: bytearray, rng: random.Random) -> bytearray:
    """Write a number that hurts where a count, length or offset may be."""
    code = rng.choice(["<I", "<Q", "<Q"])
    number = struct.pack(code, rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(code)))
    at = rng.choice([8, 16, rng.randrange(len(content))])
    content[at : at + len(number)] = number
    return content


def shift(content: bytearray, rng: random.Random) -> bytearray:
    """Add a little to one byte: lengths and counts off by one."""
    at = rng.randrange(len(content))
    content[at] = (content[at] + rng.choice([-8, -1, 1, 8])) % 256
    return content


MUTATIONS: list[Mutation] = [flip, cut, splice, drop, inflate, shift]


def mutate(content: bytes, steps: list[Mutation], seed: int) -> bytes:
    rng = random.Random(seed)
    # half of the damage goes to the header, where nearly everything is decided
    for step in steps:
        head = rng.choice([len(content), min(len(content), 200)])
        content = bytes(step(bytearray(content[:head]), rng)) + content[head:]
        content = content or b"\0"
    return content


def read_everything(model: Gguf) -> None:
    for key in model.metadata:
        value: Any = model.metadata[key]
        if model.metadata.type_of(key) is ValueType.ARRAY:
            assert model.metadata.array_len(key) == len(value)
    for name, tensor in model.tensors.items():
        with model.data(name) as view:
            part = model.parts[tensor.part]
            assert bytes(view) == part.read(tensor.offset, tensor.nbytes)
            assert len(view) == tensor.nbytes


def open_and_read(path: Path) -> bool:
    """Whether the file was accepted; any error but our own fails the test."""
    try:
        with open_gguf(path) as model:
            read_everything(model)
            return True
    except (GgufError, ModelError) as e:
        assert str(e).isprintable()
        return False


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(SEEDS)),
    st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([16, Cursor.FIRST_READ]),
)
def test_mutated_files_cost_little_and_raise_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    steps: list[Mutation],
    seed: int,
    first_read: int,
) -> None:
    content = mutate(SEEDS[name], steps, seed)
    path = tmp_path_factory.getbasetemp() / "fuzz-00001-of-00003.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with mock.patch.object(Cursor, "FIRST_READ", first_read):
            open_and_read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000 + 10 * len(content)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 3))
def test_noise_behind_a_good_start(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, n_tensors: int, n_pairs: int
) -> None:
    start = RawGguf(n_tensors=n_tensors, n_pairs=n_pairs).header()
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(start + noise)
    accepted = open_and_read(path)
    assert accepted or n_tensors + n_pairs > 0


def test_the_seeds_themselves_are_valid(tmp_path: Path) -> None:
    """Otherwise mutations would never get past the first check."""
    for name in ("every type", "version 2", "vocabulary"):
        path = tmp_path / "seed.gguf"
        path.write_bytes(SEEDS[name])
        assert open_and_read(path), name
    paths = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path, content in zip(paths, raw_gguf.split_files(3), strict=True):
        path.write_bytes(content)
    assert open_and_read(paths[0])
