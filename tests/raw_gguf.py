"""GGUF files byte by byte, for what no honest writer would write."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyggml.dtypes import GGMLType
from pyggml.gguf import ValueType

# a value of every type, by the name gguf prints
SCALARS: list[tuple[str, ValueType, Any]] = [
    ("u8", ValueType.UINT8, 255),
    ("i8", ValueType.INT8, -128),
    ("u16", ValueType.UINT16, 65535),
    ("i16", ValueType.INT16, -32768),
    ("u32", ValueType.UINT32, 2**32 - 1),
    ("i32", ValueType.INT32, -(2**31)),
    ("f32", ValueType.FLOAT32, -0.15625),
    ("bool", ValueType.BOOL, True),
    ("no", ValueType.BOOL, False),
    ("str", ValueType.STRING, "Grüße\n😀"),
    ("u64", ValueType.UINT64, 2**64 - 1),
    ("i64", ValueType.INT64, -(2**63)),
    ("f64", ValueType.FLOAT64, 1e300),
]

# struct codes by value type id; strings and arrays are written by hand
CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A length-prefixed string whose prefix may lie."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(value_type: int, content: Any) -> bytes:
    """The payload of a scalar or string."""
    if value_type == ValueType.STRING:
        return string(content)
    return struct.pack("<" + CODES[value_type], content)


def array(item_type: int, items: list[Any], count: int | None = None) -> bytes:
    """The payload of an array; nested arrays take ready payloads as items."""
    nested = item_type == ValueType.ARRAY
    body = b"".join(item if nested else value(item_type, item) for item in items)
    return struct.pack("<IQ", item_type, len(items) if count is None else count) + body


def pair(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + payload


def u32(key: str, number: int) -> bytes:
    return pair(key, ValueType.UINT32, struct.pack("<I", number))


def u16(key: str, number: int) -> bytes:
    return pair(key, ValueType.UINT16, struct.pack("<H", number))


def i32(key: str, number: int) -> bytes:
    return pair(key, ValueType.INT32, struct.pack("<i", number))


def text(key: str, content: str | bytes) -> bytes:
    return pair(key, ValueType.STRING, string(content))


@dataclass
class RawTensor:
    name: str | bytes = "t"
    ne: tuple[int, ...] = (4,)
    type: int = GGMLType.F32
    data: bytes | None = None  # None: zeros, as much as type and ne need
    offset: int | None = None  # None: where it belongs
    n_dims: int | None = None

    def payload(self) -> bytes:
        if self.data is not None:
            return self.data
        return bytes(GGMLType(self.type).row_size(int(np.prod(self.ne))))

    def info(self, offset: int) -> bytes:
        n_dims = len(self.ne) if self.n_dims is None else self.n_dims
        dims = struct.pack(f"<{len(self.ne)}Q", *(n & (2**64 - 1) for n in self.ne))
        place = offset if self.offset is None else self.offset
        return (
            string(self.name)
            + struct.pack("<I", n_dims)
            + dims
            + struct.pack("<IQ", self.type & 0xFFFFFFFF, place)
        )


@dataclass
class RawGguf:
    pairs: list[bytes] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    n_tensors: int | None = None
    n_pairs: int | None = None
    magic: bytes = b"GGUF"

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        mask = 2**64 - 1
        start = self.magic + struct.pack("<IQQ", self.version, n_tensors & mask, n_pairs & mask)
        infos, offset = [], 0
        for tensor in self.tensors:
            infos.append(tensor.info(offset))
            offset += len(self.padded(tensor.payload()))
        return start + b"".join(self.pairs) + b"".join(infos)

    def padded(self, raw: bytes) -> bytes:
        return raw + bytes(-len(raw) % self.alignment)

    def build(self) -> bytes:
        data = b"".join(self.padded(tensor.payload()) for tensor in self.tensors)
        return self.padded(self.header()) + data


def pattern(ne: tuple[int, ...], seed: int) -> bytes:
    """F32 tensor data that differs between tensors."""
    return np.random.default_rng(seed).random(ne[::-1], np.float32).tobytes()


def sample_file() -> bytes:
    """A valid file of about 3 kB with every kind of value and a few tensors."""
    scalars = [pair(f"test.{t.name.lower()}", t, value(t, 1)) for t in map(ValueType, CODES)]
    arrays = [
        pair(f"test.{t.name.lower()}_array", ValueType.ARRAY, array(t, [0, 1, 1]))
        for t in map(ValueType, CODES)
    ]
    words = [f"token {i}" for i in range(40)] + ["", "a" * 300, "b"]
    nested = array(
        ValueType.ARRAY,
        [array(ValueType.UINT8, [1, 2]), array(ValueType.STRING, ["x", "y"])],
    )
    pairs = [
        text("general.architecture", "llama"),
        u32("general.alignment", 32),
        *scalars,
        *arrays,
        pair("test.words", ValueType.ARRAY, array(ValueType.STRING, words)),
        pair("test.nested", ValueType.ARRAY, nested),
        pair("test.empty", ValueType.ARRAY, array(ValueType.FLOAT32, [])),
    ]
    tensors = [
        RawTensor("token_embd.weight", (8, 3), data=pattern((8, 3), 1)),
        RawTensor("blk.0.attn_q.weight", (32, 2), GGMLType.Q4_0, data=bytes(range(36))),
        RawTensor("blk.0.ffn_up_exps.weight", (2, 3, 4), data=pattern((2, 3, 4), 2)),
        RawTensor("output_norm.weight", (5,), data=pattern((5,), 3)),
    ]
    return RawGguf(pairs, tensors).build()


def split_files(count: int, tensors_per_part: int = 1) -> list[bytes]:
    """The bytes of each part of a valid split model; the first has the model's own keys."""
    total = count * tensors_per_part
    files = []
    for no in range(count):
        own = [text("general.architecture", "llama")] if no == 0 else []
        keys = [
            *own,
            i32("split.tensors.count", total),
            u16("split.count", count),
            u16("split.no", no),
        ]
        numbers = range(no * tensors_per_part, (no + 1) * tensors_per_part)
        tensors = [RawTensor(f"blk.{i}.w", (4, 3), data=pattern((4, 3), i)) for i in numbers]
        files.append(RawGguf(keys, tensors).build())
    return files
