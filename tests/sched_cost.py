"""Print what the scheduler costs on a graph of many layers with their experts on the host.

python tests/sched_cost.py [--fake] [--profile] [layers]
"""

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from fakes import FakeBackend, FakeDevice, cpu
from sched_graphs import I32, input_leaf, weight

from pyggml import build
from pyggml.backend import Backend, Device, Status, alloc_tensors
from pyggml.backends.cuda.simulate import Simulation
from pyggml.cost import Rates
from pyggml.dtypes import GGMLType
from pyggml.graph import Graph
from pyggml.params import RopeParams
from pyggml.sched import Scheduler
from pyggml.sched_assign import Assignment
from pyggml.sched_split import Cut
from pyggml.tensor import Tensor, new_tensor

N_EMBD, N_HEAD, HEAD, N_KV, N_EXPERT, N_USED = 16, 4, 4, 8, 16, 8
WEIGHTS = {
    "attn_norm": (N_EMBD,),
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_EMBD, N_EMBD),
    "attn_v": (N_EMBD, N_EMBD),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_norm": (N_EMBD,),
    "ffn_gate_inp": (N_EMBD, N_EXPERT),
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


class Layer:
    """Attention and routing on one device, experts on another."""

    def __init__(self, gpu: Device, host: Device) -> None:
        self.w = {name: weight(gpu, *ne, name=name) for name, ne in WEIGHTS.items()}
        self.w |= {n: weight(host, N_EMBD, N_EMBD, N_EXPERT, name=n) for n in EXPERTS}
        self.k, self.v = (new_tensor(GGMLType.F16, N_EMBD, N_KV, name=n) for n in ("k", "v"))
        alloc_tensors([self.k, self.v], gpu.buffer_type())

    def build(self, graph: Graph, x: Tensor, pos: Tensor, cells: Tensor, mask: Tensor) -> Tensor:
        """Append the nodes of a layer to a graph."""
        x = build.add(self._attention(graph, x, pos, cells, mask), x)
        return build.add(self._experts(self._normed(x, "ffn_norm")), x)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return build.mul(build.rms_norm(x, 1e-6), self.w[name])

    def _attention(
        self, graph: Graph, x: Tensor, pos: Tensor, cells: Tensor, mask: Tensor
    ) -> Tensor:
        n, x = x.ne[1], self._normed(x, "attn_norm")
        q, k, v = (build.mul_mat(self.w[f"attn_{part}"], x) for part in "qkv")
        q, k, v = (build.reshape(t, HEAD, N_HEAD, n) for t in (q, k, v))
        q, k = (build.rope_ext(t, pos, None, RopeParams(HEAD)) for t in (q, k))
        for cache, rows in ((self.k, k), (self.v, v)):
            graph.expand(build.set_rows(cache, build.reshape(rows, N_EMBD, n), cells))
        size = self.k.type.type_size
        k, v = (
            build.view(t, (HEAD, N_KV, N_HEAD), (N_EMBD * size, HEAD * size))
            for t in (self.k, self.v)
        )
        q = build.permute(q, 0, 2, 1, 3)
        scores = build.soft_max_ext(build.mul_mat(k, q), mask, 0.5)
        out = build.mul_mat(build.cont(build.transpose(v)), scores)
        merged = build.reshape(build.cont(build.permute(out, 0, 2, 1, 3)), N_EMBD, n)
        return build.mul_mat(self.w["attn_output"], merged)

    def _experts(self, x: Tensor) -> Tensor:
        n = x.ne[1]
        scores = build.soft_max(build.mul_mat(self.w["ffn_gate_inp"], x))
        ids = build.argsort_top_k(scores, N_USED)
        rows = build.get_rows(build.reshape(scores, 1, N_EXPERT, n), ids)
        weights = build.reshape(rows, N_USED, n)
        weights = build.div(weights, build.sum_rows(weights))
        weights = build.scale(build.reshape(weights, 1, N_USED, n), 2.5)
        x = build.reshape(x, N_EMBD, 1, n)
        gate, up = (build.mul_mat_id(self.w[name], x, ids) for name in EXPERTS[:2])
        y = build.mul_mat_id(self.w[EXPERTS[2]], build.mul(build.sqr(gate), up), ids)
        y = build.mul(y, weights)
        parts = [build.view(y, (N_EMBD, n), (y.nb[2],), i * y.nb[1]) for i in range(N_USED)]
        total = parts[0]
        for part in parts[1:]:
            total = build.add(total, part)
        return total


def model_graph(layers: list[Layer], n_tokens: int) -> Graph:
    """A graph over all layers."""
    graph = Graph()
    x = input_leaf(N_EMBD, n_tokens, name="x")
    pos = new_tensor(I32, n_tokens, name="pos").as_input()
    cells = new_tensor(GGMLType.I64, n_tokens, name="cells").as_input()
    mask = input_leaf(N_KV, n_tokens, name="mask")
    for layer in layers:
        x = layer.build(graph, x, pos, cells, mask)
    graph.expand(x.as_output())
    return graph


class Idle(FakeBackend):
    """Computes nothing: what is left is the scheduler."""

    def graph_compute(self, graph: Graph) -> Status:
        return Status.SUCCESS


def milliseconds(work: Callable[[], object]) -> float:
    """Processor time of one call: other programs do not count."""
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


def typical(make: Callable[[], Callable[[], object]], n: int = 7) -> str:
    """Median and minimum over fresh calls."""
    times = [milliseconds(make()) for _ in range(n)]
    return f"{np.median(times):8.2f} ms (least {min(times):.2f})"


def main(backends: Sequence[Backend], layers: int, profile: bool) -> None:
    gpu, host = (b.device for b in backends)
    parts = [Layer(gpu, host) for _ in range(layers)]
    sched = Scheduler(backends)
    sched.reserve(model_graph(parts, 2))

    def plan() -> Callable[[], object]:
        sched.reset()
        graph = model_graph(parts, 1)
        return lambda: sched.alloc_graph(graph)

    def reserve() -> Callable[[], object]:
        graph = model_graph(parts, 2)
        return lambda: sched.reserve(graph)

    if profile:
        with cProfile.Profile() as profiler:
            for _ in range(5):
                plan()()
            graph = model_graph(parts, 1)
            sched.reset()
            sched.alloc_graph(graph)
            for _ in range(100):
                sched.graph_compute(graph)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return
    print("build         ", typical(lambda: lambda: model_graph(parts, 1)))
    print("reserve       ", typical(reserve))
    print("alloc_graph   ", typical(plan))
    graph = model_graph(parts, 1)
    sched.reset()
    sched.alloc_graph(graph)
    print(f"{len(graph.nodes)} nodes, {len(sched.splits)} splits")
    print("compute again ", typical(lambda: lambda: sched.graph_compute(graph), 100))

    def assigned() -> tuple[Assignment, Graph]:
        return Assignment(sched.backends, sched.bufts, op_offload=True), model_graph(parts, 1)

    def assign() -> Callable[[], object]:
        assignment, graph = assigned()
        return lambda: assignment.assign(graph)

    def cut() -> Callable[[], object]:
        assignment, graph = assigned()
        assignment.assign(graph)
        return lambda: Cut(assignment, graph).optimize()

    print("  assign      ", typical(assign))
    print("  cut         ", typical(cut))


def simulated() -> list[Backend]:
    """A card that computes nothing beside the CPU."""
    devices = Simulation(["rtx3060"], execute="dry", cpu_rates=Rates(gbs=40, gflops=100)).devices
    return [device.init_backend() for device in devices]


if __name__ == "__main__":
    words = sys.argv[1:]
    numbers = [int(w) for w in words if w.isdigit()]
    idle = [Idle(FakeDevice("CUDA0")), Idle(cpu())]
    main(
        idle if "--fake" in words else simulated(),
        numbers[0] if numbers else 60,
        "--profile" in words,
    )
