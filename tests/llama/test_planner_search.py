"""The planner's search against trying everything."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.llama.planner_search import ON_CPU, STEPS, Problem, Solution, exhaustive, search, tidy


def random_problem(seed: int, n_layer: int, n_pattern: int, n_devices: int = 1) -> Problem:
    """Layers of few kinds: what takes more memory is faster."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 2, n_layer)
    nbytes = np.sort(rng.integers(1, 40, (2, n_pattern)), axis=1)[kinds].astype(float)
    seconds = -np.sort(-rng.integers(1, 100, (2, n_pattern)), axis=1)[kinds].astype(float)
    nbytes[:, ON_CPU] = 0
    compute = np.sort(rng.integers(0, 5, n_pattern)).astype(float)
    budget = rng.integers(5, 20 * n_layer, n_devices).astype(float)
    return Problem(seconds, nbytes, compute, budget)


def check(problem: Problem, solution: Solution) -> None:
    """What a solution says of itself is so."""
    layers, patterns = np.arange(problem.n_layer), np.array(solution.patterns)
    assert solution.seconds == pytest.approx(problem.seconds[layers, patterns].sum())
    devices = np.array(solution.devices)
    assert ((devices < 0) == (patterns == ON_CPU)).all()
    assert (np.diff(devices) >= 0).all()  # the CPU first, then one device after the other
    for d, budget in enumerate(problem.budget):
        mine = devices == d
        used = problem.nbytes[layers, patterns][mine].sum()
        assert used + problem.compute[patterns].max() <= budget


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_the_best_is_the_best_of_all(seed, n_layer, n_pattern):
    problem = random_problem(seed, n_layer, n_pattern)
    best, found = exhaustive(problem), search(problem)
    if best is None:
        assert not found
        return
    for solution in found:
        check(problem, solution)
    # small numbers are exact in steps of memory: nothing is lost by rounding
    assert problem.budget[0] < STEPS
    assert found[0].seconds == pytest.approx(best.seconds)


@given(st.integers(0, 10_000), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_two_devices_against_trying_every_split(seed, n_layer):
    problem = random_problem(seed, n_layer, 3, n_devices=2)
    least = np.inf
    for patterns in itertools.product(range(3), repeat=n_layer):
        n_cpu = sum(p == ON_CPU for p in patterns)
        if ON_CPU in patterns[n_cpu:]:
            continue
        for cut in range(n_cpu, n_layer + 1):
            devices = (-1,) * n_cpu + (0,) * (cut - n_cpu) + (1,) * (n_layer - cut)
            chosen = np.array(patterns)
            seconds = problem.seconds[np.arange(n_layer), chosen].sum()
            try:
                check(problem, Solution(float(seconds), patterns, devices))
            except AssertionError:
                continue
            least = min(least, seconds)
    found = search(problem)
    for solution in found:
        check(problem, solution)
    assert (found[0].seconds if found else np.inf) == pytest.approx(least)


def test_few_runs_are_there_too():
    problem = random_problem(3, 40, 5)
    found = search(problem)
    runs = [len(list(itertools.groupby(s.patterns))) for s in found]
    assert min(runs) <= 3
    for solution in found:
        check(problem, solution)
    assert found == sorted(found, key=lambda s: s.seconds)


def test_what_cannot_be_is_not_found():
    p = random_problem(1, 4, 3)
    nothing = Problem(p.seconds, p.nbytes, p.compute + 1, np.array([0.0]))
    assert search(nothing) == []
    only_cpu = Problem(p.seconds, p.nbytes + 1, p.compute * 0, np.array([0.0]))
    assert [s.devices for s in search(only_cpu)] == [(-1,) * 4]


def test_equal_layers_are_sorted_within_their_device():
    solution = Solution(1.0, (0, 2, 1, 2, 1, 1, 2), (-1, 0, 0, 0, 1, 1, 1))
    sorted_ = tidy(solution, "aababba")
    assert sorted_.patterns == (0, 2, 1, 2, 1, 1, 2)
    same = tidy(solution, "a" * 7)
    assert same.patterns == (0, 1, 2, 2, 1, 1, 2) and same.devices == solution.devices
