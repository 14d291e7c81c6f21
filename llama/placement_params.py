"""How a model is spread over devices, as the user wants it: frozen, validated once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from pyggml.errors import ConfigError
from pyggml.llama.placement_rules import Rule, parse_rules

AUTO, ALL_LAYERS = -1, -2
SPLIT_MODES = ("none", "layer")
REFUSED_SPLIT_MODES = {
    "row": "no device here can hold a matrix in parts",
    "tensor": "layers are not computed by several devices at once",
}
MAX_DEVICES = 16
LAYER_WORDS = {"auto": AUTO, "all": ALL_LAYERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementParams:
    """Devices, layers and tensors (the part of llama_model_params that says what lies where).

    `devices`: names, in this order; None: all GPUs; (): none. `tensor_split`: shares of the
    devices; none, or only zeros: by free memory. `rules`: the first that matches a tensor counts,
    before `n_gpu_layers`. `fit` may change what was not given so that everything fits, leaving
    `fit_target` MiB of each device free and at least `fit_ctx` tokens of context.
    """

    n_gpu_layers: int = AUTO
    devices: tuple[str, ...] | None = None
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    rules: tuple[Rule, ...] = ()
    no_host: bool = False
    fit: bool = True
    fit_target: tuple[int, ...] = (1024,)
    fit_ctx: int = 4096

    def __post_init__(self) -> None:
        if self.n_gpu_layers < ALL_LAYERS:
            raise ConfigError(f"--gpu-layers {self.n_gpu_layers}: a number of layers, auto or all")
        if self.split_mode not in SPLIT_MODES:
            reason = REFUSED_SPLIT_MODES.get(self.split_mode)
            modes = f"one of {', '.join(SPLIT_MODES)}"
            text = f"{reason}: {modes}" if reason else modes
            raise ConfigError(f"--split-mode {self.split_mode}: {text}")
        self._check_shares()
        if not self.fit_target or min(self.fit_target) < 0:
            raise ConfigError(f"--fit-target {_listed(self.fit_target)}: MiB, 0 or more")
        if self.fit_ctx < 1:
            raise ConfigError(f"--fit-ctx {self.fit_ctx}: a number of tokens, at least 1")

    def changed(self, **fields: Any) -> PlacementParams:
        """With other values; rules may be text, as after -ot, and lists may stand for tuples."""
        if isinstance(fields.get("rules"), str):
            fields["rules"] = parse_rules(fields["rules"])
        for name in [name for name, value in fields.items() if isinstance(value, list)]:
            fields[name] = tuple(fields[name])
        return replace(self, **fields)

    def _check_shares(self) -> None:
        shares = self.tensor_split
        if not all(math.isfinite(s) and s >= 0 for s in shares):
            raise ConfigError(f"--tensor-split {_listed(shares)}: shares are 0 or more")
        if len(shares) > MAX_DEVICES:
            raise ConfigError(
                f"--tensor-split {_listed(shares)}: {len(shares)} shares, but there can be only "
                f"{MAX_DEVICES} devices"
            )


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{v:g}" for v in values)


# ---------------------------------------------------------------- from text
def parse_gpu_layers(text: str) -> int:
    """A number, auto or all; -1 and -2 are older words for those. Raises ConfigError."""
    if text in LAYER_WORDS:
        return LAYER_WORDS[text]
    if not re.fullmatch(r"\d+|-1|-2", text):
        raise ConfigError(f"--gpu-layers {text}: a number of layers, auto or all")
    return int(text)


def parse_devices(text: str) -> tuple[str, ...]:
    """NAME,NAME or none. Raises ConfigError."""
    names = tuple(name.strip() for name in text.split(","))
    if names == ("none",):
        return ()
    if "" in names:
        raise ConfigError(f"--device {text!r}: names of devices, or none (--list-devices)")
    return names


def parse_tensor_split(text: str) -> tuple[float, ...]:
    """Shares between commas or slashes. Raises ConfigError."""
    try:
        return tuple(float(share) for share in re.split("[,/]", text))
    except ValueError:
        raise ConfigError(
            f"--tensor-split {text}: a share for each device, for example 3,1"
        ) from None


def parse_fit_target(text: str) -> tuple[int, ...]:
    """MiB for each device, or one for all. Raises ConfigError."""
    try:
        return tuple(int(mib) for mib in text.split(","))
    except ValueError:
        raise ConfigError(f"--fit-target {text}: MiB to leave free, one for each device") from None
