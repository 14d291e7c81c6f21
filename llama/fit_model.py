"""-fit for a file: measures planned models, and refuses what cannot be loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pyggml.backend import Device
from pyggml.errors import OutOfMemory
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.fit import MIB, Facts, Fitted, fit, what_is_given
from pyggml.llama.hparams import HParams
from pyggml.llama.loader import ModelFile, ModelParams, load_model
from pyggml.llama.memory_table import DeviceUse, memory_table
from pyggml.llama.out_of_memory import shortages
from pyggml.llama.placement_devices import choose_devices, is_gpu
from pyggml.llama.placement_params import AUTO, PlacementParams

log = logging.getLogger("pyggml.fit")

# on the host everything fits for sure with so much for each byte of weights, and so much besides
LAYOUTS = 2
COMPUTE = 2 << 30
WIDEST_CACHE = 4  # bytes of an element


class Fit:
    """What to load of a file, on which devices, and what was chosen."""

    def __init__(
        self,
        file: ModelFile,
        params: ModelParams,
        context: ContextParams,
        available: Sequence[Device],
    ) -> None:
        self.file = file
        self.params = params
        self.context = context
        self.available = available
        chosen = choose_devices(params.placement, available)
        self.gpus = tuple(d for d in chosen if is_gpu(d))
        self.devices = self.gpus or chosen[-1:]

    def run(self, *, planning: bool = False) -> Fitted | None:
        """The choice; None: there is nothing to choose. Raises ConfigError.

        `planning`: what does not fit need not be found, since it is not going to be loaded.
        """
        if not self.gpus and (self.context.n_ctx or self._is_small()):
            return None
        given = what_is_given(self.params.placement, len(self.gpus))
        if planning and self.context.n_ctx and given:
            return None
        return self._fit(self.params.placement)

    def _fit(self, params: PlacementParams) -> Fitted:
        return fit(params, self.context.n_ctx, self._facts(), self.measure)

    def _facts(self) -> Facts:
        hp = self.file.hparams
        return Facts(
            n_layer=hp.n_layer + hp.n_nextn,
            has_gpu=bool(self.gpus),
            n_dense=hp.experts.n_dense if hp.experts else 0,
            has_experts=hp.experts is not None,
            n_ctx_train=hp.n_ctx_train,
        )

    def measure(self, placement: PlacementParams, n_ctx: int) -> Sequence[DeviceUse]:
        """The GPUs, or the CPU if there are none, with a placement and a size of context."""
        params = replace(self.params, placement=placement)
        with quiet():
            model = load_model(self.file, params, devices=self.available, no_alloc=True)
            context = Context(model, replace(self.context, n_ctx=n_ctx), is_trial=True)
            try:
                devices = memory_table(model, context).devices
            finally:
                context.close()
        return devices[: len(self.gpus)] or devices[-1:]

    def _is_small(self) -> bool:
        """Whether the host has room in any case: measuring would only take time."""
        hp = self.file.hparams
        need = LAYOUTS * self.file.gguf.nbytes + COMPUTE + hp.n_ctx_train * cache_width(hp)
        return self.devices[-1].memory().free > need + self.params.placement.fit_target[0] * MIB

    def check(self, fitted: Fitted) -> None:
        """Raise OutOfMemory, with a way out, if a GPU is asked for more than it has."""
        if fitted.fits or not self.gpus:
            return
        experts = self.file.hparams.experts is not None
        text = next(shortages(fitted.devices, self.devices, has_experts=experts))
        raise OutOfMemory(f"{text}\n{self._way_out() or fitted.problem}")

    def _way_out(self) -> str:
        """What would be chosen if the user had not chosen what lies where; empty: nothing fits."""
        p = self.params.placement
        free = replace(p, n_gpu_layers=AUTO, tensor_split=(), rules=())
        if free == p:
            return ""
        found = self._fit(free)
        if found.problem:  # better without a margin than not at all
            found = self._fit(replace(free, fit_target=(0,)))
        return f"this would fit: {found.command}" if found.fits else ""


def cache_width(hp: HParams) -> int:
    """Bytes of keys and values for one token, at most."""
    widths = (hp.n_embd_k_gqa(il) + hp.n_embd_v_gqa(il) for il in range(hp.n_layer))
    return WIDEST_CACHE * sum(widths)


@contextmanager
def quiet() -> Iterator[None]:
    """What is measured is not what will be loaded: its warnings would mislead."""
    logger = logging.getLogger("pyggml")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
