"""Runs a plan: what was modelled beside what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import registry
from pyggml.estimate import estimate
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.loader import ModelParams, load_model
from pyggml.llama.planner import Choice
from pyggml.tools.simulated import simulated_cards

GENERATED, WARMING = 16, 2  # devices start a graph by one call when they have seen it twice
SECOND = 2  # ubatches of the prompt: the first one also compiles and allocates


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens per second, of the same graphs. `how`: measured, or on the clock of a simulation."""

    how: str
    n_prompt: int
    n_generated: int
    modelled_prompt: float
    measured_prompt: float
    modelled_generation: float
    measured_generation: float

    def as_json(self) -> Mapping[str, Any]:
        return asdict(self)


def verify(
    path: Path, values: Mapping[str, Any], choice: Choice, params: ContextParams
) -> Verified:
    """Load the model as planned and decode. Raises UserError."""
    simulation = simulated_cards(values)
    devices = simulation.devices if simulation else registry.devices()
    now: Callable[[], float] = time.perf_counter
    if simulation:
        clock = simulation.clock
        now = lambda: clock.now  # noqa: E731
    model = load_model(path, ModelParams(placement=choice.flags.placement), devices=devices)
    with closing(model), closing(Context(model, choice.flags.context(params))) as context:
        n = min(context.params.n_ubatch, (context.params.n_ctx - GENERATED) // SECOND)
        run = _Run(context, now)
        run.decode(n)
        prompt, modelled_prompt = run.decode(n), run.modelled(n)
        for _ in range(WARMING):
            run.decode(1)
        tokens = [run.decode(1) for _ in range(GENERATED - WARMING)]
        return Verified(
            "simulated" if simulation else "measured",
            n,
            len(tokens),
            modelled_prompt=n / modelled_prompt,
            measured_prompt=n / prompt,
            modelled_generation=1 / run.modelled(1),
            measured_generation=len(tokens) / sum(tokens),
        )


class _Run:
    """Decodes random tokens one batch after the other."""

    def __init__(self, context: Context, now: Callable[[], float]) -> None:
        self._context = context
        self._now = now
        self._random = np.random.default_rng(0)
        self._n_past = 0

    def decode(self, n: int) -> float:
        """Seconds of n more tokens."""
        n_vocab = self._context.hparams.n_vocab
        tokens = self._random.integers(0, n_vocab, n).tolist()
        start = self._now()
        self._context.decode(Batch.of(tokens, self._n_past))
        self._n_past += n
        return self._now() - start

    def modelled(self, n: int) -> float:
        """Seconds of such a batch by the cost model, with the memory as it is."""
        return estimate(self._context.plan_graph(n, full=False)[0]).seconds
