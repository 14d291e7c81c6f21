"""Rates of the CPU: what is measured, and that it is measured once."""

import json

import pytest

from pyggml import build
from pyggml.backend import Usage, alloc_tensors
from pyggml.backends.cpu import calibrate
from pyggml.backends.cpu.device import CpuDevice
from pyggml.cost import node_cost
from pyggml.dtypes import GGMLType as T
from pyggml.tensor import new_tensor
from pyggml.threads import ThreadParams

SECONDS = 0.004


@pytest.fixture
def device(tmp_path, monkeypatch):
    """The host with rates of its own, and a clock that shows the same for every run."""
    device = CpuDevice()
    monkeypatch.setattr(
        calibrate, "_file", lambda _, threads: tmp_path / f"rates-x-t{threads.n_threads}.json"
    )
    monkeypatch.setattr(calibrate, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "MOST_BYTES", 1 << 20)

    def timed(run):
        run()
        return SECONDS

    monkeypatch.setattr(calibrate, "_timed", timed)
    monkeypatch.setattr(calibrate, "_is_quiet", lambda: True)
    return device


@pytest.mark.parametrize("type", [T.F16, T.Q4_0, T.Q6_K])
def test_rates_are_amounts_by_time(device, type):
    rates = device.rates(ThreadParams(1))
    row = type.row_size(calibrate.K)
    rows = max(calibrate.ROWS, (1 << 20) // row // calibrate.ROWS * calibrate.ROWS)
    for mapping in (rates.gbs_of, rates.repacked_gbs_of):
        if type in mapping:
            assert mapping[type] == pytest.approx(1e-9 * row * rows / SECONDS)
    flops = 2 * calibrate.K * calibrate.ROWS * calibrate.COLUMNS
    assert rates.gflops_of[type] == pytest.approx(1e-9 * flops / SECONDS)
    assert rates.node_latency == pytest.approx(SECONDS / calibrate.SMALL_NODES)
    pairs = calibrate.KEYS * calibrate.QUERIES * calibrate.HEADS
    assert rates.attention_gflops == pytest.approx(1e-9 * 4 * calibrate.HEAD * pairs / SECONDS)
    assert rates.gbs > 0 and rates.gflops > 0 and rates.measured


def test_what_is_known_is_not_measured_again(device, monkeypatch):
    first = device.rates(ThreadParams(1))
    expected = first.repacked_gbs_of[T.Q8_0], first.gflops_of[T.F16], first.gbs

    def again(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibrate, "_timed", again)
    monkeypatch.setattr(calibrate, "Probe", again)
    rates = device.rates(ThreadParams(1))
    assert (rates.repacked_gbs_of[T.Q8_0], rates.gflops_of[T.F16], rates.gbs) == expected
    with pytest.raises(AssertionError, match="again"):
        device.rates(ThreadParams(2))  # other threads, other rates
    with pytest.raises(AssertionError, match="again"):
        _ = rates.gbs_of[T.Q8_0]


def test_what_a_busy_machine_has_told_is_asked_again(device, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_is_quiet", lambda: False)
    clock, seconds = [1e9], [0.004]
    monkeypatch.setattr(calibrate.time, "time", lambda: clock[0])
    monkeypatch.setattr(calibrate, "_timed", lambda run: (run(), seconds[0])[1])

    def measured():
        rates = device.rates(ThreadParams(1))
        return rates.gbs_of[T.Q8_0], rates.node_latency

    first = measured()
    seconds[0] = 0.002
    assert measured() == first  # not yet
    clock[0] += calibrate.AGAIN
    assert measured() == pytest.approx((2 * first[0], first[1] / 2))
    seconds[0] = 0.008  # a disturbance
    monkeypatch.setattr(calibrate, "_is_quiet", lambda: True)
    clock[0] += calibrate.AGAIN
    assert measured() == pytest.approx((2 * first[0], first[1] / 2))
    seconds[0] = 0.001
    clock[0] += calibrate.AGAIN
    assert measured() == pytest.approx((2 * first[0], first[1] / 2))  # of a quiet machine
    (path,) = tmp_path.glob("rates-*-t1.json")
    assert not any(name.startswith("busy") for name in json.loads(path.read_text()))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"read_gbs": "fast"}', '{"read_gbs": -1}'])
def test_a_spoilt_file_is_measured_anew(device, tmp_path, text):
    good = device.rates(ThreadParams(1))
    (path,) = tmp_path.glob("rates-*-t1.json")
    path.write_text(text)
    assert device.rates(ThreadParams(1)).node_latency == good.node_latency
    assert set(json.loads(path.read_text())) >= {"read_gbs", "gflops", "node_latency"}


def test_rates_are_kept_beside_the_kernels():
    device = CpuDevice()
    device.rates(ThreadParams(1))
    path = device.library.folder()
    assert list(path.glob("rates-*-t1.json"))
    assert device.library.addresses(["probe_read"])
    assert path == device.library.folder()


def test_types_that_cannot_be_multiplied_are_not_there(device):
    rates = device.rates(ThreadParams(1))
    assert T.I32 not in rates.gbs_of and T.F16 not in rates.repacked_gbs_of
    assert rates.gbs_of.get(T.I32, 5.0) == 5.0
    assert T.Q4_K in rates.gbs_of and T.Q4_K in rates.repacked_gflops_of
    assert len(rates.gbs_of) == len(list(rates.gbs_of)) > 20


def test_the_cost_of_a_product_says_whether_its_weights_are_repacked(device):
    for buft, repacked in (
        (device.buffer_type(), False),
        (device.extra_buffer_types()[0], True),
    ):
        weights = new_tensor(T.Q4_0, 64, 16)
        buffer = alloc_tensors([weights], buft)
        buffer.set_usage(Usage.WEIGHTS)
        cost = node_cost(build.mul_mat(weights, new_tensor(T.F32, 64, 1)))
        assert cost.repacked == repacked
        buffer.free()


def test_what_is_expected_is_compiled_at_once(device, monkeypatch):
    """Afterwards no measurement asks for a kernel that was not asked for before."""
    asked: list[set[str]] = []
    addresses = device.library.addresses

    def spy(names, *rest):
        asked.append(set(names))
        return addresses(names, *rest)

    monkeypatch.setattr(device.library, "addresses", spy)
    rates = device.rates(ThreadParams(2))
    general = asked[0]
    assert set().union(*asked) == general
    asked.clear()
    rates.expect({T.Q4_0, T.F16, T.I32})
    (at_once,) = asked
    for mapping in (rates.gbs_of, rates.gflops_of, rates.repacked_gbs_of, rates.repacked_gflops_of):
        for type in {T.Q4_0, T.F16} & set(mapping):
            assert mapping[type] > 0
    assert set().union(*asked) == at_once
    asked.clear()
    rates.expect({T.Q4_0, T.F16})
    assert not asked  # it is known by now
