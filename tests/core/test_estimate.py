"""The estimate of a schedule, by hand."""

from dataclasses import replace

import pytest
from fakes import FakeDevice, cpu
from sched_graphs import I32, input_leaf, large_batch, scheduler, weight

from pyggml import build
from pyggml.backend import Caps
from pyggml.cost import Rates, expected_experts, node_cost
from pyggml.errors import UserError
from pyggml.estimate import Estimate, estimate
from pyggml.graph import build_graph
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.sched_run import EXPERT_OVERRUN
from pyggml.tensor import Tensor, new_tensor

HOST = Rates(gbs=10, gflops=20, node_latency=1e-6)
CARD = Rates(
    gbs=100,
    gflops=1000,
    node_latency=2e-6,
    submit=3e-6,
    sync=5e-6,
    h2d_gbs=4,
    d2h_gbs=5,
    pageable=0.5,
    copy_latency=7e-6,
)
RATES = {"CPU": HOST, "CUDA0": CARD, "CUDA1": CARD}


def split(sched: Scheduler, *results: Tensor) -> Scheduler:
    sched.reserve_size(build_graph([r.as_output() for r in results]))
    return sched


def modelled(sched: Scheduler, *results: Tensor, repeated: bool = True) -> Estimate:
    return estimate(split(sched, *results), rates=RATES, repeated=repeated)


def seconds(rates: Rates, *nodes: Tensor) -> float:
    return sum(rates.seconds(node_cost(node)) for node in nodes)


def copying(nbytes: float, gbs: float) -> float:
    return CARD.copy_latency + nbytes / (gbs * CARD.pageable * 1e9)


def test_the_host_alone_takes_the_sum_of_its_nodes() -> None:
    host = cpu()
    a = build.mul_mat(weight(host, 64, 32, name="w"), input_leaf(64, 2, name="x"))
    b = build.scale(a, 2.0)
    found = modelled(scheduler(host), b)
    assert found.seconds == pytest.approx(seconds(HOST, a, b))
    assert found.n_syncs == 0 and found.h2d_bytes == found.d2h_bytes == 0
    assert found.device("CPU").n_nodes == 2 and found.device("CPU").n_splits == 1


@pytest.mark.parametrize("repeated", [True, False])
def test_a_round_trip_by_its_calls(repeated: bool) -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    x = input_leaf(64, 2, name="x")
    a = build.mul_mat(weight(gpu, 64, 4096, name="w"), x)
    b = build.mul_mat(weight(gpu, 4096, 32, name="v"), a)
    c = build.mul_mat(weight(host, 32, 8, name="u"), b)
    found = modelled(scheduler(gpu, host), c, repeated=repeated)
    now = CARD.sync  # before the input is written
    now += CARD.submit + copying(x.nbytes, CARD.h2d_gbs) + CARD.sync  # not pinned: no overlap
    if repeated:
        now += CARD.submit + seconds(CARD, a, b)
    else:  # the second launch is called while the first node runs
        assert seconds(CARD, a) > CARD.submit
        now += CARD.submit + seconds(CARD, a, b)
    now += CARD.sync  # b is ready
    now += CARD.submit + copying(b.nbytes, CARD.d2h_gbs) + 2 * CARD.sync
    now += seconds(HOST, c)
    now += CARD.sync  # in the end
    assert found.seconds == pytest.approx(now)
    assert (found.h2d_bytes, found.d2h_bytes, found.n_syncs) == (x.nbytes, b.nbytes, 6)
    assert [s.backend for s in found.splits] == ["CUDA0", "CPU"]
    assert found.device("CUDA0").compute == pytest.approx(seconds(CARD, a, b))


def test_small_nodes_wait_for_the_host_unless_they_are_replayed() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()

    def time(n: int, *, repeated: bool) -> float:
        x = input_leaf(4, name="x")
        a = build.mul(x, weight(gpu, 4, name="w"))
        for _ in range(n):
            a = build.scale(a, 2.0)
        return modelled(scheduler(gpu, host), a, repeated=repeated).seconds

    once = CARD.seconds(node_cost(build.scale(new_tensor(build.F32, 4), 2.0)))
    assert once < CARD.submit
    assert time(30, repeated=True) - time(20, repeated=True) == pytest.approx(10 * once)
    slower = time(30, repeated=False) - time(20, repeated=False)
    assert slower == pytest.approx(10 * CARD.submit)


@pytest.mark.parametrize("n_tokens", [32, 200])
def test_of_experts_in_host_memory_the_expected_ones_are_copied(n_tokens: int) -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    n_expert, n_used, expert = 64, 2, 4 * 16 * 32
    w = weight(host, 16, 32, n_expert, name="exps")
    ids = new_tensor(I32, n_used, n_tokens, name="ids").as_input()
    y = build.mul_mat_id(w, input_leaf(16, 1, n_tokens, name="x"), ids)
    found = modelled(scheduler(gpu, host), y)
    used = expected_experts(n_expert, n_used, n_tokens)
    runs = used * (1 - (used - 1) / n_expert)
    experts = used * expert + (runs - used / n_expert) * EXPERT_OVERRUN
    inputs = 4 * 16 * n_tokens + 4 * n_used * n_tokens
    assert found.h2d_bytes == pytest.approx(experts + inputs)
    assert found.device("CUDA0").h2d > experts / (CARD.h2d_gbs * 1e9)


def test_devices_that_exchange_data_do_without_the_host() -> None:
    first, second = (FakeDevice(f"CUDA{i}", has_events=True) for i in range(2))
    host = cpu()
    a = build.mul_mat(weight(first, 64, 64, name="w"), input_leaf(64, 2, name="x"))
    b = build.mul_mat(weight(second, 64, 64, name="v"), a)
    sched = split(scheduler(first, second, host), b)
    through = estimate(sched, rates=RATES)  # in the order of the streams, in two steps
    peers = {**RATES, **dict.fromkeys(("CUDA0", "CUDA1"), replace(CARD, peer_gbs=20))}
    direct = estimate(sched, rates=peers)
    assert through.peer_bytes == direct.peer_bytes == a.nbytes
    assert direct.seconds < through.seconds
    first.caps = second.caps = Caps()
    bounced = estimate(sched, rates=peers)
    assert bounced.peer_bytes == 0 and bounced.d2h_bytes == a.nbytes
    assert bounced.n_syncs > direct.n_syncs


def test_a_device_without_rates_is_named() -> None:
    sched = split(scheduler(FakeDevice("CUDA0"), cpu()), build.scale(input_leaf(4, name="x"), 2.0))
    with pytest.raises(UserError, match="CUDA0 cannot be modelled"):
        estimate(sched, rates={"CPU": HOST})


def test_pinned_memory_is_copied_at_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    w = weight(host, 64, 512, name="w")
    x = input_leaf(64, 64, name="x")
    sched = split(scheduler(gpu, host), build.mul_mat(w, x))
    assert w in sched.splits[0].inputs and sched.splits[0].graph.nodes[0].op == Op.MUL_MAT
    slow = estimate(sched, rates=RATES).device("CUDA0").h2d
    monkeypatch.setattr(gpu, "host_buffer_type", host.buffer_type)
    fast = estimate(sched, rates=RATES).device("CUDA0").h2d
    nbytes = w.nbytes + x.nbytes
    assert slow - fast == pytest.approx(nbytes / (CARD.h2d_gbs * 1e9))
