"""Random graphs on two to four random devices give the results of one device alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from fakes import FakeDevice, cpu, read, write
from hypothesis import given
from hypothesis import strategies as st
from memory_check import check_no_overlap
from sched_described import check_described

from pyggml import build
from pyggml.backend import Device, DeviceType, Status, Usage, alloc_tensors, buffer_of
from pyggml.backends.reference.device import RefDevice
from pyggml.graph import Graph
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32
N = 4
OPS = (
    *(Op.ADD, Op.MUL, Op.SCALE, Op.RMS_NORM, Op.CONT, Op.SUM_ROWS, Op.MUL_MAT, Op.CPY),
    *(Op.CONCAT, Op.ARGSORT, Op.GET_ROWS, Op.SET_ROWS, Op.MUL_MAT_ID),
)


@dataclass(frozen=True)
class Step:
    """One node: an operation on two earlier tensors, counted from the newest."""

    kind: int
    a: int
    b: int
    is_output: bool


@dataclass(frozen=True)
class Recipe:
    """How to build the same graph on different devices; homes are positions of devices."""

    n_inputs: int
    weight_homes: tuple[int, ...]
    expert_homes: tuple[int, ...]
    state_homes: tuple[int, ...]  # read and written in any order
    steps: tuple[Step, ...]


@dataclass
class Built:
    """A graph and the tensors of interest."""

    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


def memory(device: Device, name: str, seed: int, usage: Usage, *ne: int) -> Tensor:
    """Random matrices in a device's memory."""
    tensor = new_tensor(F32, N, N, *ne, name=name)
    buffer = alloc_tensors([tensor], device.buffer_type())
    assert buffer is not None
    buffer.set_usage(usage)
    write(tensor, np.random.default_rng(seed).uniform(-1, 1, tensor.ne[::-1]))
    return tensor


class Kitchen:
    """Devices with the recipe's weights and states; builds its graph as often as wanted."""

    def __init__(self, recipe: Recipe, devices: Sequence[Device]) -> None:
        self.recipe = recipe
        n = len(devices)
        self.weights = [
            memory(devices[home % n], f"w{i}", i, Usage.WEIGHTS)
            for i, home in enumerate(recipe.weight_homes)
        ]
        self.experts = [
            memory(devices[home % n], f"e{i}", 50 + i, Usage.WEIGHTS, N)
            for i, home in enumerate(recipe.expert_homes)
        ]
        self.states = [
            memory(devices[home % n], f"s{i}", 100 + i, Usage.ANY)
            for i, home in enumerate(recipe.state_homes)
        ]

    def build(self) -> Built:
        inputs = [
            new_tensor(F32, N, N, name=f"x{i}").as_input() for i in range(self.recipe.n_inputs)
        ]
        tensors = [*self.weights, *self.states, *inputs]
        built = Built(Graph(), inputs, states=self.states)
        for step in self.recipe.steps:
            a, b = (tensors[-1 - i % len(tensors)] for i in (step.a, step.b))
            made = self._node(step.kind, a, b)
            built.graph.expand(made)  # in the order of the recipe: it may write to a state
            tensors.append(made)
            if step.is_output:
                built.outputs.append(tensors[-1].as_output())
        built.outputs.append(tensors[-1].as_output())
        return built

    def _node(self, kind: int, a: Tensor, b: Tensor) -> Tensor:
        """Every tensor is 4 x 4."""
        return self._of_rows(kind, a, b) or self._of_numbers(kind, a, b)

    def _of_rows(self, kind: int, a: Tensor, b: Tensor) -> Tensor | None:
        match kind:
            case 7 if self.states:
                return build.cpy(a, self.states[0])
            case 8 if self.states:  # in the order of the first row's values
                order = build.view(build.argsort(b), (N,))
                return build.set_rows(self.states[-1], a, order)
            case 9:
                return build.get_rows(a, build.view(build.argsort(b), (N,), offset=4 * N))
            case 10 if self.experts:  # two of four per row; the second one's result
                ids = build.argsort_top_k(b, 2)
                y = build.mul_mat_id(self.experts[0], build.reshape(a, N, 1, N), ids)
                return build.cont(build.view(y, (N, N), (y.nb[2],), y.nb[1]))
            case 11:  # with nothing behind it
                nothing = build.scale(build.view(b, (N, 0), (b.nb[1],)), 2.0)
                return build.concat(a, nothing, 1)
        return None

    def _of_numbers(self, kind: int, a: Tensor, b: Tensor) -> Tensor:
        match kind:
            case 0 | 1:
                return build.add(a, b) if kind else build.mul(a, b)
            case 2:
                return build.scale(a, 0.5, 0.25)
            case 3:
                return build.rms_norm(a, 1e-6)
            case 4:  # two halves, read through views
                upper = build.view(a, (N, 2), (a.nb[1],), 2 * a.nb[1])
                lower = build.view(a, (N, 2), (a.nb[1],))
                return build.add(build.scale(a, 2.0), build.mul(upper, lower))
            case 5:
                return build.cont(build.transpose(a))
            case 6:
                return build.mul(a, build.sum_rows(b))
            case _:
                return build.mul_mat(a, b)


def recipes() -> st.SearchStrategy[Recipe]:
    number = st.integers(0, 11)
    is_output = st.sampled_from([False] * 5 + [True])
    steps = st.builds(Step, st.integers(0, 12), number, number, is_output)
    homes = st.integers(0, 11)
    return st.builds(
        Recipe,
        st.integers(1, 3),
        st.lists(homes, max_size=5).map(tuple),
        st.lists(homes, max_size=1).map(tuple),
        st.lists(homes, max_size=2).map(tuple),
        st.lists(steps, min_size=1, max_size=20).map(tuple),
    )


@st.composite
def device_lists(draw: st.DrawFn) -> list[FakeDevice]:
    """One to three accelerators with random abilities, and a CPU that can do everything."""
    host = cpu(is_late=draw(st.booleans()))
    devices: list[FakeDevice] = []
    has_events = draw(st.booleans())
    for i in range(draw(st.integers(1, 3))):
        wanted = draw(st.sets(st.sampled_from(OPS), max_size=2))
        also_reads = [host.buffer_type()] if draw(st.integers(0, 4)) == 0 else []
        also_reads += [d.buffer_type() for d in devices if draw(st.integers(0, 4)) == 0]
        devices.append(
            FakeDevice(
                f"CUDA{i}",
                DeviceType.GPU,
                refused=draw(st.sets(st.sampled_from(OPS), max_size=4)),
                also_reads=also_reads,
                offloads=lambda node, wanted=wanted: node.op in wanted,
                is_late=draw(st.booleans()),
                has_events=has_events,
                peer_copies=draw(st.booleans()),
            )
        )
    return [*devices, host]


def write_inputs(built: Built, seed: int) -> None:
    """Random values into the inputs that are in the graph."""
    random = np.random.default_rng(seed)
    for tensor in built.inputs:
        values = random.uniform(-1, 1, (N, N))
        if tensor.buffer is not None:
            write(tensor, values)


def run(sched: Scheduler, built: Built, seed: int) -> list[np.ndarray]:
    """Compute with fresh inputs; the outputs' bytes."""
    write_inputs(built, seed)
    assert sched.graph_compute(built.graph) == Status.SUCCESS
    return [read(t) for t in (*built.outputs, *built.states) if t.is_contiguous]


def expected_results(recipe: Recipe, seeds: range) -> list[list[np.ndarray]]:
    """What the reference alone computes, one evaluation after the other."""
    host = RefDevice()
    kitchen = Kitchen(recipe, [host])
    results = []
    for seed in seeds:
        sched = Scheduler([host.init_backend()])
        built = kitchen.build()
        sched.alloc_graph(built.graph)
        results.append(run(sched, built, seed))
    return results


def check_placement(sched: Scheduler) -> None:
    """Every node runs on a backend that can run it and read all that it reads."""
    for split in sched.splits:
        backend = sched.backends[split.backend_id]
        for node in split.graph.nodes:
            if node.is_view_op:
                continue
            assert sched.get_tensor_backend(node) is backend
            assert backend.supports_op(node), node
            for tensor in (node, *node.src):
                if tensor is not None:
                    buffer = buffer_of(tensor)
                    assert buffer is not None and backend.supports_buft(buffer.buft), tensor


def same(results: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(results) == len(expected) and all(map(np.array_equal, results, expected))


@given(recipes(), device_lists(), st.booleans())
def test_same_results_on_any_devices(
    recipe: Recipe, devices: list[FakeDevice], op_offload: bool
) -> None:
    kitchen = Kitchen(recipe, devices)
    sched = Scheduler([d.init_backend() for d in devices], op_offload=op_offload)
    built = kitchen.build()
    sched.alloc_graph(built.graph)
    check_placement(sched)
    check_described(sched)
    check_no_overlap(sched.layout.graph)
    for seed, expected in enumerate(expected_results(recipe, range(2))):
        assert same(run(sched, built, seed), expected)


@given(recipes(), device_lists(), st.data())
def test_same_results_after_every_reset(
    recipe: Recipe, devices: list[FakeDevice], data: st.DataObject
) -> None:
    kitchen = Kitchen(recipe, devices)
    sched = Scheduler([d.init_backend() for d in devices], parallel=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        sizes = sched.reserve_size(kitchen.build().graph)
        sched.reserve(kitchen.build().graph)
        assert [sched.buffer_size(b) for b in sched.backends] == sizes
    for seed, expected in enumerate(expected_results(recipe, range(3))):
        sched.reset()
        built = kitchen.build()
        for node in built.graph.nodes:
            able = [b for b in sched.backends if b.supports_op(node)]
            if not node.is_view and data.draw(st.integers(0, 9)) == 0:
                sched.set_tensor_backend(node, data.draw(st.sampled_from(able)))
        sched.alloc_graph(built.graph)
        check_placement(sched)
        check_described(sched)
        check_no_overlap(sched.layout.graph)
        assert same(run(sched, built, seed), expected)


@given(recipes(), device_lists())
def test_evaluations_in_flight_do_not_disturb_each_other(
    recipe: Recipe, devices: list[FakeDevice]
) -> None:
    devices[-1].is_late = False  # inputs are written while earlier work may still be to do
    kitchen = Kitchen(recipe, devices)
    sched = Scheduler([d.init_backend() for d in devices], parallel=True)
    n = 6
    results: list[list[bytearray]] = []
    for seed in range(n):
        sched.reset()
        built = kitchen.build()
        sched.alloc_graph(built.graph)
        write_inputs(built, seed)
        assert sched.graph_compute_async(built.graph) == Status.SUCCESS
        outputs = [t for t in built.outputs if t.is_contiguous]
        results.append([bytearray(t.nbytes) for t in outputs])
        for tensor, out in zip(outputs, results[-1], strict=True):
            backend = sched.get_tensor_backend(tensor)
            assert backend is not None
            backend.get_async(tensor, memoryview(out))
            if tensor.is_view:  # of a state, which the next evaluation changes
                backend.synchronize()
    sched.synchronize()
    for outs, expected in zip(results, expected_results(recipe, range(n)), strict=True):
        assert outs == [bytearray(e.tobytes()) for e in expected[: len(outs)]]
