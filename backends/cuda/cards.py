"""Cards that can be simulated: their published figures, and what of these is reached in practice.

Sources: the makers' data sheets and architecture papers (memory, its bandwidth, F32 and tensor
throughput, compute capability, PCIe generation and lanes). Laptop parts vary with their power
limit: the figures are those of a common one. The shares reached are chosen so that the model comes
near to what people report of llama.cpp on such cards (tests/cuda/test_published.py); nothing here
has been measured by pyggml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyggml.backend import NO_LIMIT
from pyggml.backends.cuda.driver import DeviceProps
from pyggml.cost import Rates

GIB, MIB = 1 << 30, 1 << 20

# shares of the published figures
MEMORY_REACHED = 0.82
F32_REACHED = 0.6
# products are computed in int8, which GeForce cards do four times as fast as the F16 (with F32
# sums) of their data sheet; server cards are limited by how the kernels feed them
TENSOR_REACHED, SERVER_TENSOR_REACHED = 1.0, 0.25
ATTENTION_REACHED, SERVER_ATTENTION_REACHED = 0.5, 0.35
PAGEABLE = 0.45  # of the link, for host memory that is not pinned
NODE_LATENCY = 2.5e-6  # from one kernel to the next
SUBMIT, SYNC = 4e-6, 8e-6  # of the host: an asynchronous call from Python, and waiting
COPY_LATENCY = 8e-6
RESERVED = 380 * MIB  # context and code of the driver

# GB/s that copies reach, by PCIe generation and lanes
PCIE = {(3, 16): 12.0, (4, 8): 12.5, (4, 16): 25.0, (5, 8): 25.0, (5, 16): 50.0}


@dataclass(frozen=True, slots=True)
class Card:
    """A card that can be simulated."""

    name: str
    compute_capability: int
    memory: int  # bytes
    gbs: float  # of its memory, published
    tflops: float  # F32
    tensor_tflops: float  # F16 with F32 sums, without sparsity
    link_gbs: float  # to the host and back, reached
    peer_gbs: float = 0.0  # to another card; 0: only through the host
    is_server: bool = False
    reserved: int = RESERVED
    max_buffer: int = NO_LIMIT

    @property
    def rates(self) -> Rates:
        """What it reaches."""
        server = self.is_server
        tensor = SERVER_TENSOR_REACHED if server else TENSOR_REACHED
        attention = SERVER_ATTENTION_REACHED if server else ATTENTION_REACHED
        return Rates(
            gbs=MEMORY_REACHED * self.gbs,
            gflops=1e3 * F32_REACHED * self.tflops,
            tensor_gflops=1e3 * tensor * self.tensor_tflops,
            attention_gflops=1e3 * attention * self.tensor_tflops,
            node_latency=NODE_LATENCY,
            submit=SUBMIT,
            sync=SYNC,
            h2d_gbs=self.link_gbs,
            d2h_gbs=self.link_gbs,
            pageable=PAGEABLE,
            peer_gbs=self.peer_gbs,
            copy_latency=COPY_LATENCY,
        )

    @property
    def props(self) -> DeviceProps:
        """As the driver tells them."""
        name = f"{self.name} [simulated]"
        return DeviceProps(name, self.compute_capability, self.memory, self.max_buffer)


def _geforce(
    name: str,
    capability: int,
    gib: float,
    gbs: float,
    tflops: float,
    pcie: tuple[int, int] = (4, 16),
) -> Card:
    """Tensor cores twice as fast as F32, in all generations since 2018 but the first."""
    tensor = (4 if capability < 80 else 2) * tflops
    title = f"NVIDIA GeForce {name}"
    return Card(title, capability, int(gib * GIB), gbs, tflops, tensor, PCIE[pcie])


@dataclass(frozen=True, slots=True)
class _Link:
    """How a server card is connected; GB/s to others of its kind."""

    pcie: tuple[int, int] = (4, 16)
    peer_gbs: float = 20.0  # across PCIe


def _server(
    name: str,
    capability: int,
    gib: float,
    gbs: float,
    tflops: float,
    tensor: float,
    link: _Link | None = None,
) -> Card:
    link = link or _Link()
    card = Card(name, capability, int(gib * GIB), gbs, tflops, tensor, PCIE[link.pcie])
    return replace(card, peer_gbs=link.peer_gbs, is_server=True)


_X8, _OLD, _NEW, _NEW_X8 = (4, 8), (3, 16), (5, 16), (5, 8)
_NVLINK3, _NVLINK4 = _Link(peer_gbs=240.0), _Link((5, 16), peer_gbs=360.0)

CARDS: dict[str, Card] = {
    "rtx2060": _geforce("RTX 2060", 75, 6, 336, 6.5, _OLD),
    "rtx2080": _geforce("RTX 2080", 75, 8, 448, 10.1, _OLD),
    "rtx2080ti": _geforce("RTX 2080 Ti", 75, 11, 616, 13.4, _OLD),
    "rtx3060": _geforce("RTX 3060", 86, 12, 360, 12.7),
    "rtx3060ti": _geforce("RTX 3060 Ti", 86, 8, 448, 16.2),
    "rtx3070": _geforce("RTX 3070", 86, 8, 448, 20.3),
    "rtx3080": _geforce("RTX 3080", 86, 10, 760, 29.8),
    "rtx3090": _geforce("RTX 3090", 86, 24, 936, 35.6),
    "rtx3090ti": _geforce("RTX 3090 Ti", 86, 24, 1008, 40.0),
    "rtx4060": _geforce("RTX 4060", 89, 8, 272, 15.1, _X8),
    "rtx4060ti": _geforce("RTX 4060 Ti", 89, 16, 288, 22.1, _X8),
    "rtx4070": _geforce("RTX 4070", 89, 12, 504, 29.1),
    "rtx4070ti": _geforce("RTX 4070 Ti", 89, 12, 504, 40.1),
    "rtx4080": _geforce("RTX 4080", 89, 16, 717, 48.7),
    "rtx4090": _geforce("RTX 4090", 89, 24, 1008, 82.6),
    "rtx5060ti": _geforce("RTX 5060 Ti", 120, 16, 448, 23.7, _NEW_X8),
    "rtx5070": _geforce("RTX 5070", 120, 12, 672, 30.9, _NEW),
    "rtx5070ti": _geforce("RTX 5070 Ti", 120, 16, 896, 43.9, _NEW),
    "rtx5080": _geforce("RTX 5080", 120, 16, 960, 56.3, _NEW),
    "rtx5090": _geforce("RTX 5090", 120, 32, 1792, 104.8, _NEW),
    "rtx3060-laptop": _geforce("RTX 3060 Laptop GPU", 86, 6, 336, 10.9, _X8),
    "rtx3080-laptop": _geforce("RTX 3080 Laptop GPU", 86, 16, 448, 19.0),
    "rtx4050-laptop": _geforce("RTX 4050 Laptop GPU", 89, 6, 192, 9.0, _X8),
    "rtx4060-laptop": _geforce("RTX 4060 Laptop GPU", 89, 8, 256, 11.6, _X8),
    "rtx4070-laptop": _geforce("RTX 4070 Laptop GPU", 89, 8, 256, 15.6, _X8),
    "rtx4090-laptop": _geforce("RTX 4090 Laptop GPU", 89, 16, 576, 33.0),
    "rtx5070ti-laptop": _geforce("RTX 5070 Ti Laptop GPU", 120, 12, 672, 23.2, _NEW_X8),
    "rtx5090-laptop": _geforce("RTX 5090 Laptop GPU", 120, 24, 896, 31.8, _NEW),
    "t4": _server("Tesla T4", 75, 16, 320, 8.1, 65, _Link(_OLD, 10.0)),
    "l4": _server("NVIDIA L4", 89, 24, 300, 30.3, 121),
    "a10": _server("NVIDIA A10", 86, 24, 600, 31.2, 125),
    "a6000": _server("NVIDIA RTX A6000", 86, 48, 768, 38.7, 155),
    "l40s": _server("NVIDIA L40S", 89, 48, 864, 91.6, 362),
    "a100": _server("NVIDIA A100-SXM4-80GB", 80, 80, 2039, 19.5, 312, _NVLINK3),
    "a100-40": _server("NVIDIA A100-SXM4-40GB", 80, 40, 1555, 19.5, 312, _NVLINK3),
    "h100": _server("NVIDIA H100 80GB HBM3", 90, 80, 3350, 66.9, 989, _NVLINK4),
    "h200": _server("NVIDIA H200", 90, 141, 4800, 66.9, 989, _NVLINK4),
}
