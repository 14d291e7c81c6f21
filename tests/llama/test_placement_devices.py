"""Which devices are used, and which layer goes to which of them."""

from typing import Any

import numpy as np
import pytest
from fakes import FakeDevice, cpu
from hypothesis import given
from hypothesis import strategies as st

from pyggml.backend import DeviceType
from pyggml.errors import ConfigError
from pyggml.llama.placement_devices import (
    ON_CPU,
    assign_layers,
    choose_devices,
    shares_of,
)
from pyggml.llama.placement_params import (
    PlacementParams,
    parse_devices,
    parse_gpu_layers,
    parse_tensor_split,
)

CUDA = [FakeDevice(f"CUDA{i}", total=(i + 1) << 30) for i in range(3)]
CPU = cpu()
BLAS = FakeDevice("BLAS", DeviceType.ACCEL)
IGPUS = [FakeDevice(f"IGPU{i}", DeviceType.IGPU) for i in range(2)]


def chosen(available: list[FakeDevice] | None = None, **params: Any) -> list[str]:
    devices = [*CUDA, CPU] if available is None else available
    return [d.name for d in choose_devices(PlacementParams(**params), devices)]


# ---------------------------------------------------------------- devices
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, ["CUDA0", "CUDA1", "CUDA2", "CPU"]),
        ({"devices": ("CUDA2", "cuda0")}, ["CUDA2", "CUDA0", "CPU"]),
        ({"devices": ()}, ["CPU"]),
        ({"split_mode": "none"}, ["CUDA0", "CPU"]),
        ({"split_mode": "none", "main_gpu": 2}, ["CUDA2", "CPU"]),
        ({"split_mode": "none", "main_gpu": -1}, ["CPU"]),
        ({"split_mode": "none", "main_gpu": 1, "devices": ("CUDA2", "CUDA0")}, ["CUDA0", "CPU"]),
    ],
)
def test_devices_are_chosen(params: dict[str, Any], expected: list[str]) -> None:
    assert chosen(**params) == expected


def test_order_of_kinds() -> None:
    assert chosen([CPU, BLAS, *IGPUS, *CUDA[:1]]) == ["CUDA0", "BLAS", "CPU"]
    assert chosen([CPU, *IGPUS]) == ["IGPU0", "CPU"]
    assert chosen([CPU]) == ["CPU"]
    assert chosen([CPU], split_mode="none") == ["CPU"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"devices": ("SIM7",)},
            "--device SIM7: no GPU is called so\nthere are: CUDA0, CUDA1, CUDA2",
        ),
        ({"devices": ("CPU",)}, "--device CPU: no GPU is called so"),
        ({"devices": ("CUDA0", "cuda0")}, "cuda0 is named twice"),
        ({"main_gpu": 9}, r"--main-gpu 9: .*\(available devices: 3\)\n0 CUDA0, 1 CUDA1, 2 CUDA2"),
        ({"main_gpu": 3, "split_mode": "none"}, "--main-gpu 3: there is no such GPU"),
        ({"main_gpu": -1}, "--main-gpu -1: there is no such GPU"),
        (
            {"tensor_split": (1.0,) * 4},
            "--tensor-split has 4 shares, more than there are devices: CUDA0, CUDA1",
        ),
    ],
)
def test_devices_that_do_not_exist(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(**params)


def test_without_a_gpu_its_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are no GPUs here, only none"):
        chosen([CPU], devices=("CUDA0",))
    with pytest.raises(ConfigError, match="a model needs the CPU too: there are only CUDA0"):
        chosen(CUDA[:1])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"split_mode": "row"}, "--split-mode row: no device here can hold a matrix in parts"),
        ({"split_mode": "tensor"}, "--split-mode tensor: layers are not computed by several"),
        ({"split_mode": "nonsense"}, "--split-mode nonsense: one of none, layer"),
        ({"n_gpu_layers": -7}, "--gpu-layers -7: a number of layers, auto or all"),
        ({"tensor_split": (1.0, -1.0)}, "--tensor-split 1,-1: shares are 0 or more"),
        ({"tensor_split": (float("nan"),)}, "--tensor-split nan: shares are 0 or more"),
        ({"tensor_split": (1.0,) * 17}, "17 shares, but there can be only 16 devices"),
        ({"fit_target": ()}, "--fit-target : MiB, 0 or more"),
        ({"fit_target": (5, -1)}, "--fit-target 5,-1: MiB, 0 or more"),
        ({"fit_ctx": 0}, "--fit-ctx 0: a number of tokens"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementParams(**params)


def test_flags_are_read() -> None:
    assert [parse_gpu_layers(t) for t in ("0", "12", "auto", "all", "-1", "-2")] == [
        *(0, 12, -1, -2, -1, -2)
    ]
    assert parse_devices("none") == () and parse_devices("A, B") == ("A", "B")
    assert parse_tensor_split("3,1") == parse_tensor_split("3/1") == (3.0, 1.0)
    for parse, text in (
        (parse_gpu_layers, "1.5"),
        (parse_devices, "A,"),
        (parse_tensor_split, "a"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse(text)


# ---------------------------------------------------------------- layers
# by hand, from llama.cpp's rule: 4 layers and the output
@pytest.mark.parametrize(
    ("n_gpu_layers", "shares", "expected"),
    [
        (0, (1,), "....."),
        (1, (1,), "....0"),
        (3, (1,), "..000"),
        (4, (1,), ".0000"),
        (5, (1,), "00000"),
        (999, (1,), "00000"),
        (-1, (1,), "00000"),
        (-2, (1,), "00000"),
        (5, (), "....."),
        (5, (1, 1), "00011"),  # 0, 1/5, 2/5 < 1/2
        (3, (1, 1), "..001"),  # 0, 1/3 < 1/2
        (5, (3, 2), "00011"),
        (5, (0, 1), "11111"),
        (5, (1, 0, 1), "00022"),
        (5, (1, 0), "00000"),
        (5, (1, 1, 1), "00112"),
        (5, (0, 0), "00000"),  # nobody has any room
    ],
)
def test_the_last_layers_go_first(
    n_gpu_layers: int, shares: tuple[float, ...], expected: str
) -> None:
    found = assign_layers(4, n_gpu_layers, shares)
    assert "".join("." if i == ON_CPU else str(i) for i in found) == expected


@given(
    st.integers(1, 200),
    st.integers(-2, 210),
    st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any),
)
def test_shares_are_kept_to_one_layer(n_layer: int, ngl: int, shares: list[int]) -> None:
    found = assign_layers(n_layer, ngl, shares)
    n_gpu = n_layer + 1 if ngl < 0 else min(ngl, n_layer + 1)
    on_cpu, on_gpus = found[: n_layer + 1 - n_gpu], found[n_layer + 1 - n_gpu :]
    assert set(on_cpu) <= {ON_CPU} and len(on_gpus) == n_gpu
    assert list(on_gpus) == sorted(on_gpus)
    for end in range(1, len(shares) + 1):
        wanted = n_gpu * sum(shares[:end]) / sum(shares)
        assert abs(sum(i < end for i in on_gpus) - wanted) < 1 + 1e-3


@given(st.integers(1, 200), st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_counts_of_layers_are_shares_that_give_them(n_layer: int, weights: list[int]) -> None:
    found = assign_layers(n_layer, -2, weights)
    counts = [found.count(i) for i in range(len(weights))]
    assert assign_layers(n_layer, -2, counts) == found


def test_shares_are_given_or_by_free_memory() -> None:
    def shares(*split: float) -> tuple[float, ...]:
        return shares_of(PlacementParams(tensor_split=split), CUDA, CPU)

    assert shares(1, 2, 3) == (1, 2, 3)
    assert shares(1, 2) == (1, 2, 0)
    by_memory = tuple(float(d.memory().free) for d in CUDA)
    assert shares() == shares(0, 0, 0) == by_memory
    np.testing.assert_allclose(np.array(by_memory) / 2**30, (1, 2, 3))


def test_who_does_not_know_its_memory_has_the_hosts() -> None:
    guest = FakeDevice("GUEST", total=0)
    assert shares_of(PlacementParams(), [guest, CUDA[0]], CPU)[0] == CPU.memory().free


def test_a_single_gpu_has_no_shares() -> None:
    params = PlacementParams(tensor_split=(0.0, 1.0), split_mode="none", main_gpu=1)
    gpus = choose_devices(params, [*CUDA, CPU])[:-1]
    assert [gpu.name for gpu in gpus] == ["CUDA1"]
    assert assign_layers(4, 5, shares_of(params, gpus, CPU)) == (0,) * 5
