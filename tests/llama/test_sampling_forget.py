"""Forgetting the text: what a sampler drops and what goes on."""

import numpy as np
import pytest

from pyggml.llama.sampling import Sampler, SamplingParams, VocabInfo, make_chain

FLAT = np.zeros(50, np.float32)


def sampler(**params: object) -> Sampler:
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0, "seed": 3, **params}
    return make_chain(SamplingParams(**given), VocabInfo(n_vocab=50))  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    "params",
    [
        {"repeat_penalty": 2.0, "repeat_last_n": 8},
        {"presence_penalty": 2.0},
        {"dry_multiplier": 2.0, "dry_sequence_breakers": (), "dry_allowed_length": 1},
    ],
)
def test_the_text_weighs_nothing_once_it_is_forgotten(params: dict[str, object]) -> None:
    chain = sampler(temp=0, **params)
    logits = FLAT.copy()
    logits[[7, 8]] = 3.0, 2.0
    for token in (7, 9, 7, 9, 7, 9):
        chain.accept(token)
    assert chain.sample(logits) == 8
    chain.forget()
    assert chain.sample(logits) == 7


@pytest.mark.parametrize(
    "params",
    [{}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}, {"mirostat": 1}, {"mirostat": 2}]
    + [{"samplers": ("adaptive_p",), "adaptive_target": 0.3}],
    ids=str,
)
def test_random_numbers_go_on(params: dict[str, object]) -> None:
    logits = np.linspace(0, 2, 50, dtype=np.float32)
    kept, other, reset = sampler(**params), sampler(**params), sampler(**params)
    first = [kept.sample(logits) for _ in range(8)]
    assert first == [other.sample(logits) for _ in range(8)]
    assert first == [reset.sample(logits) for _ in range(8)]
    kept.forget()
    reset.reset()
    following = [other.sample(logits) for _ in range(8)]
    assert [kept.sample(logits) for _ in range(8)] == following != first
    assert [reset.sample(logits) for _ in range(8)] == first
