"""From flags to the parameters of placement."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyggml.errors import ConfigError
from pyggml.llama.api import Llama
from pyggml.llama.placement import buffer_type_names
from pyggml.llama.placement_params import (
    PlacementParams,
    parse_devices,
    parse_fit_target,
    parse_gpu_layers,
    parse_tensor_split,
)
from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_ffn, n_cpu_moe, parse_rules
from pyggml.tools.options import section
from pyggml.tools.simulated import chosen_devices
from pyggml.tools.ui import Screen

PARSERS: Mapping[str, Callable[[str], Any]] = {
    "n_gpu_layers": parse_gpu_layers,
    "devices": parse_devices,
    "tensor_split": parse_tensor_split,
    "fit_target": parse_fit_target,
    "fit": lambda text: text == "on",
}
RULES: Mapping[str, Callable[[Any], tuple[Rule, ...]]] = {
    "--override-tensor": parse_rules,
    "--cpu-moe": lambda is_on: cpu_moe(),
    "--n-cpu-moe": n_cpu_moe,
    "--n-cpu-ffn": n_cpu_ffn,
}


def placement(values: Mapping[str, Any]) -> PlacementParams:
    """What the flags say. Raises ConfigError."""
    given = section(values, "placement")
    for name in given.keys() & PARSERS.keys():
        given[name] = PARSERS[name](given[name])
    return PlacementParams(rules=rules(values), **given)


def rules(values: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules in the order of their flags: the first one that matches a tensor counts."""
    given: Sequence[tuple[str, Any]] = values.get("rules", ())
    try:
        return tuple(rule for flag, value in given for rule in RULES[flag](value))
    except ConfigError as e:
        known = ", ".join(buffer_type_names(chosen_devices(values, dry=True)))
        raise ConfigError(f"{e}\navailable buffer types: {known}") from None


def tell_fit(llama: Llama, screen: Screen) -> None:
    """What --fit has chosen, and why that is not enough."""
    fitted = llama.fitted
    if fitted is not None and fitted.changed:
        screen.say(f"fit: {fitted.line}")
    if fitted is not None and fitted.problem:
        screen.warn(f"--fit: {fitted.problem}")


def has_layers(values: Mapping[str, Any]) -> bool:
    """Whether layers are meant for a GPU, because the user says so."""
    try:
        return parse_gpu_layers(values.get("placement.n_gpu_layers", "0")) != 0
    except ConfigError:
        return False
