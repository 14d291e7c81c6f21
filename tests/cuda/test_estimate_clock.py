"""The estimate of a schedule beside the clock of a simulated machine that runs it."""

import itertools

import numpy as np
import pytest

from pyggml import build
from pyggml.backend import Device, Usage, alloc_tensors, tensor_set
from pyggml.backends.cuda.simulate import Simulation
from pyggml.cost import Rates
from pyggml.dtypes import GGMLType
from pyggml.estimate import estimate
from pyggml.graph import Graph, build_graph
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

F32, I32 = build.F32, build.I32
HOST = Rates(gbs=20, gflops=50, node_latency=1e-6, gbs_of={GGMLType.F32: 15.0})


def write(tensor: Tensor, values: np.ndarray) -> None:
    tensor_set(tensor, memoryview(np.ascontiguousarray(values).reshape(-1)).cast("B"))


def weight(device: Device, *ne: int) -> Tensor:
    tensor = new_tensor(F32, *ne)
    buffer = alloc_tensors([tensor], device.buffer_type())
    assert buffer is not None
    buffer.set_usage(Usage.WEIGHTS)
    write(tensor, np.random.default_rng(0).standard_normal(tensor.ne[::-1], np.float32))
    return tensor


def scheduler(simulation: Simulation, *, parallel: bool = False) -> Scheduler:
    backends = [device.init_backend() for device in simulation.devices]
    return Scheduler(backends, parallel=parallel)


def clocked(simulation: Simulation, sched: Scheduler, graph: Graph) -> float:
    """Seconds of the clock for one run."""
    start = simulation.clock.now
    sched.graph_compute(graph)
    return simulation.clock.now - start


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("cards", [("rtx3060", "rtx4090"), ("a100", "a100")])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_a_chain_over_three_devices_takes_what_the_estimate_says(cards, order, parallel) -> None:
    simulation = Simulation(cards, cpu_rates=HOST)
    x = h = new_tensor(F32, 64, 4).as_input()
    for i in (*order, order[0]):
        h = build.mul_mat(weight(simulation.devices[i], 64, 64), h)
        h = build.scale(build.rms_norm(h, 1e-5), 2.0)
    sched, graph = scheduler(simulation, parallel=parallel), build_graph([h.as_output()])
    sched.alloc_graph(graph)
    write(x, np.ones((4, 64), np.float32))
    first, *again = [clocked(simulation, sched, graph) for _ in range(4)]
    if not parallel:  # the first run waits for events that nobody has recorded
        assert estimate(sched, repeated=False).seconds == pytest.approx(first)
    assert estimate(sched).seconds == pytest.approx(again[-1])


def test_offloaded_experts_take_about_what_the_estimate_says() -> None:
    n_expert, n_used, n_tokens = 64, 4, 40
    simulation = Simulation(["rtx3060"], cpu_rates=HOST)
    card, host = simulation.devices
    x = new_tensor(F32, 64, 1, n_tokens).as_input()
    ids = new_tensor(I32, n_used, n_tokens).as_input()
    h = build.mul_mat_id(weight(host, 64, 512, n_expert), x, ids)
    h = build.mul_mat_id(weight(host, 512, 64, n_expert), h, ids)
    h = build.mul_mat(weight(card, 64, 32), h)
    sched, graph = scheduler(simulation), build_graph([h.as_output()])
    sched.alloc_graph(graph)
    assert [s.backend_id for s in sched.splits] == [0, 0]
    rng = np.random.default_rng(1)
    write(x, rng.standard_normal((n_tokens, 1, 64), np.float32))
    times = []
    for _ in range(8):
        draws = [rng.permutation(n_expert)[:n_used] for _ in range(n_tokens)]
        write(ids, np.array(draws, np.int32))
        times.append(clocked(simulation, sched, graph))
    # the first run launches node by node
    assert estimate(sched).seconds == pytest.approx(float(np.mean(times[2:])), rel=0.05)
