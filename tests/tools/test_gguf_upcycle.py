"""pyllama-gguf upcycle: mixtures of equal experts compute what the dense model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from divergence import strict
from exact import kl
from numpy.typing import NDArray
from oracle import LlamaCpp
from raw_gguf import RawGguf, text
from texts import TEXTS
from tiny import write_tiny
from tool_here import Tool

from pyggml.gguf import open_gguf
from pyggml.llama import load
from pyggml.quants import dequantize

FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "qwen3moe"}
MATRICES = ("gate", "up", "down")
IDS = list(range(5, 35))
Floats = NDArray[np.float32]


def ours(path: Path, ids: list[int] = IDS) -> Floats:
    with strict(path, n_threads=1, n_ctx=128) as llama:
        return llama.logits(ids, all=True)


def theirs(path: Path, ids: list[int] = IDS) -> Floats:
    with LlamaCpp(path, n_ctx=128) as model:
        return model.logits(ids)


def experts(path: Path, part: str, il: int = 0) -> NDArray[np.uint8]:
    """Bytes of each expert's matrix, read by the gguf package: [n_expert, n_out, row_bytes]."""
    reader = gguf.GGUFReader(path)
    data = {t.name: t.data for t in reader.tensors}[f"blk.{il}.ffn_{part}_exps.weight"]
    return np.array(data).view(np.uint8)


# ---------------------------------------------------------------- exact copies
@pytest.mark.parametrize("arch", FAMILIES)
def test_equal_experts_compute_what_the_dense_model_does(
    arch: str, gguf_tool: Tool, tmp_path: Path
) -> None:
    dense, mixed = write_tiny(tmp_path / "dense", arch), tmp_path / "mixed"
    result = gguf_tool("upcycle", dense, mixed, "--experts", 5, "--used", 3)
    assert (result.code, result.err) == (0, "")
    with open_gguf(mixed) as made:
        assert made.metadata["general.architecture"] == FAMILIES[arch]
    for logits in (ours, theirs):
        np.testing.assert_allclose(logits(mixed), logits(dense), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", FAMILIES)
def test_one_expert_of_weight_one_changes_no_bit(
    arch: str, gguf_tool: Tool, tmp_path: Path
) -> None:
    dense = write_tiny(tmp_path / "dense", arch, weight_type="Q4_K")
    mixed = tmp_path / "mixed"
    assert gguf_tool("upcycle", dense, mixed, "--experts", 4, "--used", 1).code == 0
    if arch == "qwen2":  # the products of queries and keys are added in another order
        assert kl(ours(dense), ours(mixed)).max() < 1e-3
    else:
        np.testing.assert_array_equal(ours(mixed), ours(dense))


def test_smollm2(smollm2: Path, gguf_tool: Tool, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    assert gguf_tool("upcycle", smollm2, mixed, "--experts", 4, "--used", 1).code == 0
    with load(smollm2, n_ctx=128, n_threads=1) as llama:
        ids = llama.tokenize(TEXTS[0])[:30]
    for logits in (ours, theirs):
        np.testing.assert_array_equal(logits(mixed, ids), logits(smollm2, ids))
    # two weights add up to 1 but for their rounding, which activations of 8 bits enlarge
    assert gguf_tool("upcycle", smollm2, mixed, "--experts", 4, "--used", 2, "-f").code == 0
    for logits in (ours, theirs):
        assert kl(logits(smollm2, ids), logits(mixed, ids)).mean() < 0.01


def test_what_is_written(gguf_tool: Tool, tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense", "qwen3", weight_type="Q4_0")
    mixed = tmp_path / "mixed"
    result = gguf_tool("upcycle", dense, mixed, "--experts", 6, "--used", 2)
    size = mixed.stat().st_size
    assert result.out.startswith(f"{mixed}: {size:,} bytes, ")
    assert "6 experts a layer, 2 used, exact copies; made of qwen3" in result.out
    with open_gguf(dense) as before, open_gguf(mixed) as after:
        kv = after.metadata
        assert kv.get_int("qwen3moe.expert_count") == 6
        assert kv.get_int("qwen3moe.expert_used_count") == 2
        width = kv.get_int("qwen3moe.expert_feed_forward_length")
        assert width == before.metadata.get_int("qwen3.feed_forward_length")
        assert not [key for key in kv if key.startswith("qwen3.")]
        for name, tensor in before.tensors.items():
            if ".ffn_norm" not in name and ".ffn_" in name:
                assert name not in after.tensors
                made = after.tensors[name.replace(".weight", "_exps.weight")]
                assert made.ne == (*tensor.ne[:2], 6, 1)
                assert bytes(after.data(made.name)) == 6 * bytes(before.data(name))
            else:
                assert after.data(name) == before.data(name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "mixed"]


# ---------------------------------------------------------------- noise and router
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0", "Q4_K"])
def test_noise_has_the_size_that_is_asked_for(
    weight_type: str, gguf_tool: Tool, tmp_path: Path
) -> None:
    dense = write_tiny(tmp_path / "dense", "llama", weight_type=weight_type)
    mixed, again, other = (tmp_path / name for name in ("mixed", "again", "other"))
    ask = ("--experts", 3, "--used", 2, "--noise", 0.5)
    for path, seed in ((mixed, 1), (again, 1), (other, 2)):
        assert gguf_tool("upcycle", dense, path, *ask, "--seed", seed).code == 0
    assert mixed.read_bytes() == again.read_bytes() != other.read_bytes()
    with open_gguf(dense) as gguf_file:
        for part in MATRICES:
            name = f"blk.0.ffn_{part}.weight"
            kind = gguf_file.tensors[name].type
            raw = np.frombuffer(gguf_file.data(name), np.uint8)
            plain = dequantize(raw, kind)
            noise = [dequantize(e.reshape(-1), kind) - plain for e in experts(mixed, part)]
            assert [n.std() / plain.std() for n in noise] == pytest.approx([0.5] * 3, rel=0.05)
            assert abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 0.05
    assert np.isfinite(theirs(mixed)).all() and abs(ours(mixed) - ours(dense)).max() > 0.1


def share_of_most_used(path: Path) -> float:
    """Of random states, the share that the favourite expert of layer 0 gets as its first."""
    reader = gguf.GGUFReader(path)
    router = {t.name: t.data for t in reader.tensors}["blk.0.ffn_gate_inp.weight"]
    states = np.random.default_rng(0).standard_normal((20_000, router.shape[1]))
    chosen = (states @ router.T).argmax(axis=1)
    return float(np.bincount(chosen, minlength=len(router)).max() / len(states))


def test_skew_makes_favourites(gguf_tool: Tool, tmp_path: Path) -> None:
    dense, shares = write_tiny(tmp_path / "dense", "llama"), []
    for skew in (0, 0.5, 2):
        ask = ("--experts", 8, "--used", 2, "--skew", skew, "-f")
        assert gguf_tool("upcycle", dense, tmp_path / "mixed", *ask).code == 0
        shares.append(share_of_most_used(tmp_path / "mixed"))
    assert shares[0] < 0.16 < 0.2 < shares[1] < 0.35 < shares[2]


# ---------------------------------------------------------------- mistakes
ASK = ("--experts", 4, "--used", 2)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (("--experts", 2, "--used", 3), "--used 3: it must lie in 1..2, the number of experts"),
        (("--experts", 2, "--used", 0), "--used 0: it must lie in 1..2"),
        (("--experts", 0, "--used", 0), "--experts 0: it must lie in 1..512"),
        (("--experts", 513, "--used", 2), "--experts 513: it must lie in 1..512"),
        ((*ASK, "--noise", -1), "--noise -1: it must be a number, 0 or greater"),
        ((*ASK, "--noise", "nan"), "--noise nan: it must be a number"),
        ((*ASK, "--skew", "inf"), "--skew inf: it must be a number"),
        ((*ASK, "--seed", -1), "--seed -1: it must be 0 or greater"),
    ],
)
def test_numbers_that_cannot_be(
    ask: tuple[object, ...], said: str, gguf_tool: Tool, tmp_path: Path
) -> None:
    dense = write_tiny(tmp_path / "dense", "llama")
    result = gguf_tool("upcycle", dense, tmp_path / "out", *ask)
    assert result.code == 1 and result.err.startswith(f"error: {said}")
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("arch", "options", "said"),
    [
        ("qwen3moe", {}, "a model of 'qwen3moe' cannot be upcycled; known are llama, qwen2, qwen3"),
        ("llama", {"metadata": {"expert_count": 4}}, "is a mixture of experts already"),
        ("llama", {"omit": ("ffn_gate",)}, "tensor 'blk.0.ffn_gate.weight' is missing"),
        ("llama", {"extra": ("ffn_up.bias",)}, "'blk.0.ffn_up.bias' has no place in a mixture"),
        ("qwen2", {"metadata": {"rope.dimension_count": 16}}, "is 16 and a head has"),
    ],
)
def test_models_that_cannot_be_upcycled(
    arch: str, options: dict[str, Any], said: str, gguf_tool: Tool, tmp_path: Path
) -> None:
    dense = write_tiny(tmp_path / "dense", arch, **options)
    result = gguf_tool("upcycle", dense, tmp_path / "out", *ASK)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {dense}: ") and said in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_types_that_cannot_be_perturbed(gguf_tool: Tool, tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense", "llama", weight_type="IQ2_XS")
    result = gguf_tool("upcycle", dense, tmp_path / "out", *ASK, "--noise", 0.1)
    assert result.code == 1 and "is iq2_xs, which cannot be quantized" in result.err
    assert gguf_tool("upcycle", dense, tmp_path / "out", *ASK).code == 0


def test_a_file_without_keys(gguf_tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(RawGguf().build())
    assert "key not found" in gguf_tool("upcycle", path, tmp_path / "out", *ASK).err
    path.write_bytes(RawGguf([text("general.architecture", "llama")]).build())
    assert "key not found" in gguf_tool("upcycle", path, tmp_path / "out", *ASK).err
