"""Mistakes in choosing experts show in F32, although experts are near relatives.

The experts of tiny models differ by EXPERT_SPREAD (tiny_arch.py). Here one model of each kind
makes one mistake and is compared with llama.cpp, which makes none: the distance is far above the
1e-6 that test_architectures.py allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from divergence import divergences, reference, strict
from oracle import LlamaCpp
from raw_gguf import RawGguf, RawTensor
from tiny import ARCHS, VARIANTS, write_tiny
from tiny_llama import contents

Mistake = Callable[[str, Path, Path], None]  # variant, file, what the wrong model reads instead
MIXTURES = [arch for arch, row in ARCHS.items() if row.has_experts]
BALANCED = [arch for arch in MIXTURES if "exp_probs_b.bias" in ARCHS[arch].layer]


def exchanged(tensor: RawTensor) -> RawTensor:
    """The first two experts change places, but not their rows of the router."""
    if "_exps." not in str(tensor.name):
        return tensor
    data = tensor.payload()
    n = len(data) // tensor.ne[-1]
    return replace(tensor, data=data[n : 2 * n] + data[:n] + data[2 * n :])


def unbalanced(tensor: RawTensor) -> RawTensor:
    """Nothing is added to the scores."""
    is_balance = "exp_probs_b" in str(tensor.name)
    return replace(tensor, data=bytes(len(tensor.payload()))) if is_balance else tensor


def tensors(change: Callable[[RawTensor], RawTensor]) -> Mistake:
    """Other tensors than the file has."""

    def make(variant: str, right: Path, wrong: Path) -> None:
        pairs, found = contents(right)
        wrong.write_bytes(RawGguf(pairs, [change(tensor) for tensor in found]).build())

    return make


def key(name: str, value: int) -> Mistake:
    """Another number than the file says."""

    def make(variant: str, right: Path, wrong: Path) -> None:
        arch, options = VARIANTS[variant]
        numbers = {**options.get("metadata", {}), name: value}
        write_tiny(wrong, arch, **{**options, "metadata": numbers})

    return make


MISTAKES: dict[str, tuple[Mistake, list[str]]] = {
    "exchanged": (tensors(exchanged), [*MIXTURES, "llama-experts"]),
    "one more": (key("expert_used_count", 4), MIXTURES),
    "unbalanced": (tensors(unbalanced), [*BALANCED, "deepseek2-v3"]),
    "all groups": (key("expert_group_count", 0), ["bailingmoe2", "dots1-groups", "deepseek2-v3"]),
}


@pytest.mark.parametrize(
    ("mistake", "variant"),
    [(name, variant) for name, (_, variants) in MISTAKES.items() for variant in variants],
)
def test_a_mistake_is_seen(mistake: str, variant: str, tmp_path: Path) -> None:
    arch, options = VARIANTS[variant]
    right = write_tiny(tmp_path / "right.gguf", arch, **options)
    with LlamaCpp(right) as theirs:
        expected = reference(theirs)
    make, _ = MISTAKES[mistake]
    make(variant, right, tmp_path / "wrong.gguf")
    with strict(tmp_path / "wrong.gguf") as ours:
        found = divergences(ours, expected)
    assert found.mean() > 1e-5 and found.max() > 1e-4
