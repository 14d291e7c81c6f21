"""Sampling parameters under llama.cpp's names, with its defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

from pyggml.errors import ConfigError

# name -> letter of --sampler-seq
SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
    "adaptive_p": "a",
}
DEFAULT_SEQ = "edskypmxt"

ALIASES = {
    "nucleus": "top_p",
    "typical_p": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "temp": "temperature",
}

DEFAULT_BREAKERS = ("\n", ":", '"', "*")

_ANY = (-math.inf, math.inf)
_LIMITS: dict[str, tuple[float, float]] = {
    "seed": (-1, 0xFFFFFFFF),
    "min_keep": (0, math.inf),
    "top_k": _ANY,
    "top_p": (0, math.inf),
    "min_p": (0, math.inf),
    "typ_p": (0, math.inf),
    "top_n_sigma": _ANY,
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, math.inf),
    "temp": _ANY,
    "dynatemp_range": (0, math.inf),
    "dynatemp_exponent": _ANY,
    "repeat_last_n": (-1, math.inf),
    "repeat_penalty": (math.ulp(0.0), math.inf),
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "dry_multiplier": _ANY,
    "dry_base": _ANY,
    "dry_allowed_length": (0, math.inf),
    "dry_penalty_last_n": (-1, math.inf),
    "adaptive_target": _ANY,
    "adaptive_decay": (0, 1),
    "mirostat": (0, 2),
    "mirostat_tau": (0, math.inf),
    "mirostat_eta": _ANY,
}


def parse_samplers(names: str | Iterable[str]) -> tuple[str, ...]:
    """The order given as "top_k;min_p;temperature", with llama.cpp's other spellings."""
    parts = names.split(";") if isinstance(names, str) else names
    return tuple(_canonical(part) for part in parts if part.strip())


def _canonical(name: str) -> str:
    key = _spelled(name)
    if key not in SAMPLERS:
        raise ConfigError(f"unknown sampler {name.strip()!r}; known: {', '.join(SAMPLERS)}")
    return key


def _spelled(name: str) -> str:
    key = name.strip().lower().replace("-", "_")
    return ALIASES.get(key, key)


def parse_sampling_seq(letters: str) -> tuple[str, ...]:
    """The order given as one letter per sampler, as in "edskypmxt"."""
    by_letter = {letter: name for name, letter in SAMPLERS.items()}
    unknown = sorted(set(letters) - set(by_letter))
    if unknown:
        known = ", ".join(f"{letter} {name}" for letter, name in by_letter.items())
        raise ConfigError(f"unknown sampler letter {unknown[0]!r}; known: {known}")
    return tuple(by_letter[letter] for letter in letters)


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Token id and bias of --logit-bias, written ID+BIAS or ID-BIAS."""
    match = re.fullmatch(r"(\d+)([+-])(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|inf)", text.strip().lower())
    if not match:
        raise ConfigError(f"--logit-bias {text!r} is not ID+BIAS or ID-BIAS, as in 15043-1.5")
    return int(match[1]), float(match[2] + match[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that decides how the next token is chosen."""

    samplers: tuple[str, ...] = parse_sampling_seq(DEFAULT_SEQ)
    seed: int = -1  # -1 and 0xFFFFFFFF: a random one
    min_keep: int = 0
    temp: float = 0.80  # <= 0: the most probable token
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # <= 0: off
    top_p: float = 0.95  # >= 1: off
    min_p: float = 0.05  # 0: off
    typ_p: float = 1.0  # >= 1: off
    top_n_sigma: float = -1.0  # <= 0: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.10  # > 0.5: off
    repeat_last_n: int = 64  # 0: off, -1: the whole context
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75  # < 1: off
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # 0: off, -1: the whole context
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    adaptive_target: float = -1.0  # < 0: off
    adaptive_decay: float = 0.90
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.10
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, limits in _LIMITS.items():
            _check(name, getattr(self, name), limits)
        if parse_samplers(self.samplers) != self.samplers:
            raise ConfigError(f"samplers {self.samplers}: use parse_samplers for other spellings")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise ConfigError(f"logit_bias of token {token} is {bias}: use a number or -inf")

    def describe(self) -> str:
        """The parameters in llama.cpp's four log lines."""
        rows = (
            "repeat_last_n repeat_penalty frequency_penalty presence_penalty",
            "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n",
            "top_k top_p min_p xtc_probability xtc_threshold typical_p top_n_sigma temp",
            "mirostat mirostat_lr mirostat_ent adaptive_target adaptive_decay",
        )
        return "\n".join("\t" + ", ".join(map(self._shown, row.split())) for row in rows)

    def _shown(self, label: str) -> str:
        other = {
            "typical_p": "typ_p",
            "mirostat_lr": "mirostat_eta",
            "mirostat_ent": "mirostat_tau",
        }
        value = getattr(self, other.get(label, label))
        whole = label in _INTEGERS
        return f"{label} = {value:d}" if whole else f"{label} = {value:.3f}"


_LOG_LABELS = {"typical_p": "typ_p", "mirostat_lr": "mirostat_eta", "mirostat_ent": "mirostat_tau"}
_INTEGERS = {f.name for f in fields(SamplingParams) if f.type == "int"}


def _check(name: str, value: object, limits: tuple[float, float]) -> None:
    kind = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} {value!r} is not {wanted}")
    low, high = limits
    if not math.isfinite(value) or not low <= value <= high:
        allowed = _range_text(low, high)
        raise ConfigError(f"{name} {value} is out of range: {allowed}")


def _range_text(low: float, high: float) -> str:
    if low == math.ulp(0.0):
        return "it must be above 0"
    if math.isinf(low):
        return "it must be a finite number"
    return (
        f"it must be {low:g} or more" if math.isinf(high) else f"allowed are {low:g} to {high:.10g}"
    )


# GGUF key after general.sampling. -> field
_MODEL_KEYS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temp",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def model_defaults(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Fields a model file sets (keys general.sampling.*), for whatever the user left open."""
    found: dict[str, Any] = {}
    for key, name in _MODEL_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, Real):
            number = float(value)
            found[name] = int(number) if name in _INTEGERS else number
    sequence = metadata.get("general.sampling.sequence")
    if isinstance(sequence, str):
        # a file may be newer than this program: its unknown names must not stop the model
        found["samplers"] = tuple(s for s in map(_spelled, sequence.split(";")) if s in SAMPLERS)
    return found
