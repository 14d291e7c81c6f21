"""Placement as llama-bench's lists spell it: what a test has as text, and what that means."""

from __future__ import annotations

import re
from typing import Any

from pyggml.errors import ConfigError
from pyggml.llama.placement_params import (
    PlacementParams,
    parse_devices,
    parse_gpu_layers,
    parse_tensor_split,
)
from pyggml.llama.placement_rules import n_cpu_moe, parse_rules, split_list

AUTO, NONE = "auto", "none"
NO_SPLIT = "0.00"
SHOWN = 30  # characters of rules in the table

# fields of a test, with llama-bench's defaults
DEFAULTS: dict[str, Any] = {
    "n_gpu_layers": -1,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "devices": AUTO,
    "tensor_split": NO_SPLIT,
    "overrides": NONE,
    "no_host": False,
}


def gpu_layers(flag: str, text: str) -> list[int]:
    """Numbers, auto or all."""
    return [parse_gpu_layers(part.strip()) for part in text.split(",")]


def device_lists(flag: str, text: str) -> list[str]:
    """Devices of one test are joined by slashes."""
    found = [part.strip() for part in text.split(",")]
    for part in found:
        _devices(part)
    return found


def _devices(text: str) -> tuple[str, ...] | None:
    return None if text == AUTO else parse_devices(text.replace("/", ","))


def splits(flag: str, text: str) -> list[str]:
    """Shares of one test are joined by slashes; numbers between commas alone are one test, too.

    llama-bench would make a test of each: a share for the first device only.
    """
    texts = [text] if "/" not in text else text.split(",")
    found = []
    for part in texts:
        shares = parse_tensor_split(part.strip())
        PlacementParams(tensor_split=shares)
        found.append("/".join(f"{share:.2f}" for share in shares))
    return found


def rule_sets(flag: str, text: str) -> list[str]:
    """Rules of one test are joined by semicolons; `none` is a test without."""
    found = [part.strip() for part in split_list(text)]
    for part in found:
        _rules(part)
    return found


def _rules(text: str) -> Any:
    return () if text == NONE else parse_rules(text, ";")


def placement(fields: dict[str, Any]) -> PlacementParams:
    """Of a test's fields. Rules of -ot come before those of -ncmoe."""
    split = fields["tensor_split"]
    return PlacementParams(
        n_gpu_layers=fields["n_gpu_layers"],
        devices=_devices(fields["devices"]),
        split_mode=fields["split_mode"],
        main_gpu=fields["main_gpu"],
        tensor_split=() if split == NO_SPLIT else parse_tensor_split(split),
        rules=(*_rules(fields["overrides"]), *n_cpu_moe(fields["n_cpu_moe"])),
        no_host=fields["no_host"],
        fit=False,
    )


def split_modes(flag: str, text: str) -> list[str]:
    """Those that there are."""
    found = [part.strip() for part in text.split(",")]
    for part in found:
        PlacementParams(split_mode=part)
    return found


def main_gpus(flag: str, text: str) -> list[int]:
    """Numbers; below 0 none."""
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", text):
        raise ConfigError(f"{flag} {text}: numbers of GPUs, as 0,1")
    return [int(part) for part in text.split(",")]


def short(rules: str) -> str:
    """Rules as the table shows them: their beginning and their end, and no column's edge."""
    half = (SHOWN - 1) // 2
    text = rules if len(rules) <= SHOWN else f"{rules[:half]}…{rules[-half:]}"
    return text.replace("|", "\\|")
