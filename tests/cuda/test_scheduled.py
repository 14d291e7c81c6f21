"""Graphs cut over simulated cards and the CPU give the bits of the CPU alone."""

import numpy as np
import pytest
from simulated import Chain, simulation

from pyggml.dtypes import GGMLType

SPEC = "rtx3060:64MiB"


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.Q8_0, GGMLType.Q4_1])
@pytest.mark.parametrize("n_tokens", [1, 5, 40])
def test_any_placement_gives_the_bits_of_the_cpu(type: GGMLType, n_tokens: int) -> None:
    sim = simulation(SPEC, SPEC)
    first, second, cpu = sim.devices
    alone = Chain([cpu] * 6, n_tokens, type)
    want_sched = alone.scheduler([cpu])
    want = [alone.run(want_sched, seed) for seed in range(3)]
    assert not np.isnan(want).any()
    for homes in (
        [first] * 6,
        [first, cpu] * 3,
        [first, second, cpu] * 2,
        [cpu, cpu, second, first, first, cpu],
    ):
        chain = Chain(homes, n_tokens, type)
        sched = chain.scheduler(sim.devices)
        assert {sched.backends[s.backend_id].name for s in sched.splits} >= {
            home.name for home in homes
        } - ({"CPU"} if n_tokens >= 32 else set())
        # three times: run, captured, started again
        got = [chain.run(sched, seed) for seed in range(3)]
        assert [g.tobytes() for g in got] == [w.tobytes() for w in want]
