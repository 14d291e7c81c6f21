"""Our chain and llama.cpp's on the next-token distributions of a real model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp_server import RealServer

from pyggml.llama.sampling import SamplingParams, VocabInfo, make_chain, parse_samplers

PROMPTS = ("The capital of France is", "Once upon a time there was a", "1 2 3 4 5")
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(smollm2: Path) -> Ask:
    """One token of llama.cpp for a prompt: the answer of its /completion route."""
    server = RealServer(smollm2)

    def post(prompt: str, **fields: object) -> Any:
        return server.post(
            "/completion", {"prompt": prompt, "n_predict": 1, "n_probs": 1, **fields}
        )

    return post


@pytest.fixture(scope="module")
def rows(ask: Ask) -> dict[str, np.ndarray]:
    """Log-probabilities of the whole vocabulary per prompt."""
    result = {}
    for prompt in PROMPTS:
        answer = ask(prompt, n_probs=100_000, temperature=0)
        top = answer["completion_probabilities"][0]["top_logprobs"]
        row = np.empty(len(top), dtype=np.float32)
        row[[entry["id"] for entry in top]] = [entry["logprob"] for entry in top]
        result[prompt] = row
    return result


# our field names, with the names of the route where they differ
ROUTE = {"temp": "temperature", "typ_p": "typical_p"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "top_p": 0.7, "min_p": 0.0, "temp": 1.3},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.02, "temp": 0.5},
    {"top_k": 0, "top_p": 0.5, "min_keep": 8},
    {"top_k": 100, "typ_p": 0.6, "temp": 1.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 1.5},
    {"top_k": 50, "dynatemp_range": 0.4, "dynatemp_exponent": 1.2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 30},
    {"samplers": parse_samplers("temperature;top_p;top_k"), "temp": 1.7, "top_p": 0.8},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 1, "temp": 1.0},
    {"temp": 0.0},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_probabilities_and_draws_equal_llama_cpp(
    fields: dict[str, Any], ask: Ask, rows: dict[str, np.ndarray]
) -> None:
    theirs = {ROUTE.get(name, name): value for name, value in fields.items()}
    for seed, (prompt, row) in enumerate(rows.items()):
        sampler = make_chain(SamplingParams(**fields, seed=seed), VocabInfo(n_vocab=len(row)))
        token = sampler.sample(row)
        answer = ask(prompt, n_probs=30, post_sampling_probs=True, seed=seed, **theirs)
        chosen = answer["completion_probabilities"][0]
        left = sampler.last
        assert left is not None and left.probs is not None
        probs = {int(i): float(p) for i, p in zip(left.ids, left.probs, strict=True)}
        for entry in chosen["top_probs"]:
            assert probs[entry["id"]] == pytest.approx(entry["prob"], abs=2e-4)
        assert len(chosen["top_probs"]) == min(30, np.count_nonzero(left.probs))
        assert chosen["id"] == token


def test_defaults_equal_llama_cpp(ask: Ask) -> None:
    settings = ask(PROMPTS[0])["generation_settings"]
    params = SamplingParams()
    names = [n for n in SamplingParams.__dataclass_fields__ if n not in ("seed", "logit_bias")]
    for name in names:
        value = getattr(params, name)
        theirs = settings[ROUTE.get(name, name)]
        if isinstance(value, tuple):
            assert list(value) == theirs, name
        else:
            assert value == pytest.approx(theirs), name
