"""Types of cached keys and values beside real llama.cpp: distributions, rotation, shifts, depth.

A quantized cache moves a model away from exact arithmetic, and two programs by the same amount in
the same direction if they store the same bytes. What is left between them comes from attention:
llama.cpp also rounds the query to the partner type of the keys (Q8_0, F16 or BF16) and adds values
of F16 up in F16, ours computes in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import divergence
import gguf
import numpy as np
import pytest
from exact import Exact, kl, log_softmax
from oracle import LlamaCpp
from texts import TEXTS
from tiny import ARCHS, WIDE, write_tiny
from tiny_llama import logits_after_cut

from pyggml.backends.reference.device import RefDevice
from pyggml.errors import UserError
from pyggml.llama import Llama, load
from pyggml.llama.batch import Batch
from pyggml.llama.context_params import CACHE_TYPES
from pyggml.llama.kv_cache import hadamard
from pyggml.tools.flag import CACHE_TYPES as CHOICES

Pair = tuple[str, str]

# every type on both sides, equal and mixed
FLASH: tuple[Pair, ...] = (
    *(("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_1", "iq4_nl"), ("iq4_nl", "q5_1"), ("q5_0", "q4_1")),
    *(("q5_1", "q5_0"), ("bf16", "bf16"), ("f32", "q4_0"), ("f16", "f32"), ("q8_0", "f16")),
)
# without flash attention values are stored transposed, which blocks cannot be
PLAIN: tuple[Pair, ...] = (
    *(("q8_0", "f16"), ("q4_0", "f32"), ("q4_1", "f32"), ("q5_0", "bf16"), ("q5_1", "f16")),
    *(("iq4_nl", "f32"), ("bf16", "f32")),
)
SETTINGS = [*((*pair, "on") for pair in FLASH), *((*pair, "off") for pair in PLAIN)]
FINE = {"f32": 5e-6, "f16": 5e-6, "bf16": 5e-5, "q8_0": 3e-4}  # mean KL, three times the measured
COARSE = 0.15  # of llama.cpp's own distance from exact arithmetic; measured: 0.05

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads64": ("llama", WIDE),  # rotated
    "heads32": ("gemma3", {}),  # too small for it; sliding windows
    "heads128": ("llama", {"head_dim": 128, "n_layer": 1}),
    "heads192": ("llama", {"head_dim": 192, "n_layer": 1}),
    "heads256": ("qwen3", {"head_dim": 256, "n_layer": 1}),
}
Models = Callable[[str], Path]
prompt = functools.partial(divergence.prompt, 300)  # of n ids


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("cache")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        arch, dims = MODELS[name]
        return path if path.exists() else write_tiny(path, arch, **dims)

    return get


def pyggml(path: Path, pair: Pair, flash_attn: str = "on", **params: Any) -> Llama:
    options = {"n_ctx": 256, "n_threads": 2, "flash_attn": flash_attn, **params}
    return load(path, type_k=pair[0], type_v=pair[1], **options)


def llama_cpp(path: Path, pair: Pair, flash_attn: str = "on", n_ctx: int = 256) -> LlamaCpp:
    types, wanted = (pair[0].upper(), pair[1].upper()), {"on": True, "off": False}.get(flash_attn)
    return LlamaCpp(path, n_ctx=n_ctx, kv_type=types, flash_attention=wanted)


def limit(pair: Pair, from_exact: float) -> float:
    """How far ours may be from llama.cpp, itself `from_exact` away from exact arithmetic."""
    if set(pair) <= set(FINE):
        return max(FINE[t] for t in pair)
    return COARSE * from_exact


# ---------------------------------------------------------------- distributions
@pytest.mark.parametrize(("type_k", "type_v", "flash_attn"), SETTINGS)
@pytest.mark.parametrize("model", ["heads64", "heads32"])
def test_distributions_are_llama_cpps(
    model: str, type_k: str, type_v: str, flash_attn: str, models: Models
) -> None:
    path, pair, ids = models(model), (type_k, type_v), prompt(100)
    with pyggml(path, pair, flash_attn) as ours, llama_cpp(path, pair, flash_attn) as theirs:
        mine, other = ours.logits(ids, all=True), theirs.logits(ids)
    from_exact = kl(Exact(path).logits(ids), other).mean()
    assert kl(other, mine).mean() < limit(pair, from_exact)


def test_every_type_is_tested_and_offered() -> None:
    tested = {t for t, _, _ in SETTINGS}, {t for _, t, _ in SETTINGS}
    assert tested == (set(CACHE_TYPES), set(CACHE_TYPES))
    assert tuple(CACHE_TYPES) == CHOICES


def test_real_model_is_not_further_from_exact_than_llama_cpp(smollm2: Path) -> None:
    """The weights' rounding differs too, so the two are compared through the exact forward."""
    exact = Exact(smollm2)
    with load(smollm2) as llama:
        prompts = [llama.tokenize(text)[:25] for text in TEXTS[:4]]
    expected = [log_softmax(exact.logits(ids)) for ids in prompts]
    for pair in (("q8_0", "q8_0"), ("q4_0", "q5_1"), ("f16", "iq4_nl")):
        with pyggml(smollm2, pair) as ours, llama_cpp(smollm2, pair) as theirs:
            more = np.concatenate(
                [
                    kl(p, ours.logits(ids, all=True)) - kl(p, theirs.logits(ids))
                    for p, ids in zip(expected, prompts, strict=True)
                ]
            )
        assert more.mean() < 2 * more.std() / len(more) ** 0.5, pair


@pytest.mark.parametrize("model", ["heads64", "heads32"])
def test_the_reference_device_stores_the_same(model: str, models: Models) -> None:
    path, pair, ids = models(model), ("q5_1", "iq4_nl"), prompt(40)
    with pyggml(path, pair) as ours, pyggml(path, pair, devices=[RefDevice()]) as reference:
        found, expected = ours.logits(ids, all=True), reference.logits(ids, all=True)
    # a value on the edge between two levels may fall to either
    assert kl(expected, found).mean() < 1e-4


# ---------------------------------------------------------------- rotation
@pytest.mark.parametrize("model", ["heads128", "heads192", "heads256"])
def test_heads_are_rotated_as_in_llama_cpp(model: str, models: Models) -> None:
    path, pair, ids = models(model), ("q4_0", "q4_0"), prompt(60)
    with pyggml(path, pair) as ours, llama_cpp(path, pair) as theirs:
        mine, other = ours.logits(ids, all=True), theirs.logits(ids)
    assert kl(other, mine).mean() < limit(pair, kl(Exact(path).logits(ids), other).mean())


def test_rotation_can_be_switched_off(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pair, ids = models("heads64"), ("q4_0", "q4_0"), prompt(60)
    with pyggml(path, pair) as ours:
        rotated = ours.logits(ids, all=True)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    with pyggml(path, pair) as ours, llama_cpp(path, pair) as theirs:
        mine, other = ours.logits(ids, all=True), theirs.logits(ids)
    allowed = limit(pair, kl(Exact(path).logits(ids), other).mean())
    assert kl(other, mine).mean() < allowed < kl(other, rotated).mean()


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_values_in_keys_are_not_rotated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deepseek2 with heads of 192, which other models would rotate."""
    row = ARCHS["deepseek2"]
    sizes = {**row.sizes, "n_lora_kv": "128", "n_rot": "64", "head_dim": "96"}
    monkeypatch.setitem(ARCHS, "deepseek2", replace(row, sizes=sizes))
    path, ids = write_tiny(tmp_path / "m.gguf", "deepseek2"), prompt(60)
    with LlamaCpp(path, n_ctx=256) as exact, llama_cpp(path, (name, name)) as theirs:
        expected, other = exact.logits(ids), theirs.logits(ids)
    with pyggml(path, (name, name)) as ours:
        mine = ours.logits(ids, all=True)
    assert kl(other, mine).mean() < max(2e-3, COARSE * kl(expected, other).mean())
    assert kl(expected, mine).mean() < 1.2 * kl(expected, other).mean()
    said = f"--cache-type-k {name}, --cache-type-v f16: .* give both the same type"
    with pytest.raises(ValueError, match="makes no context"):
        llama_cpp(path, (name, "f16"))
    with pytest.raises(UserError, match=said), pyggml(path, (name, "f16")) as ours:
        ours.context()


@pytest.mark.parametrize("n", [64, 256])
def test_the_rotation_is_its_own_inverse(n: int) -> None:
    np.testing.assert_allclose(hadamard(n) @ hadamard(n), np.eye(n), atol=1e-6)


# ---------------------------------------------------------------- shifted positions
@pytest.mark.parametrize(
    ("pair", "flash_attn"),
    [(("q8_0", "q8_0"), "on"), (("iq4_nl", "f16"), "off"), (("q5_1", "q4_0"), "on")],
)
@pytest.mark.parametrize("model", ["heads64", "heads192"])
def test_shifted_keys_are_llama_cpps(
    model: str, pair: Pair, flash_attn: str, models: Models
) -> None:
    path, ids, more = models(model), prompt(40), prompt(9)
    with llama_cpp(path, pair, flash_attn) as theirs:
        other = theirs.logits_after_cut(ids, 5, 18, more)
    with pyggml(path, pair, flash_attn) as ours:
        mine = logits_after_cut(ours.context(), ids, 5, 18, more)
    assert kl(other, mine).mean() < (2e-4 if pair[0] == "q8_0" else 2e-3)


# ---------------------------------------------------------------- long contexts
DEPTH = 1300  # more than two of the segments that attention is cut into
DEEP = [
    *((*pair, "on") for pair in FLASH),
    *(
        ("f16", "f16", "on"),
        ("q8_0", "f16", "off"),
        ("q4_1", "f32", "off"),
        ("bf16", "bf16", "off"),
    ),
]


@pytest.mark.parametrize(("type_k", "type_v", "flash_attn"), DEEP)
def test_depth_threads_and_ubatches_do_not_change_bits(
    type_k: str, type_v: str, flash_attn: str, models: Models
) -> None:
    """A token at depth: alone on 1 to 3 threads (keys in pieces), or at the end of a batch."""
    path, ids = models("heads64"), prompt(DEPTH)
    found = []
    for n_threads, n_ubatch, cut in ((2, 512, DEPTH - 1), (1, 256, DEPTH - 1), (3, 300, 1100)):
        options = {"n_ctx": 1536, "n_threads": n_threads, "n_ubatch": n_ubatch}
        with pyggml(path, (type_k, type_v), flash_attn, **options) as llama:
            context = llama.context()
            context.decode(Batch.of(ids[:cut], 0))
            context.decode(Batch.of(ids[cut:], cut))
            found.append(context.logits().tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("pair", [("f16", "f16"), ("bf16", "f32"), ("f32", "bf16")])
def test_flash_attention_at_depth_is_plain_attention(pair: Pair, models: Models) -> None:
    path, ids, found = models("heads64"), prompt(DEPTH), []
    for flash_attn in ("on", "off"):
        with pyggml(path, pair, flash_attn, n_ctx=1536) as llama:
            found.append(llama.logits(ids))
    np.testing.assert_allclose(*found, atol=1e-4)


@pytest.mark.parametrize("pair", [("q8_0", "q8_0"), ("q4_1", "iq4_nl")])
def test_depth_is_llama_cpps(pair: Pair, models: Models) -> None:
    path, ids = models("heads64"), prompt(DEPTH)
    with pyggml(path, pair, n_ctx=1536) as ours, llama_cpp(path, pair, n_ctx=1536) as theirs:
        mine, other = ours.logits(ids, all=True)[-50:], theirs.logits(ids)[-50:]
    with pyggml(path, ("f32", "f32"), "off", n_ctx=1536) as exact:
        from_exact = kl(exact.logits(ids, all=True)[-50:], other).mean()
    assert kl(other, mine).mean() < limit(pair, from_exact)


# ---------------------------------------------------------------- memory, and what is refused
@pytest.mark.parametrize("name", CACHE_TYPES)
def test_the_bytes_of_a_cache(name: str, models: Models, caplog: pytest.LogCaptureFixture) -> None:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    row = WIDE["n_head_kv"] * WIDE["head_dim"]
    k, v = (2 * 256 * row * size // count for size, count in ((nbytes, values), (2, 1)))
    with (
        caplog.at_level("INFO", "pyggml.context"),
        pyggml(models("heads64"), (name, "f16")) as ours,
    ):
        memory = ours.context().memory
        assert memory.nbytes == k + v
        [buffer] = memory.caches[0].buffers
        assert k + v <= buffer.size < k + v + 4096
    mib = 1 << 20
    assert f"KV buffer size = {(k + v) / mib:8.2f} MiB" in caplog.text
    assert f"K ({name}): {k / mib:7.2f} MiB, V (f16): {v / mib:7.2f} MiB" in caplog.text


@pytest.mark.parametrize(
    ("head_dim", "pair", "flash_attn", "message"),
    [
        (64, ("f16", "q8_0"), "off", "--cache-type-v q8_0: quantized values need flash attention"),
        (48, ("q4_0", "f16"), "on", "--cache-type-k q4_0: its blocks of 32 values do not divide"),
        (48, ("f16", "iq4_nl"), "auto", "--cache-type-v iq4_nl: .* the model's heads of 48"),
    ],
)
def test_what_llama_cpp_refuses_is_refused(
    head_dim: int, pair: Pair, flash_attn: str, message: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", head_dim=head_dim)
    with pytest.raises(ValueError, match="makes no context"):
        llama_cpp(path, pair, flash_attn)
    said = f"{message}.* use f16, bf16 or f32"
    with pytest.raises(UserError, match=said), pyggml(path, pair, flash_attn) as ours:
        ours.context()


def test_auto_turns_flash_attention_on_for_quantized_values(models: Models) -> None:
    with pyggml(models("heads64"), ("f16", "q4_0"), "auto") as ours:
        assert ours.context().flash_attn
