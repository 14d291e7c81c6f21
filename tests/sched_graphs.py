"""Small graphs on fake devices for the scheduler's tests."""

import numpy as np
from fakes import FakeDevice, cpu, write

from pyggml import build
from pyggml.backend import Device, Usage, alloc_tensors
from pyggml.graph import Graph, build_graph
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

F32, I32 = build.F32, build.I32
MIN_BATCH = 32


def input_leaf(*ne: int, name: str) -> Tensor:
    return new_tensor(F32, *ne, name=name).as_input()


def batch_of(node: Tensor) -> int:
    """Tokens of an operation, as CUDA counts them."""
    return {Op.GET_ROWS: 0, Op.MUL_MAT: node.ne[1], Op.MUL_MAT_ID: node.ne[2]}.get(
        node.op, node.nrows
    )


def large_batch(node: Tensor) -> bool:
    return batch_of(node) >= MIN_BATCH


def weight(device: Device, *ne: int, name: str, seed: int = 0) -> Tensor:
    """A random weight in a device's memory."""
    tensor = new_tensor(F32, *ne, name=name)
    buffer = alloc_tensors([tensor], device.buffer_type())
    assert buffer is not None
    buffer.set_usage(Usage.WEIGHTS)
    write(tensor, np.random.default_rng(seed).standard_normal(tensor.ne[::-1]))
    return tensor


def scheduler(*devices: FakeDevice, **kwargs: bool) -> Scheduler:
    return Scheduler([d.init_backend() for d in devices], **kwargs)


def place(sched: Scheduler, *results: Tensor) -> Graph:
    """Allocate the graph of some outputs."""
    graph = build_graph([r.as_output() for r in results])
    sched.alloc_graph(graph)
    return graph


def names(sched: Scheduler) -> list[tuple[str, list[str]]]:
    """Backend and inputs of every split."""
    return [(sched.backends[s.backend_id].name, [t.name for t in s.inputs]) for s in sched.splits]


def backend_name(sched: Scheduler, tensor: Tensor) -> str:
    backend = sched.get_tensor_backend(tensor)
    assert backend is not None
    return backend.name


def parallel_graph(gpu: FakeDevice, w: Tensor) -> tuple[Tensor, Tensor, Graph]:
    x, unused = input_leaf(4, name="x"), input_leaf(4, name="unused")
    y = build.mul(build.scale(x, 2.0), w).named("y").as_output()
    graph = build_graph([y])
    graph.expand(unused)
    return x, y, graph


def two_devices_graph(n: int, gpu: FakeDevice, host: FakeDevice) -> Graph:
    x = input_leaf(4, n, name="x")
    a = build.mul_mat(weight(gpu, 4, 4, name="w"), x)
    return build_graph([build.mul_mat(weight(host, 4, 4, name="c"), a).as_output()])


def late_pair(**kwargs: bool) -> tuple[FakeDevice, FakeDevice, FakeDevice, list[str]]:
    """Two late GPUs and the host, with one trace."""
    trace: list[str] = []
    first, second = (
        FakeDevice(f"CUDA{i}", is_late=True, trace=trace, **kwargs)  # type: ignore[arg-type]
        for i in range(2)
    )
    return first, second, cpu(trace=trace), trace


def cache_on(device: FakeDevice, *ne: int, name: str = "cache") -> Tensor:
    """Memory that outlives graphs, full of ones."""
    tensor = new_tensor(F32, *ne, name=name)
    alloc_tensors([tensor], device.buffer_type())
    write(tensor, np.ones(tensor.ne[::-1]))
    return tensor


def cache_graph(
    gpu: FakeDevice, w: Tensor, cache: Tensor, n_tokens: int = 1
) -> tuple[Graph, Tensor, Tensor, Tensor]:
    """Rows that the GPU computes go to its cache, which is then read: graph, x, ids, result."""
    x, ids = input_leaf(4, n_tokens, name="x"), new_tensor(I32, n_tokens, name="ids").as_input()
    rows = build.mul(x, w)
    graph = Graph()
    graph.expand(build.set_rows(cache, rows, ids).named("stored"))
    result = build.mul_mat(build.view(cache, (4, 8), (16,)), rows).named("result")
    graph.expand(result.as_output())
    return graph, x, ids, result
