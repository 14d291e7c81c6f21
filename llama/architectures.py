"""Finds an architecture's file by its GGUF name."""

import importlib
import pkgutil
from typing import Protocol, cast

from pyggml.errors import ModelError
from pyggml.gguf import Metadata
from pyggml.llama import models
from pyggml.llama.builder import Builder
from pyggml.llama.hparams import HParams
from pyggml.llama.weights import WantList, Weights
from pyggml.tensor import Tensor


class Architecture(Protocol):
    """The three functions that every file of `llama/models` offers."""

    def hparams(self, kv: Metadata) -> HParams: ...

    def weights(self, hp: HParams) -> WantList: ...

    def graph(self, b: Builder, w: Weights) -> Tensor: ...


# Files whose architecture is not spelled with - for _.
SPELLED = {"ernie4_5_moe": "ernie4_5-moe"}


def known() -> list[str]:
    """All architectures, as GGUF spells them."""
    files = [m.name for m in pkgutil.iter_modules(models.__path__)]
    return sorted(SPELLED.get(name, name.replace("_", "-")) for name in files)


def find(name: str) -> Architecture:
    """The architecture that a file names; ModelError lists the known ones."""
    if name not in known():
        raise ModelError(f"unknown model architecture: {name!r}\nknown are: {', '.join(known())}")
    module = importlib.import_module(f"{models.__name__}.{name.replace('-', '_')}")
    return cast(Architecture, module)
