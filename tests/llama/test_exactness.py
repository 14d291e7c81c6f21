"""How far the real models are from exact arithmetic, beside llama.cpp.

Quantized models round activations to int8, so everybody differs from an exact forward. Ours may
not differ more than llama.cpp does; the standard error of the mean over 150 positions is 7 %.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exact import Exact, kl, log_softmax
from oracle import LlamaCpp

from pyggml.llama import load

TEXTS = (
    "The lighthouse keeper climbed the spiral stairs every evening and counted each of the one "
    "hundred and twelve steps aloud, so that he never lost track in the dark.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(",
    "Water boils at 100 degrees Celsius at sea level, but on top of a high mountain it boils at "
    "a lower temperature, because the pressure of the air is lower there.",
    "Dear Dr. Meyer, thank you for your letter of 14 March. We are pleased to confirm that your "
    "appointment was moved to Tuesday, 2 April, at half past nine.",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Japan?\nA: Tokyo.\n"
    "Q: What is the capital of Canada?\nA:",
)
N_TOKENS = 30


def check(path: Path) -> None:
    exact = Exact(path)
    strict = {"n_ctx": 256, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    ours, theirs = [], []
    with load(path, n_threads=1, **strict) as llama, LlamaCpp(path) as llama_cpp:
        for text in TEXTS:
            ids = llama.tokenize(text)[:N_TOKENS]
            expected = log_softmax(exact.logits(ids))
            ours.append(kl(expected, log_softmax(llama.logits(ids, all=True))))
            theirs.append(kl(expected, llama_cpp.logprobs(ids)))
    mine, other = np.concatenate(ours), np.concatenate(theirs)
    assert len(mine) == len(TEXTS) * N_TOKENS
    error = other.std() / len(other) ** 0.5
    assert mine.mean() <= 1.1 * other.mean() + error, (mine.mean(), other.mean())


def test_smollm2(smollm2: Path) -> None:
    check(smollm2)


@pytest.mark.slow
def test_gemma3(gemma3: Path) -> None:
    check(gemma3)
