"""Every sampling stage: by hand, against plain Python, and against llama.cpp's own function."""

import math
from collections.abc import Callable

import llama_cpp_library as real
import numpy as np
import pytest
import sampling_reference as reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyggml.errors import ConfigError
from pyggml.llama.sampling_candidates import Candidates, Stage
from pyggml.llama.sampling_draw import AdaptiveP, Dist, Generator, Mirostat, MirostatV2, Xtc
from pyggml.llama.sampling_history import Dry, DryRule, Penalties, token_breakers
from pyggml.llama.sampling_infill import infill
from pyggml.llama.sampling_stages import (
    logit_bias,
    min_p,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
)

Step = Callable[[Candidates], Candidates]

# multiples of 1/8 are exact in float32, and distinct ones leave no tie to chance
rows = st.lists(st.integers(-160, 160), min_size=1, max_size=40, unique=True).map(
    lambda eighths: [(token, x / 8) for token, x in enumerate(eighths)]
)
min_keeps = st.integers(0, 5)


def candidates(pairs: reference.Pairs) -> Candidates:
    ids, logits = zip(*pairs, strict=True)
    return Candidates(np.array(ids, dtype=np.int32), np.array(logits, dtype=np.float32))


def of_probs(*probs: float) -> Candidates:
    return candidates([(token, math.log(p)) for token, p in enumerate(probs)])


def ids(c: Candidates) -> list[int]:
    return [int(token) for token in c.ids]


def pairs_of(c: Candidates) -> reference.Pairs:
    return [(int(token), float(logit)) for token, logit in zip(c.ids, c.logits, strict=True)]


def clear_of(sums: list[float], border: float) -> bool:
    """No partial sum so near a border that float32 could fall on its other side."""
    return all(abs(total - border) > 1e-5 for total in sums)


def sums(shares: list[float]) -> list[float]:
    return [sum(shares[: i + 1]) for i in range(len(shares))]


# --- by hand -------------------------------------------------------------------------------


def test_top_k_keeps_the_highest_in_order() -> None:
    assert ids(top_k(2)(of_probs(0.1, 0.4, 0.2, 0.3))) == [1, 3]


def test_top_p_closes_with_the_token_that_reaches_p() -> None:
    c = of_probs(0.1, 0.4, 0.2, 0.3)
    assert ids(top_p(0.35, 0)(c)) == [1]
    assert ids(top_p(0.5, 0)(c)) == [1, 3]
    assert ids(top_p(0.0, 3)(c)) == [1, 3, 2]


def test_min_p_is_relative_to_the_best() -> None:
    c = of_probs(0.1, 0.4, 0.2, 0.3)
    assert ids(min_p(0.45, 0)(c)) == [1, 2, 3]  # 0.18 and more, left in place
    assert ids(min_p(0.7, 0)(c)) == [1, 3]
    assert ids(min_p(0.7, 3)(c)) == [1, 3, 2]  # min_keep forces a sort


def test_typical_prefers_the_middle() -> None:
    # entropy 0.943 nats; surprises 0.357, 2.303, 1.609
    assert ids(typical(0.5, 0)(of_probs(0.7, 0.1, 0.2))) == [0]
    # entropy 1.28: surprise 1.204 of 0.3 is nearest, then 1.609 of 0.2
    assert ids(typical(0.4, 0)(of_probs(0.1, 0.4, 0.2, 0.3))) == [3, 2]


def test_top_n_sigma_forbids_without_removing() -> None:
    c = candidates([(0, 0.0), (1, 4.0), (2, 3.0), (3, 1.0)])  # sigma 1.58
    kept = top_n_sigma(1.0)(c)
    assert pairs_of(kept) == [(0, -math.inf), (1, 4.0), (2, 3.0), (3, -math.inf)]


def test_temperature_zero_leaves_the_first_highest() -> None:
    c = candidates([(0, 1.0), (1, 2.0), (2, 2.0)])
    for temp in (0.0, -1.0, 1e-45):
        assert pairs_of(temperature(temp)(c)) == [(0, -math.inf), (1, 2.0), (2, -math.inf)]


def test_penalty_of_a_repeated_token() -> None:
    stage = Penalties(3, 2.0, 0.25, 0.5)
    for token in (2, 0, 1, 1):  # 2 has left the window of three
        stage.accept(token)
    c = candidates([(0, 3.0), (1, -3.0), (2, 1.0)])
    assert pairs_of(stage(c)) == [(0, 1.5 - 0.75), (1, -6.0 - 1.0), (2, 1.0)]


def test_dry_punishes_the_next_token_of_a_repetition() -> None:
    rule = DryRule(multiplier=1.0, base=2.0, allowed_length=1, last_n=10, breakers={})
    stage = Dry(rule)
    for token in (1, 2, 3, 1, 2):
        stage.accept(token)
    c = candidates([(token, 0.0) for token in range(5)])
    assert pairs_of(stage(c)) == [(0, 0.0), (1, 0.0), (2, 0.0), (3, -2.0), (4, 0.0)]


def test_xtc_drops_all_but_the_least_of_the_probable() -> None:
    stage = Xtc(1.0, 0.2, 0, seed=1)
    assert ids(stage(of_probs(0.5, 0.05, 0.25, 0.2001))) == [3, 1]
    assert ids(Xtc(1.0, 0.2, 3, seed=1)(of_probs(0.5, 0.05, 0.25, 0.2001))) == [0, 2, 3, 1]


def test_equal_logits_keep_the_lowest_ids() -> None:
    c = candidates([(token, 0.0) for token in range(5000)])
    assert ids(top_k(3)(c)) == [0, 1, 2]
    assert ids(c.in_order()) == list(range(5000))
    signed = Candidates(c.ids, np.where(c.ids % 2, np.float32(-0.0), np.float32(0.0)))
    assert ids(signed.in_order()) == list(range(5000))


def test_logit_bias_adds_and_forbids() -> None:
    step = logit_bias({2: 1.5, 0: -math.inf})
    c = candidates([(0, 1.0), (1, 2.0), (2, 3.0)])
    assert pairs_of(step(c)) == [(0, -math.inf), (1, 2.0), (2, 4.5)]
    moved = c.in_order()  # ids 2 1 0: position and id differ
    assert pairs_of(step(moved)) == [(2, 4.5), (1, 2.0), (0, -math.inf)]
    with pytest.raises(ConfigError, match="forbids every token"):
        logit_bias({0: -math.inf, 1: -math.inf, 2: -math.inf})(c)


def test_generator_is_the_standard_twister() -> None:
    generator = Generator(5489)
    words = [generator.word() for _ in range(10000)]
    assert words[-1] == 4123659995  # required of std::mt19937 by the C++ standard
    twin = generator.clone()
    assert generator.float64() == twin.float64()
    generator.reset()
    assert generator.word() == words[0] == 3499211612


def test_infill_ends_when_the_end_is_likely() -> None:
    pieces = [b"a", b"ab", b"<end>", b"xy"]
    step = infill(frozenset({2}), pieces.__getitem__, 2)
    assert ids(step(of_probs(0.3, 0.2, 0.4, 0.1))) == [2]
    # "a" begins "ab": 0.57 + 0.4 join; "xy" is too improbable; the end token stays
    kept = step(of_probs(0.57, 0.4, 1e-6, 0.03))
    assert ids(kept) == [0, 2]
    assert kept.probs is not None and kept.probs[0] == pytest.approx(1.0, abs=1e-4)
    flat = candidates([(token, 0.0) for token in (0, 3)] + [(2, -99.0)])
    assert ids(step(flat)) == [0, 3, 2]
    vague = candidates([(i, 0.0) for i in range(10)] + [(10, -30.0)])
    letters = [bytes([65 + i]) for i in range(11)]
    assert ids(infill(frozenset({10}), letters.__getitem__, 10)(vague)) == [10]


# --- against plain Python ------------------------------------------------------------------


@given(rows, st.integers(1, 50))
def test_top_k_formula(row: reference.Pairs, k: int) -> None:
    assert pairs_of(top_k(k)(candidates(row))) == reference.top_k(row, k)


@given(rows, st.floats(0, 0.999), min_keeps)
def test_top_p_formula(row: reference.Pairs, p: float, min_keep: int) -> None:
    assume(clear_of(sums(reference.softmax(reference.falling(row))), p))
    assert pairs_of(top_p(p, min_keep)(candidates(row))) == reference.top_p(row, p, min_keep)


@given(rows, st.floats(1e-6, 1.5), min_keeps)
def test_min_p_formula(row: reference.Pairs, p: float, min_keep: int) -> None:
    peak = max(logit for _, logit in row)
    assume(all(abs(logit - peak - math.log(p)) > 1e-4 for _, logit in row))
    kept = min_p(p, min_keep)(candidates(row))
    assert reference.falling(pairs_of(kept)) == reference.min_p(row, p, min_keep)


@given(rows, st.floats(0, 0.999), min_keeps)
def test_typical_formula(row: reference.Pairs, p: float, min_keep: int) -> None:
    everything = reference.typical(row, 2.0, 0)
    shares = dict(zip([i for i, _ in row], reference.softmax(row), strict=True))
    assume(clear_of(sums([shares[i] for i, _ in everything]), p))
    kept = ids(typical(p, min_keep)(candidates(row)))
    expected = [i for i, _ in reference.typical(row, p, min_keep)]
    assert len(kept) == len(expected)
    # the last may be swapped for one that is equally typical in float32
    assert len(set(kept) ^ set(expected)) <= 2


@given(rows, st.floats(0.1, 3))
def test_top_n_sigma_formula(row: reference.Pairs, n: float) -> None:
    assume(len(row) > 1)
    expected = reference.top_n_sigma(row, n)
    wider, narrower = (reference.top_n_sigma(row, n * (1 + d)) for d in (1e-5, -1e-5))
    assume(wider == narrower)
    assert pairs_of(top_n_sigma(n)(candidates(row))) == expected


@given(rows, st.floats(0.05, 2), st.floats(0.01, 2), st.floats(0.1, 3))
def test_dynamic_temperature_formula(
    row: reference.Pairs, temp: float, spread: float, exponent: float
) -> None:
    assume(len(row) > 1)
    dynamic = reference.dynamic_temperature(row, temp, spread, exponent)
    # nearer to zero, float32 loses the entropy to 1 - p
    assume(reference.dynamic_temperature(row, 1.0, 1.0, 1.0) > 0.02)
    cooled = temperature(temp, spread, exponent)(candidates(row))
    expected = [logit / dynamic for _, logit in reference.falling(row)]
    np.testing.assert_allclose(cooled.logits, expected, rtol=2e-3)


@given(rows, st.lists(st.integers(0, 20), max_size=30), st.integers(1, 12), st.data())
def test_penalties_formula(
    row: reference.Pairs, text: list[int], last_n: int, data: st.DataObject
) -> None:
    repeat = data.draw(st.floats(0.5, 2))
    frequency, presence = data.draw(st.floats(-1, 1)), data.draw(st.floats(-1, 1))
    stage = Penalties(last_n, repeat, frequency, presence)
    for token in text:
        stage.accept(token)
    expected = reference.penalties(row, text[-last_n:], repeat, frequency, presence)
    for c in (candidates(row), candidates(row).in_order()):
        got = dict(pairs_of(stage(c)))
        for token, logit in expected:
            assert got[token] == pytest.approx(logit, rel=1e-5, abs=1e-5)


breaker_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=25), st.integers(0, 4), breaker_lists)
def test_dry_formula(text: list[int], allowed: int, breakers: list[list[int]]) -> None:
    by_head = {
        head: frozenset(tuple(b[1:]) for b in breakers if b[0] == head)
        for head in {b[0] for b in breakers}
    }
    rule = DryRule(multiplier=0.5, base=1.5, allowed_length=allowed, last_n=99, breakers=by_head)
    stage = Dry(rule)
    for token in text:
        stage.accept(token)
    c = candidates([(token, 0.0) for token in range(4)])
    expected = reference.dry(text, 0.5, 1.5, allowed, breakers)
    for token, logit in pairs_of(stage(c)):
        assert logit == pytest.approx(-expected.get(token, 0.0), rel=1e-5)


def test_dry_penalty_stays_finite() -> None:
    rule = DryRule(multiplier=1.0, base=4.0, allowed_length=0, last_n=999, breakers={})
    assert rule.penalty(3) == 64
    assert 2.0**126 <= rule.penalty(500) < np.inf


def test_breakers_may_straddle_tokens() -> None:
    pieces = [b"a", b"x\n", b"\n", b"ab", b"b", b"zo"]
    rests = {"b": [4], "ne": [8], "e": [9, 9]}
    found = token_breakers(["\n", "ab", "one", "\N{SNOWMAN}", ""], pieces, rests.__getitem__)
    assert found == {1: {()}, 2: {()}, 3: {()}, 0: {(4,)}, 5: {(8,)}}


# --- against llama.cpp ---------------------------------------------------------------------

SEED = 42
STAGES: dict[str, tuple[Step, tuple[object, ...]]] = {
    "top_k-40": (top_k(40), ("top_k", 40)),
    "top_k-200": (top_k(200), ("top_k", 200)),
    "top_p-0": (top_p(0.0, 0), ("top_p", 0.0, 0)),
    "top_p-.5": (top_p(0.5, 7), ("top_p", 0.5, 7)),
    "top_p-.95": (top_p(0.95, 0), ("top_p", 0.95, 0)),
    "min_p-.05": (min_p(0.05, 0), ("min_p", 0.05, 0)),
    "min_p-.5": (min_p(0.5, 7), ("min_p", 0.5, 7)),
    "min_p-1.5": (min_p(1.5, 0), ("min_p", 1.5, 0)),
    "top_n_sigma": (top_n_sigma(1.0), ("top_n_sigma", 1.0)),
    "temp-0": (temperature(0), ("temp", 0.0)),
    "temp-.8": (temperature(0.8), ("temp", 0.8)),
    "temp_ext": (temperature(0.8, 0.5, 1.0), ("temp_ext", 0.8, 0.5, 1.0)),
    "temp_ext-2": (temperature(0.3, 0.5, 2.0), ("temp_ext", 0.3, 0.5, 2.0)),
    "xtc": (Xtc(0.5, 0.1, 0, SEED), ("xtc", 0.5, 0.1, 0, SEED)),
    "xtc-min_keep": (Xtc(1.0, 0.05, 5, SEED), ("xtc", 1.0, 0.05, 5, SEED)),
    "dist": (Dist(SEED), ("dist", SEED)),
    "mirostat-v2": (MirostatV2(3.0, 0.1, SEED, 0), ("mirostat_v2", SEED, 3.0, 0.1)),
    "adaptive-p": (AdaptiveP(0.3, 0.9, SEED), ("adaptive_p", 0.3, 0.9, SEED)),
}


def random_row(random: np.random.Generator, *, least: int = 1) -> real.Row:
    """A row of distinct logits, sometimes sorted already."""
    n = max(int(random.choice([1, 2, 10, 300, 1500, 5000])), least)
    logits = random.permutation(np.unique(random.standard_normal(n).astype(np.float32)))
    logits *= np.float32(random.choice([0.3, 3.0, 8.0]) if least == 1 else 4.0)
    tokens = np.arange(len(logits), dtype=np.int32)
    order = np.argsort(-logits) if random.integers(2) else tokens
    in_order = order is not tokens
    return real.Row(tokens[order], logits[order], np.zeros_like(logits), in_order, -1)


def assert_same(ours: Candidates, theirs: real.Row) -> None:
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=5e-6)
    assert ours.selected == theirs.selected
    if ours.probs is not None:
        np.testing.assert_allclose(ours.probs, theirs.probs, atol=2e-5)


@pytest.mark.parametrize("name", STAGES)
def test_stage_equals_llama_cpp(name: str) -> None:
    ours, (kind, *arguments) = STAGES[name]
    theirs = real.RealSampler(str(kind), *arguments)
    random = np.random.default_rng(7)
    for _ in range(60):
        row = random_row(random)
        result = ours(Candidates(row.ids, row.logits, None, row.sorted))
        expected = theirs(row)
        assert_same(result, expected)
        if isinstance(ours, Stage) and result.selected >= 0:
            ours.accept(int(result.ids[result.selected]))
            theirs.accept(int(expected.ids[expected.selected]))


@pytest.mark.parametrize("p", [0.2, 0.9])
def test_typical_equals_llama_cpp(p: float) -> None:
    random = np.random.default_rng(7)
    theirs = real.RealSampler("typical", p, 0)
    for _ in range(40):
        row = random_row(random)
        ours = typical(p, 0)(Candidates(row.ids, row.logits, None, row.sorted))
        expected = theirs(row)
        assert len(ours) == len(expected.ids)
        # equally typical tokens may come in another order, one of them across the border
        assert len(set(ids(ours)) ^ set(expected.ids.tolist())) <= 2


def test_mirostat_equals_llama_cpp() -> None:
    random = np.random.default_rng(3)
    ours = Mirostat(5.0, 0.1, SEED, 5000)
    theirs = real.RealSampler("mirostat", 5000, SEED, 5.0, 0.1, 100)
    for _ in range(60):
        row = random_row(random, least=300)
        assert_same(ours(Candidates(row.ids, row.logits, None, row.sorted)), theirs(row))


def test_mirostat_keeps_all_when_its_estimate_has_no_bound() -> None:
    """There llama.cpp converts infinity to an integer, which is undefined."""
    flat = candidates([(token, 0.0) for token in range(50)])
    assert len(Mirostat(5.0, 0.1, SEED, 50)(flat)) == 50


@pytest.mark.parametrize(
    "settings_", [(8, 1.3, 0.0, 0.0), (64, 1.0, 0.5, 0.2), (5, 0.8, 0.1, -0.3)]
)
def test_penalties_equal_llama_cpp(settings_: tuple[int, float, float, float]) -> None:
    ours, theirs = Penalties(*settings_), real.RealSampler("penalties", 5000, *settings_)
    random = np.random.default_rng(5)
    for _ in range(100):
        token = int(random.integers(12))
        ours.accept(token)
        theirs.accept(token)
        row = random_row(random)
        result = ours(Candidates(row.ids, row.logits, None, row.sorted))
        np.testing.assert_array_equal(result.logits, theirs(row).logits)


@pytest.mark.parametrize("breakers", [[[3]], [[3], [2, 1], [2, 1, 0]]], ids=str)
def test_dry_equals_llama_cpp(breakers: list[list[int]]) -> None:
    heads = {b[0] for b in breakers}
    by_head = {h: frozenset(tuple(b[1:]) for b in breakers if b[0] == h) for h in heads}
    rule = DryRule(multiplier=0.8, base=1.75, allowed_length=1, last_n=30, breakers=by_head)
    ours, theirs = Dry(rule), real.real_dry(0.8, 1.75, 1, 30, breakers)
    random = np.random.default_rng(5)
    for _ in range(300):
        token = int(random.integers(4))
        ours.accept(token)
        theirs.accept(token)
        row = random_row(random)
        result = ours(Candidates(row.ids, row.logits, None, row.sorted))
        np.testing.assert_array_equal(result.logits, theirs(row).logits)


def test_logit_bias_equals_llama_cpp() -> None:
    bias = {0: 2.5, 7: -math.inf, 9: -1.0}
    array = (real.LogitBias * 3)(*[real.LogitBias(t, b) for t, b in bias.items()])
    theirs = real.RealSampler("logit_bias", 5000, 3, array)
    random = np.random.default_rng(5)
    for _ in range(30):
        row = random_row(random)
        if len(row.ids) > 2:
            result = logit_bias(bias)(Candidates(row.ids, row.logits, None, row.sorted))
            np.testing.assert_array_equal(result.logits, theirs(row).logits)


def test_mirostat_k_formula() -> None:
    from pyggml.llama.sampling_draw import mirostat_k

    shares = [0.5 * 0.7**i for i in range(30)]
    expected = int(reference.mirostat_k(shares, 4.0, 1000))
    assert mirostat_k(np.array(shares, dtype=np.float32), 4.0, 1000) == max(expected, 1)
