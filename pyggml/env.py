"""The environment variables that the core reads: one table, one function."""

import os
from dataclasses import dataclass

from pyggml.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """A number from the environment."""

    name: str
    meaning: str
    default: int = 0
    is_debug: bool = False  # a word is as good as no value


VARIABLES = {
    v.name: v
    for v in (
        Variable("GGML_CPU_DISABLE_FUSION", "1: every node of a graph is computed by itself"),
        Variable("GGML_CUDA_DISABLE_GRAPHS", "1: graphs that come again are not captured"),
        Variable("GGML_CUDA_NO_PINNED", "1: no pinned host memory"),
        Variable(
            "GGML_OP_OFFLOAD_MIN_BATCH",
            "tokens from which on a card computes with weights in host memory, copying them",
            32,
        ),
        Variable(
            "GGML_SCHED_DEBUG",
            "1: print every split with its inputs; 2: every node as well",
            is_debug=True,
        ),
        Variable(
            "GGML_SCHED_DEBUG_REALLOC",
            "1: fail when a graph of unchanged size and placement needs new buffers; 2: when any",
            is_debug=True,
        ),
        Variable(
            "GGML_SCHED_MAX_COPIES",
            "how many evaluations may be in flight on several devices; 1: one after the other",
            default=4,
        ),
        Variable(
            "LLAMA_ATTN_ROT_DISABLE",
            "1: do not rotate heads before they are quantized into the KV cache",
        ),
    )
}


def integer(name: str) -> int:
    """The value of a variable of the table. Raises ConfigError if it is not a number.

    Of a debug aid a word is ignored, as ggml does.
    """
    variable = VARIABLES[name]
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else variable.default
    except ValueError:
        if variable.is_debug:
            return variable.default
        raise ConfigError(f"{name}={text!r} is not a number\n{variable.meaning}") from None
