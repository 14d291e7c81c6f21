"""What to tell people about a plan that asks a device for more than it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyggml.backend import Device, DeviceType
from pyggml.llama.description import mib
from pyggml.llama.memory_table import DeviceUse

ON_GPU = ("fewer layers there (-ngl)",)
EXPERTS = ("more experts on the CPU (-ncmoe, -cmoe)",)
ON_CPU = ("weights that stay in the mapped file (--no-repack)", "a smaller model")
ALWAYS = (
    "a smaller context (-c)",
    "smaller keys and values (-ctk q8_0 -ctv q8_0)",
    "a smaller batch (-ub)",
)
OFFLOADED = ("no products with weights of the CPU (--no-op-offload)",)


def shortages(
    uses: Sequence[DeviceUse], devices: Sequence[Device], *, has_experts: bool
) -> Iterator[str]:
    """For each device that lacks memory: how much, what for, and which flags help."""
    for use, device in zip(uses, devices, strict=True):
        if use.free < 0:
            own = use.use
            yield (
                f"{use.name} lacks {mib(-use.free)}: {mib(own.own)} are wanted "
                f"(model {mib(own.model)}, context {mib(own.context)}, "
                f"compute {mib(own.compute)})\n"
                f"what helps: {', '.join(_ways(device, has_experts=has_experts))}"
            )


def _ways(device: Device, *, has_experts: bool) -> Sequence[str]:
    if device.type == DeviceType.CPU:
        return (*ON_CPU, *ALWAYS)
    return (*ON_GPU, *(EXPERTS if has_experts else ()), *ALWAYS, *OFFLOADED)
