"""Models on top of the core: loading, graphs, memory, tokenizers, sampling, sessions.

>>> from pyggml.llama import load
>>> llama = load("model.gguf")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.llama.api import Chat, Llama, load

assert __name__ == "pyggml.llama", "import pyggml.llama, not llama"

__all__ = ["Chat", "Llama", "load"]


def __getattr__(name: str) -> Any:
    # imported on first use: `pyllama-cli --help` must not wait for NumPy
    if name in __all__:
        from pyggml.llama import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
