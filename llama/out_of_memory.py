"""What to tell people when something does not fit: what, how much is missing, what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from pyggml.backend import BufferType, Device, DeviceType
from pyggml.errors import OutOfMemory
from pyggml.llama.memory_table import DeviceUse

MIB = 1 << 20


class Purpose(Enum):
    """What memory is wanted for; the value names it in a sentence."""

    WEIGHTS = "the weights"
    CACHE = "keys and values"
    COMPUTE = "computing a batch"


# flags that help; {experts} is for models that have some, {layers} for devices that have layers
_WAYS = {
    Purpose.WEIGHTS: ("{layers}", "{experts}"),
    Purpose.CACHE: (
        "a smaller context (-c)",
        "smaller keys and values (-ctk q8_0 -ctv q8_0)",
        "{layers}",
    ),
    Purpose.COMPUTE: ("a smaller batch (-ub)", "a smaller context (-c)", "{offload}"),
}
_PLACEHOLDERS = {
    "{layers}": "fewer layers there (-ngl)",
    "{experts}": "more experts on the CPU (-ncmoe, -cmoe)",
    "{offload}": "no work on weights of the CPU (--no-op-offload)",
}
_ON_CPU = {
    Purpose.WEIGHTS: ("weights that stay in the mapped file (--no-repack)", "a smaller model")
}


def does_not_fit(
    purpose: Purpose, buft: BufferType, needed: int, *, has_experts: bool, detail: str = ""
) -> OutOfMemory:
    """The error for a buffer that was refused."""
    device = buft.device
    free = device.memory().free
    text = f"{purpose.value}{detail} need {mib(needed)} of {buft.name}, {mib(free)} are free: "
    text += f"{mib(max(0, needed - free))} are missing"
    return OutOfMemory(f"{text}\n{advice([purpose], device, has_experts=has_experts)}")


def advice(purposes: Iterable[Purpose], device: Device, *, has_experts: bool) -> str:
    """The flags that make room on a device, the most useful first."""
    on_cpu = device.type == DeviceType.CPU
    wanted = (
        way
        for purpose in purposes
        for way in (_ON_CPU.get(purpose, _WAYS[purpose]) if on_cpu else _WAYS[purpose])
    )
    left_out = {"{layers}", "{offload}"} if on_cpu else set()
    if not has_experts:
        left_out |= {"{experts}"}
    ways = [_PLACEHOLDERS.get(way, way) for way in dict.fromkeys(wanted) if way not in left_out]
    return f"what helps: {', '.join(ways)}"


def shortage(use: DeviceUse, device: Device, *, has_experts: bool) -> str:
    """Two lines about a device that a plan asks too much of."""
    own = use.use
    return (
        f"{use.name} lacks {mib(-use.free)}: {mib(own.own)} are wanted (model {mib(own.model)}, "
        f"context {mib(own.context)}, compute {mib(own.compute)})\n"
        f"{advice(Purpose, device, has_experts=has_experts)}"
    )


def shortages(
    uses: Sequence[DeviceUse], devices: Sequence[Device], *, has_experts: bool
) -> tuple[str, ...]:
    """Of all devices that a plan asks too much of."""
    return tuple(
        shortage(use, device, has_experts=has_experts)
        for use, device in zip(uses, devices, strict=True)
        if use.free < 0
    )


def mib(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / MIB:,.1f} MiB"
