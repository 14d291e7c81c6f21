"""Which devices a model uses, and which of them each of its layers belongs to."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from pyggml.backend import Device, DeviceType
from pyggml.errors import ConfigError
from pyggml.llama.placement_params import PlacementParams

ON_CPU = -1  # in place of a GPU's position


def is_gpu(device: Device) -> bool:
    """Whether layers are given to it."""
    return device.type in (DeviceType.GPU, DeviceType.IGPU)


def choose_devices(params: PlacementParams, available: Sequence[Device]) -> tuple[Device, ...]:
    """GPUs in order of use, then accelerators, then the CPU. Raises ConfigError."""
    gpus = _wanted(params, available)
    if params.split_mode == "none":
        gpus = _main_gpu(params.main_gpu, gpus)
    else:
        _check_main_gpu(params, gpus)
    if len(params.tensor_split) > len(gpus) and params.split_mode == "layer" and gpus:
        raise ConfigError(
            f"--tensor-split has {len(params.tensor_split)} shares, more than there are devices: "
            f"{_names(gpus)}"
        )
    accelerators = [d for d in available if d.type == DeviceType.ACCEL]
    cpus = [d for d in available if d.type == DeviceType.CPU]
    if not cpus:
        raise ConfigError(f"a model needs the CPU too: there are only {_names(available)}")
    return (*gpus, *accelerators, *cpus)


def _wanted(params: PlacementParams, available: Sequence[Device]) -> list[Device]:
    gpus = [d for d in available if is_gpu(d)]
    if params.devices is None:
        # processors with graphics of their own are for machines that have nothing better
        return [d for d in gpus if d.type == DeviceType.GPU] or gpus[:1]
    named = {d.name.lower(): d for d in gpus}
    chosen = []
    for name in params.devices:
        device = named.get(name.lower())
        if device is None:
            known = (
                f"there are: {_names(gpus)}, none" if gpus else "there are no GPUs here, only none"
            )
            raise ConfigError(f"--device {name}: no GPU is called so\n{known}")
        if device in chosen:
            raise ConfigError(f"--device {','.join(params.devices)}: {name} is named twice")
        chosen.append(device)
    return chosen


def _main_gpu(index: int, gpus: list[Device]) -> list[Device]:
    if index < 0 or not gpus:
        return []
    if index >= len(gpus):
        raise ConfigError(_no_main_gpu(index, gpus))
    return [gpus[index]]


def _check_main_gpu(params: PlacementParams, gpus: list[Device]) -> None:
    if gpus and not 0 <= params.main_gpu < len(gpus):
        raise ConfigError(_no_main_gpu(params.main_gpu, gpus))


def _no_main_gpu(index: int, gpus: list[Device]) -> str:
    numbered = ", ".join(f"{i} {d.name}" for i, d in enumerate(gpus))
    return f"--main-gpu {index}: there is no such GPU (available devices: {len(gpus)})\n{numbered}"


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(d.name for d in devices)


# ---------------------------------------------------------------- layers
def shares_of(params: PlacementParams, gpus: Sequence[Device], cpu: Device) -> tuple[float, ...]:
    """What part of the layers each GPU gets: as given, or by free memory."""
    if any(params.tensor_split) and len(gpus) > 1:
        missing = len(gpus) - len(params.tensor_split)
        return (*params.tensor_split, *(0.0,) * missing)
    memories = [gpu.memory() for gpu in gpus]
    # llama.cpp: who does not know its memory is a guest in the host's
    return tuple(float((m if m.total else cpu.memory()).free) for m in memories)


def assign_layers(n_layer: int, n_gpu_layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """For each layer, and last for the output, the position of its GPU or ON_CPU.

    The last layers go to GPUs first, and the output is the very last. llama.cpp's arithmetic, in
    float32 as there.
    """
    n_all = n_layer + 1
    offloaded = min(n_all if n_gpu_layers < 0 else n_gpu_layers, n_all) if len(shares) else 0
    if offloaded == 0:
        return (ON_CPU,) * n_all
    ends = _ends(shares)
    first = n_all - offloaded
    return tuple(
        ON_CPU if il < first else bisect.bisect_right(ends, _fraction(il - first, offloaded))
        for il in range(n_all)
    )


def _ends(shares: Sequence[float]) -> list[float]:
    """Where each device's part of 0..1 ends."""
    sums = np.cumsum(np.array(shares, np.float32), dtype=np.float32)
    if not sums[-1]:  # nobody has any memory left: the first one will say so
        return [1.0] * len(shares)
    ends: list[float] = (sums / sums[-1]).tolist()
    return ends


def _fraction(i: int, n: int) -> float:
    return float(np.float32(i) / np.float32(n))
