"""Graphs on simulated cards for tests: weights, chains of products, and how they are run."""

from collections.abc import Sequence

import numpy as np

from pyggml import build
from pyggml.backend import NO_LIMIT, Device, Usage, alloc_tensors, tensor_get, tensor_set
from pyggml.backends.cuda.sim_clock import Bus, Clock
from pyggml.backends.cuda.sim_driver import SimDriver
from pyggml.backends.cuda.simulate import Simulation, parse_spec
from pyggml.cost import Rates
from pyggml.dtypes import GGMLType
from pyggml.graph import Graph, build_graph
from pyggml.quants import quantize
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32
# nothing is measured in tests
CPU_RATES = Rates(gbs=40.0, gflops=100.0, node_latency=1e-6)
WIDTH = 64


def simulation(
    *specs: str, execute: str = "host", trace: bool = False, pinned_limit: int = NO_LIMIT
) -> Simulation:
    return Simulation(specs, execute, trace, cpu_rates=CPU_RATES, pinned_limit=pinned_limit)


def sim_driver(
    *specs: str, dry: bool = False, trace: bool = False, pinned_limit: int = NO_LIMIT
) -> SimDriver:
    """A driver alone, with a clock of its own."""
    bus = Bus(lambda: CPU_RATES.gbs)
    cards = [parse_spec(spec).card for spec in specs]
    return SimDriver(cards, Clock(bus, trace=trace), dry=dry, pinned_limit=pinned_limit)


def as_bytes(values: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(values).reshape(-1)).cast("B")


def write(tensor: Tensor, values: np.ndarray) -> None:
    tensor_set(tensor, as_bytes(values))


def read(tensor: Tensor) -> np.ndarray:
    out = np.empty(tensor.ne[::-1], tensor.type.info.numpy)
    tensor_get(tensor, as_bytes(out))
    return out


def weight(
    device: Device, *ne: int, seed: int, type: GGMLType = GGMLType.F32, name: str = ""
) -> Tensor:
    """A random weight in a device's memory."""
    tensor = new_tensor(type, *ne, name=name or f"w{seed}")
    buffer = alloc_tensors([tensor], device.buffer_type())
    assert buffer is not None
    buffer.set_usage(Usage.WEIGHTS)
    values = np.random.default_rng(seed).standard_normal(tensor.ne[::-1]).astype(np.float32)
    write(tensor, quantize(values, type) if type.is_quantized else values)
    return tensor


class Chain:
    """Layers of a product and a sum, each with its weight on a device of its own."""

    def __init__(
        self, homes: Sequence[Device], n_tokens: int = 5, type: GGMLType = GGMLType.F32
    ) -> None:
        self.x = new_tensor(F32, WIDTH, n_tokens, name="x").as_input()
        h = self.x
        for i, home in enumerate(homes):
            w = weight(home, WIDTH, WIDTH, seed=i, type=type)
            h = build.add(build.mul_mat(w, build.rms_norm(h, 1e-5)), h)
        self.result = h.named("result").as_output()
        self.graph: Graph = build_graph([self.result])

    def scheduler(self, devices: Sequence[Device], **options: bool) -> Scheduler:
        """A scheduler that has allocated the graph."""
        sched = Scheduler([device.init_backend() for device in devices], **options)
        sched.alloc_graph(self.graph)
        return sched

    def run(self, sched: Scheduler, seed: int = 0) -> np.ndarray:
        """The result for a random input."""
        values = np.random.default_rng(1000 + seed).standard_normal(self.x.ne[::-1])
        write(self.x, values.astype(np.float32))
        sched.graph_compute(self.graph)
        return read(self.result)
