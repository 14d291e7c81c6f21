"""Tiny models placed on simulated cards, and what they compute there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny import VARIANTS, write_tiny

from pyggml.backends.cuda.simulate import Simulation
from pyggml.cost import Rates
from pyggml.llama import load
from pyggml.llama.batch import Batch
from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_moe

CARDS = ("rtx3060", "a100", "rtx4090")
CPU_RATES = Rates(gbs=40, gflops=100)  # its clock is not what is tested: nothing is measured
N_UBATCH, N_PROMPT, N_STEPS = 40, 70, 3  # the second ubatch is too small to be offloaded


@dataclass(frozen=True)
class Placed:
    """Parameters of `load` that say what lies where, and the cards there are."""

    options: dict[str, Any] = field(default_factory=dict)
    cards: tuple[str, ...] = CARDS[:1]


def write_model(path: Path, variant: str, weight_type: str) -> Path:
    """A tiny random model."""
    arch, options = VARIANTS[variant]
    return write_tiny(path, arch, weight_type=weight_type, **options)


def simulation(cards: tuple[str, ...]) -> Simulation:
    """Cards that compute what they are asked to."""
    return Simulation(cards, cpu_rates=CPU_RATES)


def logits(
    path: Path, placed: Placed | None = None, **params: Any
) -> tuple[NDArray[np.float32], int]:
    """After every token of a prompt of two ubatches and of a few single ones; launches on cards.

    Without a placement: the CPU alone.
    """
    sim = simulation(placed.cards) if placed else None
    options = placed.options if placed else {}
    fixed = {"n_ctx": 128, "n_ubatch": N_UBATCH, "n_threads": 1, "warmup": False, "fit": False}
    devices = sim.devices if sim else None
    with load(path, devices=devices, **{**fixed, **params, **options}) as llama:
        n_vocab = llama.model.hparams.n_vocab
        ids = np.random.default_rng(0).integers(3, n_vocab, N_PROMPT + N_STEPS).tolist()
        context = llama.context()
        context.decode(Batch.of(ids[:N_PROMPT], 0, logits="all"))
        rows = [context.all_logits()]
        for i in range(N_PROMPT, len(ids)):
            context.decode(Batch.of(ids[i : i + 1], i))
            rows.append(context.all_logits())
    cards = sim.driver.cards if sim else []
    return np.concatenate(rows), sum(card.counters.launches for card in cards)


def named_placements(n_layer: int) -> dict[str, Placed]:
    """What people do."""
    every = {"n_gpu_layers": 99}
    two = {"cards": CARDS[:2]}
    experts = (Rule("exps", "CPU"),)
    return {
        "all on the CPU": Placed({"n_gpu_layers": 0}),
        "CPU without offloading": Placed({"n_gpu_layers": 0, "op_offload": False}),
        "-ngl 1": Placed({"n_gpu_layers": 1}),
        "-ngl 1 without offloading": Placed({"n_gpu_layers": 1, "op_offload": False}),
        "-ngl half": Placed({"n_gpu_layers": (n_layer + 1) // 2}),
        "-ngl all": Placed(every),
        "-ngl all -nkvo": Placed({**every, "kv_offload": False}),
        "-ngl half -nkvo": Placed({"n_gpu_layers": 2, "kv_offload": False, "no_host": True}),
        "-ot exps=CPU": Placed({**every, "rules": experts}),
        "-ot exps=CPU without offloading": Placed({**every, "rules": experts, "op_offload": False}),
        "-cmoe --no-host": Placed({**every, "rules": cpu_moe(), "no_host": True}),
        "-ncmoe 1": Placed({**every, "rules": n_cpu_moe(1)}),
        "two cards": Placed(every, **two),
        "two cards, uneven": Placed({**every, "tensor_split": (1.0, 3.0)}, **two),
        "two cards, -ot exps=CPU -nkvo": Placed(
            {**every, "rules": experts, "kv_offload": False}, **two
        ),
        "two cards, experts on the second": Placed(
            {"n_gpu_layers": 1, "rules": (Rule("exps", "CUDA1"),)}, **two
        ),
    }


PARTS = ("attn", "attn_q", "attn_k", "attn_output", "ffn", "ffn_down", "ffn_gate", "norm", "exps")
WHOLE = ("output", "token_embd", "ssm", ".")


def random_placement(seed: int, n_layer: int) -> Placed:
    """Anything that the options allow."""
    rng = random.Random(seed)
    cards = tuple(rng.choices(CARDS, k=rng.choice((1, 1, 2, 3))))
    bufts = ("CPU", *(f"CUDA{i}" for i in range(len(cards))))
    rules = []
    for _ in range(rng.randrange(5)):
        layers = "|".join(map(str, rng.sample(range(n_layer), rng.randint(1, n_layer))))
        pattern = rng.choice(
            (rf"blk\.({layers})\.{rng.choice(PARTS)}", rng.choice(PARTS), rng.choice(WHOLE))
        )
        rules.append(Rule(pattern, rng.choice(bufts)))
    if rng.random() < 0.2:
        rules.insert(0, Rule(rf"cache_[kvrs]_l{rng.randrange(n_layer)}$", rng.choice(bufts)))
    options = {
        "n_gpu_layers": rng.randint(0, n_layer + 2),
        "tensor_split": tuple(rng.choice((0.0, 1.0, 2.0)) for _ in cards),
        "main_gpu": rng.randrange(len(cards)),
        "split_mode": rng.choice(("layer", "layer", "none")),
        "rules": tuple(rules),
        "kv_offload": rng.random() < 0.7,
        "op_offload": rng.random() < 0.7,
        "no_host": rng.random() < 0.3,
        "repack": rng.random() < 0.7,
    }
    if options["split_mode"] == "none":  # rules may only name the card in use
        used = ("CPU", f"CUDA{options['main_gpu']}")
        options["rules"] = tuple(r for r in options["rules"] if r.buft in used)
    return Placed(options, cards)
