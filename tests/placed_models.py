"""Tiny models on simulated cards or on ones that only hold things: what lies where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes import FakeDevice, cpu
from simulated import simulation
from tiny import write_tiny

from pyggml.backend import buffer_of
from pyggml.llama import load
from pyggml.llama.api import Llama
from pyggml.llama.loader import Model, ModelParams, load_model
from pyggml.llama.placement_params import PlacementParams

N_LAYER = 12  # of the model with experts
MIB = 1 << 20
FIXED = {"n_ctx": 256, "warmup": False, "fit": False, "n_threads": 1, "flash_attn": "off"}


def write_dense(path: Path) -> Path:
    """Four layers."""
    return write_tiny(path, "llama", weight_type="Q8_0", n_layer=4)


def write_moe(path: Path) -> Path:
    """Twelve layers with routed and shared experts, and a router."""
    return write_tiny(path, "qwen2moe", weight_type="Q8_0", n_layer=N_LAYER)


def loaded(path: Path, n_gpus: int = 1, **params: Any) -> Llama:
    """On simulated cards; `use`: the names of those that are to be used."""
    placement = PlacementParams(devices=params.pop("use", None))
    sim = simulation(*["rtx3060"] * n_gpus)
    return load(path, devices=sim.devices, placement=placement, **{**FIXED, **params})


def places(llama: Llama) -> dict[str, str]:
    """Buffer type of each weight by its name."""
    tensors = llama.model.weights.tensors
    return {name: buffer.name for name, t in tensors.items() if (buffer := buffer_of(t))}


def blocks_in(llama: Llama, buft: str) -> list[int]:
    """Blocks of which something lies there."""
    names = [name for name, where in places(llama).items() if where == buft]
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("blk.")})


def fake_load(path: Path, *totals: int, **params: Any) -> Model:
    """On cards of so many bytes, which only hold what they are given."""
    cards = [FakeDevice(f"CUDA{i}", total=total) for i, total in enumerate(totals)]
    placement = PlacementParams(**params)
    return load_model(path, ModelParams(placement=placement), devices=[*cards, cpu()])


def used(model: Model) -> list[int]:
    """Bytes of weights on each card."""
    return [
        sum(b.size for b in model.buffers if b.buft.device is gpu) for gpu in model.placement.gpus
    ]
