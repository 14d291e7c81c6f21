"""The two real models against real llama.cpp and against an exact forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from oracle import LlamaCpp

from pyggml.llama import load

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Dear Mr. Smith,\n\nI am writing to",
    "Le chat est assis sur",
    "1, 2, 3, 5, 8, 13,",
    "Ingredients: 200 g of flour, two eggs,",
    "In 1969, Neil Armstrong",
    "Water boils at",
)
N_PREDICT = 64
# llama.cpp differs from itself by this much between its batch and single-token kernels
NEAR_TIE = 0.4


def compare_greedy(path: Path) -> list[int]:
    """Tokens that agree per prompt; fails if they part where llama.cpp is sure."""
    agreed = []
    with load(path, n_ctx=512, n_threads=2) as ours, LlamaCpp(path) as theirs:
        for text in PROMPTS:
            steps = ours.session().generate(text, temp=0, n_predict=N_PREDICT)
            mine = [step.token for step in steps]
            agreed.append(agreement(mine, theirs, ours.tokenize(text), text))
    return agreed


def agreement(mine: list[int], theirs: LlamaCpp, ids: list[int], text: str) -> int:
    for i, (token, step) in enumerate(zip(mine, theirs.greedy(ids, N_PREDICT), strict=False)):
        if token != step.token:
            gap = step.logprob - step.runner_up
            assert gap < NEAR_TIE, f"{text!r}: token {i} is {token}, llama.cpp's {step.token}"
            return i
    return len(mine)


def test_smollm2_writes_what_llama_cpp_writes(smollm2: Path) -> None:
    agreed = compare_greedy(smollm2)
    assert np.mean(agreed) > 20, agreed


def test_gemma3_writes_what_llama_cpp_writes(gemma3: Path) -> None:
    agreed = compare_greedy(gemma3)
    assert np.mean(agreed) > 10, agreed
