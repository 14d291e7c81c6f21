"""Simulated cards of the command line: which there are, and what is told of them at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml import registry
from pyggml.backend import Device
from pyggml.errors import ConfigError
from pyggml.tools import whole_file
from pyggml.tools.ui import Screen

if TYPE_CHECKING:
    from pyggml.backends.cuda.simulate import Simulation

TRACE = "--sim-trace"


def chosen_devices(values: Mapping[str, Any], *, dry: bool = False) -> Sequence[Device]:
    """The devices that the flags ask for, the CPU last. `dry`: only to plan with."""
    simulation = simulated_cards(values, dry=dry)
    return registry.devices() if simulation is None else simulation.devices


def simulated_cards(values: Mapping[str, Any], *, dry: bool = False) -> Simulation | None:
    """Made anew of the flags; None: they ask for none. Raises ConfigError."""
    # in the environment there is one text for all cards
    specs = [spec for text in values.get("sim_device", ()) for spec in text.split(";")]
    if not specs:
        if "sim_trace" in values:
            raise ConfigError("--sim-trace is about simulated cards: give --sim-device as well")
        return None
    from pyggml.backends.cuda.simulate import Simulation

    return Simulation(specs, "dry" if dry else "host", trace="sim_trace" in values)


@dataclass(slots=True)
class Modelled:
    """Tokens, and the virtual time that they took since the model was ready."""

    simulation: Simulation
    last: float = 0.0  # of the virtual clock
    n_prompt: int = 0
    n_generated: int = 0  # without first tokens, which come with their prompts
    prompt_s: float = 0.0
    generate_s: float = 0.0

    def begin(self) -> None:
        """What was before does not count."""
        self.simulation.restart()
        self.last = self.simulation.clock.now

    def prompt_done(self, n_tokens: int) -> None:
        """A prompt was computed."""
        self.prompt_s += self._elapsed()
        self.n_prompt += n_tokens

    def answer_done(self, n_tokens: int) -> None:
        """An answer was generated, its first token included."""
        self.generate_s += self._elapsed()
        self.n_generated += max(0, n_tokens - 1)

    def _elapsed(self) -> float:
        now, before = self.simulation.clock.now, self.last
        self.last = now
        return now - before

    def lines(self) -> list[str]:
        """What there is to tell."""
        rates = (
            f"prompt {_rate(self.n_prompt, self.prompt_s)}",
            f"generation {_rate(self.n_generated, self.generate_s)}",
        )
        return [
            f"simulated: {', '.join(rates)} (modelled, not measured)",
            *(f"simulated: {line}" for line in self.simulation.report().splitlines()),
        ]


def _rate(n: int, seconds: float) -> str:
    if not n or not seconds:
        return f"{n} tokens"
    return f"{n} tokens in {1e3 * seconds:.2f} ms, {n / seconds:.1f} t/s"


class Simulated:
    """The simulated cards of one run; without any it does nothing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError, and UserError if the trace cannot be written."""
        self._simulation = simulated_cards(values)
        self.modelled = Modelled(self._simulation) if self._simulation else None
        self._trace: Path | None = None
        if self._simulation and "sim_trace" in values:
            self._trace = Path(values["sim_trace"])
            whole_file.check(TRACE, self._trace)  # better known now than at the end

    @property
    def devices(self) -> Sequence[Device] | None:
        """For loading; None: those that there are."""
        return None if self._simulation is None else self._simulation.devices

    def end(self, screen: Screen) -> None:
        """Tell what was modelled and write the trace."""
        if self._simulation is None or self.modelled is None:
            return
        for line in self.modelled.lines():
            screen.say(line)
        if self._trace is not None:
            whole_file.write(TRACE, self._trace, json.dumps(self._simulation.chrome_trace()))
