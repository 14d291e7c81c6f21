"""Graphs cut over simulated cards and the CPU give the bits of the CPU alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import F32, WIDTH, Chain, read, simulation, weight, write

from pyggml import build
from pyggml.backend import Device
from pyggml.backends.cuda.backend import CudaBackend
from pyggml.backends.cuda.driver import DeviceError
from pyggml.backends.cuda.simulate import Simulation
from pyggml.dtypes import GGMLType
from pyggml.graph import build_graph
from pyggml.sched import Scheduler
from pyggml.sched_run import EXPERT_OVERRUN
from pyggml.tensor import Tensor, new_tensor

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


homes = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(homes, st.integers(1, 40), st.booleans(), st.booleans())
def test_random_placements(places: list[int], n: int, parallel: bool, offload: bool) -> None:
    sim = simulation(SPEC, SPEC)
    cpu = sim.devices[2]
    alone = Chain([cpu] * len(places), n, GGMLType.Q8_0)
    want_sched = alone.scheduler([cpu])
    chain = Chain([sim.devices[i] for i in places], n, GGMLType.Q8_0)
    sched = chain.scheduler(sim.devices, parallel=parallel, op_offload=offload)
    for seed in range(3):
        assert chain.run(sched, seed).tobytes() == alone.run(want_sched, seed).tobytes()


# ---------------------------------------------------------------- weights that come for a batch
@pytest.mark.parametrize(
    ("n_tokens", "offload", "where"),
    [
        (31, True, ["CPU"]),
        (32, True, ["CUDA0"] * 4),
        (33, True, ["CUDA0"] * 4),
        (32, False, ["CPU"]),
    ],
)
def test_large_batches_take_their_weights_along(
    n_tokens: int, offload: bool, where: list[str]
) -> None:
    sim = simulation(SPEC)
    cpu = sim.devices[1]
    chain = Chain([cpu] * 3, n_tokens)
    sched = chain.scheduler(sim.devices, op_offload=offload)
    assert [sched.backends[s.backend_id].name for s in sched.splits] == where
    counters = sim.driver.cards[0].counters
    before = counters.h2d_bytes
    got = chain.run(sched)
    inputs = 4 * WIDTH * n_tokens
    weights = 3 * 4 * WIDTH * WIDTH if where[0] == "CUDA0" else 0
    assert counters.h2d_bytes - before == weights + (inputs if weights else 0)
    alone = Chain([cpu] * 3, n_tokens)
    assert got.tobytes() == alone.run(alone.scheduler([cpu])).tobytes()


class Experts:
    """Gate and up of a mixture: experts in one place, the rest in another."""

    n_expert, n_used, k, n = 16, 2, 64, 96

    def __init__(self, home: Device, n_tokens: int, type: GGMLType = GGMLType.Q8_0) -> None:
        shape = (self.k, self.n, self.n_expert)
        self.x = new_tensor(F32, self.k, 1, n_tokens, name="x").as_input()
        self.ids = new_tensor(build.I32, self.n_used, n_tokens, name="ids").as_input()
        self.weights = [weight(home, *shape, seed=i, type=type, name=f"exps{i}") for i in (0, 1)]
        gate, up = (build.mul_mat_id(w, self.x, self.ids) for w in self.weights)
        self.result = build.mul(gate, up).named("result").as_output()
        self.graph = build_graph([self.result])

    @property
    def expert_bytes(self) -> int:
        return self.weights[0].nb[2]

    def run(self, sched: Scheduler, experts: Sequence[int], seed: int = 0) -> np.ndarray:
        """The result if the tokens use only these experts, all of them."""
        rng = np.random.default_rng(seed)
        write(self.x, rng.standard_normal(self.x.ne[::-1]).astype(np.float32))
        n_tokens = self.ids.ne[1]
        table = rng.choice(experts, (n_tokens, self.n_used)).astype(np.int32)
        table.ravel()[: len(experts)] = experts
        write(self.ids, table)
        sched.graph_compute(self.graph)
        return read(self.result)


def experts_alone(sim: Simulation, n_tokens: int, used: Sequence[int], seed: int) -> bytes:
    cpu = sim.devices[-1]
    alone = Experts(cpu, n_tokens)
    sched = Scheduler([cpu.init_backend()])
    sched.alloc_graph(alone.graph)
    return alone.run(sched, used, seed).tobytes()


USED: list[tuple[list[int], int, int]] = [  # experts, runs of neighbours, overruns
    ([3], 1, 1),
    ([0, 1, 2, 7, 8, 15], 3, 2),
    ([15], 1, 0),
    ([1, 3, 5], 3, 3),
    (list(range(16)), 1, 0),
]


@pytest.mark.parametrize(("used", "n_runs", "n_overruns"), USED)
def test_only_the_experts_in_use_are_copied(used: list[int], n_runs: int, n_overruns: int) -> None:
    sim = simulation(SPEC)
    mixture = Experts(sim.devices[1], 32)
    sched = Scheduler([d.init_backend() for d in sim.devices])
    sched.alloc_graph(mixture.graph)
    counters = sim.driver.cards[0].counters
    for seed in range(3):  # also where older experts lie
        bytes_before, copies_before = counters.h2d_bytes, counters.h2d_copies
        got = mixture.run(sched, used, seed)
        assert not np.isnan(got).any()  # the copy's other experts are NaN, or of an earlier batch
        assert got.tobytes() == experts_alone(sim, 32, used, seed)
        per_weight = len(used) * mixture.expert_bytes + n_overruns * EXPERT_OVERRUN
        inputs = mixture.x.nbytes + mixture.ids.nbytes
        assert counters.h2d_bytes - bytes_before == 2 * per_weight + inputs
        assert counters.h2d_copies - copies_before == 2 * n_runs + 2


@pytest.mark.parametrize(("n_tokens", "name"), [(31, "CPU"), (32, "CUDA0")])
def test_batches_of_experts_are_counted_in_tokens(n_tokens: int, name: str) -> None:
    sim = simulation(SPEC)
    mixture = Experts(sim.devices[1], n_tokens)
    sched = Scheduler([d.init_backend() for d in sim.devices])
    sched.alloc_graph(mixture.graph)
    backend = sched.get_tensor_backend(mixture.result)
    assert backend is not None and backend.name == name


# ---------------------------------------------------------------- what tests must be able to find
def test_a_scheduler_that_does_not_wait_gives_other_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = simulation(SPEC)
    card, cpu = sim.devices
    chain = Chain([card, cpu] * 2)
    sched = chain.scheduler(sim.devices)
    want = chain.run(sched).tobytes()
    monkeypatch.setattr(CudaBackend, "synchronize", lambda self: None)
    other = Chain([card, cpu] * 2)
    assert other.run(other.scheduler(sim.devices)).tobytes() != want


def test_a_scheduler_that_does_not_copy_is_caught() -> None:
    sim = simulation(SPEC)
    card, cpu = sim.devices
    x: Tensor = weight(cpu, WIDTH, 3, seed=0)
    y = build.mul_mat(weight(card, WIDTH, WIDTH, seed=1), x)
    graph = build_graph([y])
    buffer = card.buffer_type().alloc_buffer(y.nbytes)
    y.buffer, y.data = buffer, buffer.base
    with pytest.raises(DeviceError, match="which lies in CPU"):
        card.init_backend().graph_compute(graph)
