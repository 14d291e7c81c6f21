"""How far a model's next-token distributions are from llama.cpp's, in nats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from exact import kl, log_softmax
from numpy.typing import NDArray
from oracle import LlamaCpp

from pyggml.llama import Llama, load

LENGTHS = (1, 2, 33, 100)
Distributions = dict[int, NDArray[np.float64]]  # prompt length -> log-probabilities at each token


def prompt(n_vocab: int, n: int) -> list[int]:
    """Random ids, without the first control tokens of small vocabularies."""
    return [int(i) for i in np.random.default_rng(n).integers(3, n_vocab, n)]


def strict(path: Path, **params: Any) -> Llama:
    """A model with the settings of the strict oracle: F32 cache, no flash attention."""
    defaults = {"n_ctx": 512, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    return load(path, **{**defaults, "n_threads": 2, "warmup": False, **params})


def reference(theirs: LlamaCpp) -> Distributions:
    """What llama.cpp finds after every token of each prompt."""
    return {n: theirs.logprobs(prompt(theirs.n_vocab, n)) for n in LENGTHS}


def divergences(ours: Llama, expected: Distributions) -> NDArray[np.float64]:
    """The KL divergence at each position of all prompts."""
    n_vocab = ours.model.hparams.n_vocab
    return np.concatenate(
        [
            kl(logprobs, log_softmax(ours.logits(prompt(n_vocab, n), all=True)))
            for n, logprobs in expected.items()
        ]
    )
