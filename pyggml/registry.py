"""Finds backends by name: the core imports none of them."""

import functools
import importlib

from pyggml.backend import Device, DeviceType, Registry
from pyggml.errors import UserError

# In order of priority; the CPU is always last. Each module offers `registry() -> Registry`.
BACKENDS = ("pyggml.backends.cpu.device",)


@functools.cache
def registries() -> tuple[Registry, ...]:
    """One registry per backend."""
    return tuple(importlib.import_module(name).registry() for name in BACKENDS)


def devices() -> list[Device]:
    """All devices, best first, the CPU last."""
    return [device for registry in registries() for device in registry.devices()]


def device(name: str) -> Device:
    """The device of that name, whatever its case; UserError lists what exists."""
    for d in devices():
        if d.name.lower() == name.lower():
            return d
    known = ", ".join(d.name for d in devices())
    raise UserError(f"no device is called {name!r}\nthere are: {known}")


def cpu_device() -> Device:
    """The host."""
    return next(d for d in reversed(devices()) if d.type == DeviceType.CPU)
