"""Simulated cards: their description, and the devices of a machine that has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyggml import registry
from pyggml.backend import NO_LIMIT, Device
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cuda.cards import CARDS, GIB, MIB, Card
from pyggml.backends.cuda.device import CudaDevice
from pyggml.backends.cuda.sim_clock import Bus, Clock
from pyggml.backends.cuda.sim_cpu import DryPinnedBufferType, SimCpuDevice
from pyggml.backends.cuda.sim_driver import SimDriver
from pyggml.backends.cuda.sim_execute import SimExecutor
from pyggml.backends.cuda.sim_report import chrome_trace, report
from pyggml.cost import Rates
from pyggml.errors import ConfigError

EXECUTE = ("host", "dry")
HINT = "as in rtx3060, rtx3060:10GiB or rtx3060:12GiB,pcie=16"


@dataclass(frozen=True, slots=True)
class SimSpec:
    """One card to simulate; `key` is its name in the table, `card` what the options made of it."""

    key: str
    card: Card


# ---------------------------------------------------------------- NAME[:MEM][,option=value,...]
def _rate(text: str) -> float:
    """GB/s."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _size(text: str) -> int:
    """Bytes of "12GiB", "12G" or "12288MiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(g|m)(?:i?b)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError
    return int(float(found[1]) * (GIB if found[2] == "g" else MIB))


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


@dataclass(frozen=True, slots=True)
class Option:
    """What may follow the name of a card."""

    values: str
    help: str
    parse: Callable[[str], Any]
    apply: Callable[[Card, Any], Card]


DEFAULT_PEER_GBS = 20.0
OPTIONS: dict[str, Option] = {
    "pcie": Option(
        "GB/s",
        "copies to and from the card",
        _rate,
        lambda card, gbs: replace(card, link_gbs=gbs),
    ),
    "vram": Option(
        "GB/s", "bandwidth of its memory", _rate, lambda card, gbs: replace(card, gbs=gbs)
    ),
    "peer": Option(
        "on|off",
        "direct copies between cards",
        _switch,
        lambda card, on: replace(card, peer_gbs=(card.peer_gbs or DEFAULT_PEER_GBS) if on else 0.0),
    ),
    "reserved": Option(
        "SIZE",
        "memory that is not free to begin with",
        _size,
        lambda card, size: replace(card, reserved=size),
    ),
    "buffer": Option(
        "SIZE", "largest single buffer", _size, lambda card, size: replace(card, max_buffer=size)
    ),
}


def parse_spec(text: str) -> SimSpec:
    """Read "rtx3060:12GiB,pcie=16". Raises ConfigError, which lists what there is."""
    head, *options = text.split(",")
    name, colon, memory = head.partition(":")
    key = name.strip().lower().replace(" ", "")
    card = CARDS.get(key)
    if card is None:
        raise ConfigError(
            f"--sim-device {text}: there is no card {name.strip()!r} in the table, {HINT}\n"
            f"cards: {', '.join(CARDS)}"
        )
    if colon:
        try:
            size = _size(memory)
        except ValueError:
            raise ConfigError(
                f"--sim-device {text}: {memory!r} is not a size of memory, {HINT}"
            ) from None
        card = replace(card, memory=size, reserved=min(card.reserved, size // 8))
    for option in options:
        card = _with_option(card, option, text)
    return SimSpec(key, card)


def _with_option(card: Card, text: str, whole: str) -> Card:
    name, equals, value = text.partition("=")
    option = OPTIONS.get(name.strip().lower())
    known = ", ".join(f"{name}={option.values}" for name, option in OPTIONS.items())
    if option is None or not equals:
        raise ConfigError(f"--sim-device {whole}: {text!r} is no option\noptions: {known}")
    try:
        parsed = option.parse(value.strip())
    except (ValueError, KeyError):
        raise ConfigError(
            f"--sim-device {whole}: {text!r} should be {name}={option.values} ({option.help})"
        ) from None
    return option.apply(card, parsed)


# ---------------------------------------------------------------- devices
class Simulation:
    """A machine with cards that are not there. `devices` go to `load(..., devices=...)`.

    With execute="host" our CPU kernels compute what the cards would; with "dry" nothing is
    allocated or computed, and all values are zero.
    """

    def __init__(
        self,
        specs: Sequence[str | SimSpec],
        execute: str = "host",
        trace: bool = False,
        *,
        cpu_rates: Rates | None = None,
        pinned_limit: int = NO_LIMIT,
    ) -> None:
        """`cpu_rates`: what the CPU reaches; None: measured on this machine when first needed.
        `pinned_limit`: bytes of host memory that the driver can pin."""
        if execute not in EXECUTE:
            raise ConfigError(f"execute={execute!r}: one of {', '.join(EXECUTE)}")
        self.specs = tuple(parse_spec(s) if isinstance(s, str) else s for s in specs)
        dry = execute == "dry"
        self.clock = Clock(Bus(lambda: self.cpu.rates().gbs), trace=trace)
        host = registry.cpu_device()
        assert isinstance(host, CpuDevice)
        self.cpu = SimCpuDevice(host.library, self.clock, cpu_rates, dry=dry)
        cards = [spec.card for spec in self.specs]
        self.driver = SimDriver(cards, self.clock, dry=dry, pinned_limit=pinned_limit)
        engine = None if dry else lambda: self.cpu.engine
        self.cards = [
            CudaDevice(self.driver, i, SimExecutor(spec.card.rates, engine), self.cpu)
            for i, spec in enumerate(self.specs)
        ]
        if dry and self.cards:
            self.cards[0].host_buft = DryPinnedBufferType(self.cards[0], self.driver)
        for card in self.cards[1:]:  # there is one kind of pinned memory
            card.host_buft = self.cards[0].host_buft

    @property
    def devices(self) -> tuple[Device, ...]:
        """CUDA0, CUDA1, ... and the CPU."""
        return (*self.cards, self.cpu)

    def restart(self) -> None:
        """Let report and trace begin here: what was before, such as loading, is left out."""
        self.clock.restart()
        for card in self.driver.cards:
            card.restart()

    def report(self) -> str:
        """What each card was asked for; everything modelled, nothing measured."""
        return report(self.driver, self.clock)

    def chrome_trace(self) -> dict[str, Any]:
        """The trace as Chrome's JSON object (chrome://tracing, ui.perfetto.dev)."""
        return chrome_trace(self.driver, self.clock)
