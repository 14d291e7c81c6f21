"""Loading: what is refused and how it is said; every way of loading gives the same model."""

from __future__ import annotations

import logging
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_gguf import RawGguf, u32
from tiny import write_tiny
from tiny_llama import (
    DEVICE,
    Limited,
    contents,
    context_of,
    corrupt,
    keys,
    metadata,
    run,
    split,
    tiny_model,
)

from pyggml.backend import Buffer, BufferType
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.reference.device import RefBuffer, RefBufferType, RefDevice
from pyggml.dtypes import GGMLType
from pyggml.errors import ConfigError, GgufError, ModelError, OutOfMemory
from pyggml.gguf import Override, open_gguf, parse_override
from pyggml.llama.loader import LoadCancelled, Model, ModelParams, load_model
from pyggml.llama.memory_lock import MemoryLock
from pyggml.tensor import Tensor

IDS = [1, 2, 3, 250, 17]


def logits(model: Model) -> np.ndarray[Any, Any]:
    return run(context_of(model), IDS)


# ---------------------------------------------------------------- tensors
def test_a_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        tiny_model(tmp_path / "m.gguf", omit=("ffn_up",))
    assert str(caught.value) == (
        f"{tmp_path / 'm.gguf'}: tensor 'blk.0.ffn_up.weight' is missing, which the architecture "
        "'llama' needs: the model is of another kind, or a variant that is not supported"
    )


def test_unknown_tensors(tmp_path: Path) -> None:
    biases = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    with pytest.raises(ModelError) as caught:
        tiny_model(tmp_path / "m.gguf", "gemma3", extra=biases)
    assert str(caught.value) == (
        f"{tmp_path / 'm.gguf'}: 12 tensors are unknown to the architecture 'gemma3': the model "
        "is of another kind, or a variant that is not supported\n"
        "unknown tensors: blk.0.attn_k.bias, blk.0.attn_q.bias, blk.0.attn_v.bias, "
        "blk.1.attn_k.bias, ..."
    )


def test_a_model_under_a_false_name_lists_what_it_has_beyond(tmp_path: Path) -> None:
    """The keys of another architecture, by overrides."""
    path = write_tiny(tmp_path / "m.gguf", "gemma3")
    numbers = tuple(Override(f"llama.{k}", "int", n) for k, n in GEMMA_AS_LLAMA.items())
    eps = Override("llama.attention.layer_norm_rms_epsilon", "float", 1e-5)
    name = Override("general.architecture", "str", "llama")
    with pytest.raises(
        ModelError,
        match="16 tensors are unknown to the architecture 'llama'.*\n.*"
        "blk.0.attn_k_norm.weight, blk.0.attn_q_norm.weight",
    ):
        load_model(path, ModelParams(overrides=(*numbers, eps, name)), devices=[DEVICE])


GEMMA_AS_LLAMA = {
    "block_count": 4,
    "embedding_length": 128,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "context_length": 64,
    "feed_forward_length": 160,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"feed_forward_length": 96},
            r"'blk.0.ffn_gate.weight' has wrong shape; expected \[128, 96\], got \[128, 160\]",
        ),
        ({"embedding_length": 96}, r"'token_embd.weight' has wrong shape; expected \[96, 300\]"),
        ({"attention.head_count_kv": 3}, r"'blk.0.attn_k.weight' .* \[128, 96\], got \[128, 64\]"),
        ({"block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"block_count": 1}, "9 tensors are unknown to the architecture 'llama'"),
        ({"attention.key_length": 2**31}, "must be the head size 2147483648"),
    ],
)
def test_numbers_that_contradict_the_tensors(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tiny_model(tmp_path / "m.gguf", metadata=change)
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: ")


class NoQ8(RefDevice):
    """Cannot multiply q8_0."""

    def supports_op(self, node: Tensor) -> bool:
        used = [s.type for s in node.src if s is not None]
        return GGMLType.Q8_0 not in used and super().supports_op(node)


def test_a_type_that_no_device_can_use(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", types={"ffn_down": "Q8_0"})
    with pytest.raises(ModelError, match="'blk.0.ffn_down.weight' is q8_0, which no device can"):
        load_model(path, devices=[NoQ8()])


# ---------------------------------------------------------------- metadata
def test_an_unknown_architecture(tmp_path: Path) -> None:
    metadata(tmp_path / "m.gguf", keys("mamba"))
    with pytest.raises(ModelError, match="unknown model architecture: 'mamba'\nknown are: .*llama"):
        load_model(tmp_path / "m.gguf", devices=[DEVICE])


def test_bad_numbers_name_the_file(tmp_path: Path) -> None:
    metadata(tmp_path / "m.gguf", keys(block_count=0))
    with pytest.raises(ModelError, match=f"^{tmp_path / 'm.gguf'}: llama.block_count is 0"):
        load_model(tmp_path / "m.gguf", devices=[DEVICE])


def test_a_model_without_a_vocabulary(tmp_path: Path) -> None:
    metadata(tmp_path / "m.gguf", keys())
    with pytest.raises(ModelError, match="m.gguf: key not found in model: tokenizer.ggml.model"):
        load_model(tmp_path / "m.gguf", devices=[DEVICE])


def test_no_file() -> None:
    with pytest.raises(GgufError, match="nowhere.gguf: no such file"):
        load_model("nowhere.gguf", devices=[DEVICE])


def test_overrides_change_what_the_model_is_read_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    overrides = (parse_override("llama.context_length=int:77"),)
    model = tiny_model(tmp_path / "m.gguf", params=ModelParams(overrides=overrides))
    assert model.hparams.n_ctx_train == 77
    assert "using metadata override (  int) 'llama.context_length' = 77" in caplog.text


def test_an_override_can_break_the_model_and_is_told_so(tmp_path: Path) -> None:
    overrides = (parse_override("llama.rope.freq_base=float:-1"),)
    with pytest.raises(ModelError, match=r"m.gguf: llama.rope.\*: freq_base is -1"):
        tiny_model(tmp_path / "m.gguf", params=ModelParams(overrides=overrides))


def test_an_unknown_load_mode() -> None:
    with pytest.raises(ConfigError, match="--load-mode fast: one of auto, none, mmap, mlock"):
        ModelParams(load_mode="fast")


# ---------------------------------------------------------------- damaged data
NAN16, INF16 = struct.pack("<H", 0x7E00), struct.pack("<H", 0x7C00)


@pytest.mark.parametrize(
    ("weight_type", "at", "raw", "block"),
    [
        ("F32", 4 * 1000, struct.pack("<f", np.nan), "1,000"),
        ("F16", 2 * 77, INF16, "77"),
        ("BF16", 2 * 3, struct.pack("<H", 0x7F80), "3"),
        ("Q4_0", 18 * 9, NAN16, "9"),
        ("Q8_0", 34 * 0, INF16, "0"),
        ("Q4_K", 144 * 5 + 2, NAN16, "5"),
    ],
)
def test_check_tensors_names_tensor_and_block(
    tmp_path: Path, weight_type: str, at: int, raw: bytes, block: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type=weight_type)
    check = ModelParams(check_tensors=True)
    load_model(path, check, devices=[DEVICE]).close()
    corrupt(path, "blk.1.ffn_up.weight", at, raw)
    with pytest.raises(ModelError) as caught:
        load_model(path, check, devices=[DEVICE])
    assert str(caught.value) == (
        f"{path}: tensor 'blk.1.ffn_up.weight' holds invalid data (NaN or infinity) in block "
        f"{block}: the file is damaged, download it again"
    )
    load_model(path, devices=[DEVICE]).close()  # not asked, not checked


# ---------------------------------------------------------------- ways to load
class Mapping(RefDevice):
    """Takes host memory as it is, and counts the bytes it allocates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = self.allocated = 0
        self._buft = CountingBufferType(self)
        self.caps = type(self.caps)(buffer_from_host_ptr=True)

    def buffer_from_host_ptr(self, address: int, size: int, owner: object) -> Buffer:
        self.mapped += size
        return Mapped(self._buft, address, size)


class Mapped(Buffer):
    def __init__(self, buft: BufferType, address: int, size: int) -> None:
        self.buft, self.base, self.size = buft, address, size

    def set(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        raise AssertionError("a mapped file is read-only")

    def get(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        raise AssertionError("nobody reads weights back")

    def clear(self, value: int = 0) -> None:
        raise AssertionError("a mapped file is read-only")


class CountingBufferType(RefBufferType):
    def __init__(self, device: Mapping) -> None:
        super().__init__(device)
        self.counter = device

    def alloc_buffer(self, size: int) -> RefBuffer:
        self.counter.allocated += size
        return super().alloc_buffer(size)


@pytest.mark.parametrize(
    ("load_mode", "maps", "locks"),
    [
        ("auto", True, False),
        ("mmap", True, False),
        ("none", False, False),
        ("mlock", False, True),
        ("mmap+mlock", True, True),
    ],
)
def test_every_load_mode_gives_the_same_model(
    tmp_path: Path, load_mode: str, maps: bool, locks: bool
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", omit=("output",))
    expected = logits(load_model(path, devices=[DEVICE]))
    device = Mapping()
    model = load_model(path, ModelParams(load_mode=load_mode), devices=[device])
    total = model.nbytes
    if maps:
        assert device.allocated == 0 and total <= device.mapped < total + 2048
    else:
        # a tied output is loaded a second time, as it may need another layout
        twice = model.gguf.tensors["token_embd.weight"].nbytes
        assert device.mapped == 0 and total + twice <= device.allocated < total + twice + 2048
    # the system may refuse to lock
    assert model.lock.nbytes in ((0, device.mapped + device.allocated) if locks else (0,))
    np.testing.assert_array_equal(logits(model), expected)
    model.close()
    assert model.lock.nbytes == 0


def test_memory_that_cannot_be_locked_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    lock = MemoryLock()
    lock.lock(4096, 1 << 60)
    lock.lock(4096, 1 << 60)
    lock.lock(0, 0)
    assert lock.nbytes == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "raise the limit with `ulimit -l`" in caplog.text
    lock.release()


def test_a_device_without_mapping_turns_auto_off(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    device = Mapping()
    device.caps = type(device.caps)(buffer_from_host_ptr=True, mmap_support=False)
    load_model(path, devices=[device]).close()
    assert device.mapped == 0 < device.allocated


@pytest.mark.parametrize("load_mode", ["mmap", "none"])
def test_a_split_model_is_the_same_model(tmp_path: Path, load_mode: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen2")
    expected = logits(load_model(path, devices=[DEVICE]))
    parts = split(path, 4)
    device = Mapping()
    model = load_model(parts[0], ModelParams(load_mode=load_mode), devices=[device])
    assert len(model.gguf.parts) == 4
    assert (device.mapped > 0) is (load_mode == "mmap")
    np.testing.assert_array_equal(logits(model), expected)


def test_tensors_that_lie_badly_in_the_file_are_copied(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    expected = logits(load_model(path, devices=[DEVICE]))
    pairs, tensors = contents(path)
    odd = RawGguf([*pairs, u32("general.alignment", 16)], tensors, alignment=16)
    if len(odd.padded(odd.header())) % 32 == 0:
        odd.pairs.append(u32("filler", 0))  # 22 bytes
    path.write_bytes(odd.build())
    with open_gguf(path) as gguf:
        assert {t.offset % 32 for t in gguf.tensors.values()} == {16}
    device = Mapping()
    model = load_model(path, devices=[device])
    assert device.mapped == 0
    np.testing.assert_array_equal(logits(model), expected)


# ---------------------------------------------------------------- progress, cancelling, memory
def test_progress_grows_to_one(tmp_path: Path) -> None:
    seen: list[float] = []

    def progress(share: float) -> bool:
        seen.append(share)
        return True

    path = write_tiny(tmp_path / "m.gguf", "llama", omit=("output",))
    load_model(path, progress=progress, devices=[DEVICE]).close()
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 10


def open_files() -> set[str]:
    links = Path("/proc/self/fd").iterdir()
    return {str(link.readlink()) for link in links if link.is_symlink()}


def test_a_cancelled_load_leaves_nothing_open_or_allocated(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    device = Limited()
    with pytest.raises(LoadCancelled):
        load_model(path, progress=lambda share: share < 0.5, devices=[device])
    assert device.live == 0
    assert str(path) not in open_files()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: corrupt(path, "output.weight", 0, struct.pack("<f", np.nan)),
        lambda path: None,
    ],
)
def test_failed_loads_leave_nothing_either(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    spoil(path)
    device = Limited(1_000_000)  # the weights take 1.3 MB
    with pytest.raises((ModelError, OutOfMemory)):
        load_model(path, ModelParams(check_tensors=True), devices=[device])
    assert device.live == 0
    assert str(path) not in open_files()


# ---------------------------------------------------------------- what loading tells
def repacking(path: Path, caplog: pytest.LogCaptureFixture, **params: Any) -> str:
    """The line that tells how weights lie."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    load_model(path, ModelParams(**params), devices=[CpuDevice()]).close()
    (line,) = [m for m in caplog.messages if m.startswith("repacking: ")]
    return line


def test_the_log_tells_what_repacking_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q8_0", n_layer=2)
    with open_gguf(path) as gguf:
        products = [
            t
            for t in gguf.tensors.values()
            if t.type == GGMLType.Q8_0 and t.name != "token_embd.weight"
        ]
    found = re.fullmatch(
        r"repacking: (\d+) tensors into CPU_REPACK, ([\d.]+) MiB in [\d.]+ s, [\d.]+ GB/s",
        repacking(path, caplog),
    )
    assert found is not None and int(found[1]) == len(products)
    assert float(found[2]) == pytest.approx(sum(t.nbytes for t in products) / 2**20, abs=0.01)


def test_the_log_tells_where_rows_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q8_0")
    off = "repacking: off, rows are read from "
    assert repacking(path, caplog, repack=False) == off + "the file's mapping"
    assert repacking(path, caplog, repack=False, load_mode="none") == off + "plain memory"
    floats = write_tiny(tmp_path / "f.gguf", "llama", weight_type="F32")
    assert repacking(floats, caplog).startswith("repacking: no weight is, rows are read from ")


def test_kernels_are_compiled_before_the_clock_of_repacking_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice()
    path = write_tiny(tmp_path / "m.gguf", "llama", weight_type="Q8_0")
    order: list[str] = []
    addresses, perf_counter = device.library.addresses, time.perf_counter

    def asked(names: Any, *rest: Any) -> dict[str, int]:
        order.extend(n for n in ("repack_q8_0",) if n in names)
        return addresses(names, *rest)

    def clock() -> float:
        order.append("clock")
        return perf_counter()

    monkeypatch.setattr(device.library, "addresses", asked)
    monkeypatch.setattr(time, "perf_counter", clock)
    load_model(path, devices=[device]).close()
    assert order[:3] == ["clock", "repack_q8_0", "clock"]
