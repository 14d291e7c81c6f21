"""Parts of the llama layer for tests: numbers, metadata, tiny models on the reference device."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from raw_gguf import RawGguf, RawTensor, array, i32, pair, string, text, u16, u32, value
from tiny import write_tiny

from pyggml.backend import Status
from pyggml.backends.reference.device import RefBackend, RefBuffer, RefBufferType, RefDevice
from pyggml.errors import OutOfMemory
from pyggml.gguf import Metadata, ValueType, open_gguf
from pyggml.graph import Graph
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.hparams import HParams
from pyggml.llama.loader import Model, ModelParams, load_model
from pyggml.ops import RopeMode

DEVICE = RefDevice()


class Limited(RefDevice):
    """Knows how many bytes are allocated, and hands out at most `room`."""

    def __init__(self, room: int = 1 << 40) -> None:
        super().__init__()
        self._buft = LimitedBufferType(self)
        self.room = room
        self.live = 0


class LimitedBufferType(RefBufferType):
    """Counts in its device."""

    def __init__(self, device: Limited) -> None:
        super().__init__(device)
        self.limited = device

    def alloc_buffer(self, size: int) -> RefBuffer:
        if self.limited.live + size > self.limited.room:
            raise OutOfMemory(f"{size} bytes wanted")
        self.limited.live += size
        return LimitedBuffer(self, size)


class LimitedBuffer(RefBuffer):
    """Counts down when it is freed."""

    def free(self) -> None:
        assert isinstance(self.buft, LimitedBufferType)
        self.buft.limited.live -= self.size


class Breaking(RefDevice):
    """Its backend raises in the run that `fuse` counts down to."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = -1
        self.failure: Callable[[], Status] = _interrupt

    def init_backend(self) -> RefBackend:
        return BreakingBackend(self)


class BreakingBackend(RefBackend):
    def graph_compute(self, graph: Graph) -> Status:
        device = self.device
        assert isinstance(device, Breaking)
        device.fuse -= 1
        return device.failure() if device.fuse == 0 else super().graph_compute(graph)


def _interrupt() -> Status:
    raise KeyboardInterrupt


def hparams(n_layer: int = 3, **changes: Any) -> HParams:
    """Numbers of a small model; no two sizes are equal."""
    values: dict[str, Any] = {
        "arch": "llama",
        "name": "",
        "n_ctx_train": 4096,
        "n_embd": 24,
        "n_layer": n_layer,
        "n_vocab": 10,
        "n_head": (6,) * n_layer,
        "n_head_kv": (3,) * n_layer,
        "n_ff": (8,) * n_layer,
        "n_embd_head_k": 4,
        "n_embd_head_v": 2,
        "n_rot": 4,
        "rms_eps": 1e-5,
        "rope_mode": RopeMode.NORMAL,
    }
    return HParams(**{**values, **changes})


def keys(arch: str = "llama", n_layer: int = 3, **changes: Any) -> dict[str, Any]:
    """The keys a decoder needs; changes come without "<arch>.", and None drops a key.

    In the name of a change __ stands for a dot.
    """
    own: dict[str, Any] = {
        "context_length": 4096,
        "embedding_length": 24,
        "block_count": n_layer,
        "feed_forward_length": 8,
        "attention.head_count": 6,
        "attention.head_count_kv": 3,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 10,
    }
    own |= {key.replace("__", "."): item for key, item in changes.items()}
    found = {f"{arch}.{key}": item for key, item in own.items()}
    return {"general.architecture": arch, **{k: v for k, v in found.items() if v is not None}}


def metadata(path: Path, items: Mapping[str, Any]) -> Metadata:
    """Metadata read from a file with these values; bytes are a ready payload with its type."""
    path.write_bytes(RawGguf([_pair(key, item) for key, item in items.items()]).build())
    with open_gguf(path) as gguf:
        return gguf.metadata


def _pair(key: str, item: Any) -> bytes:
    if isinstance(item, bytes):
        return pair(key, item[0], item[1:])
    if isinstance(item, str):
        return text(key, item)
    if isinstance(item, bool):
        return pair(key, ValueType.BOOL, value(ValueType.BOOL, item))
    if isinstance(item, int):
        return u32(key, item)
    if isinstance(item, float):
        return pair(key, ValueType.FLOAT32, value(ValueType.FLOAT32, item))
    kind = ValueType.BOOL if isinstance(item[0], bool) else ValueType.INT32
    return pair(key, ValueType.ARRAY, array(kind, list(item)))


def tiny_model(
    path: Path, arch: str = "llama", *, params: ModelParams | None = None, **options: Any
) -> Model:
    """A tiny random model, written to `path` and loaded on the reference device."""
    return load_model(write_tiny(path, arch, **options), params, devices=[DEVICE])


def context_of(model: Model, **params: Any) -> Context:
    """A context of 256 tokens with an exact cache."""
    return Context(
        model, ContextParams(**{"n_ctx": 256, "type_k": "f32", "type_v": "f32"} | params)
    )


def run(context: Context, ids: list[int], pos: int = 0, seq: int = 0) -> NDArray[np.float32]:
    """[n_tokens, n_vocab], decoded in batches of n_batch."""
    rows, step = [], context.params.n_batch
    for i in range(0, len(ids), step):
        context.decode(Batch.of(ids[i : i + step], pos + i, seq=seq, logits="all"))
        rows.append(context.all_logits())
    return np.concatenate(rows)


def logits_after_cut(
    context: Context, ids: list[int], start: int, stop: int, more: list[int]
) -> NDArray[np.float32]:
    """Logits of `more`, after positions start..stop-1 of `ids` were cut out of the cache."""
    run(context, ids)
    context.memory.remove(0, start, stop)
    context.memory.shift(0, stop, len(ids), start - stop)
    return run(context, more, len(ids) + start - stop)


def with_keys(path: Path, **numbers: int) -> Path:
    """The GGUF file at `path` with further u32 keys, __ standing for a dot; changes it in place."""
    raw = path.read_bytes()
    (n_pairs,) = struct.unpack_from("<Q", raw, 16)
    pairs = b"".join(u32(key.replace("__", "."), number) for key, number in numbers.items())
    # the tensors stay where they are relative to the end of the header if it grows by whole blocks
    filler = u32("filler.", 0)
    pairs += u32("filler." + "x" * (-(len(pairs) + len(filler)) % 32), 0)
    count = struct.pack("<Q", n_pairs + len(numbers) + 1)
    path.write_bytes(raw[:16] + count + pairs + raw[24:])
    return path


def corrupt(path: Path, name: str, at: int, raw: bytes) -> None:
    """Overwrite bytes of a tensor."""
    with open_gguf(path) as gguf:
        offset = gguf.tensors[name].offset
    with path.open("r+b") as file:
        file.seek(offset + at)
        file.write(raw)


def split(path: Path, n_parts: int) -> list[Path]:
    """The model in several files beside `path`, as gguf-split cuts them."""
    paths = [
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts)
    ]
    pairs, tensors = contents(path)
    step = -(-len(tensors) // n_parts)
    for i, part in enumerate(paths):
        marks = [u16("split.no", i), u16("split.count", n_parts)]
        marks.append(i32("split.tensors.count", len(tensors)))
        own = [*pairs, *marks] if i == 0 else marks
        part.write_bytes(RawGguf(own, tensors[i * step : (i + 1) * step]).build())
    return paths


def contents(path: Path) -> tuple[list[bytes], list[RawTensor]]:
    """The pairs and tensors of a file, ready to be written again."""
    raw = path.read_bytes()
    with open_gguf(path) as whole:
        first = next(iter(whole.tensors.values()))
        end = raw.index(string(first.name) + struct.pack("<I", first.n_dims))
        tensors = [
            RawTensor(name, t.ne[: t.n_dims], t.type, bytes(whole.data(name)))
            for name, t in whole.tensors.items()
        ]
    (n_pairs,) = struct.unpack_from("<Q", raw, 16)
    return [raw[24:end], *[b""] * (n_pairs - 1)], tensors
