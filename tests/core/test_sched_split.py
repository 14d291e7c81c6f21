"""Splits, copies of their inputs, and the experts that are copied."""

import numpy as np
import pytest
from fakes import FakeDevice, cpu, read, write
from sched_graphs import I32, input_leaf, names, place, scheduler, weight

from pyggml import build
from pyggml.backend import DeviceType, Status, alloc_tensors
from pyggml.errors import IdError
from pyggml.graph import build_graph
from pyggml.ops import Op
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor


# ---------------------------------------------------------------- splits and copies
def test_two_graph_inputs_of_a_gpu_split() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x, mask = input_leaf(4, name="inp_embd"), input_leaf(4, name="inp_mask")
    a = build.add(build.mul(x, weight(gpu, 4, name="w")), mask)
    b = build.add(a, mask)
    place(sched, build.mul(b, x))
    assert names(sched) == [("CUDA0", ["inp_embd", "inp_mask"])]


def test_a_tensor_is_copied_once_per_backend() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(4, name="x")
    w, c = weight(gpu, 4, name="w"), weight(host, 4, name="c")
    a = build.mul(x, w).named("a")
    b = build.mul(a, c).named("b")
    y = build.mul(build.add(b, x), w)
    graph = place(sched, build.add(y, x))
    # b + x goes up to the GPU; the third split reads the copy that the first one made
    assert names(sched) == [("CUDA0", ["x"]), ("CPU", ["a"]), ("CUDA0", ["b"])]
    copies = [s for node in graph.nodes for s in node.src if s is not None and "#x#" in s.name]
    assert len(copies) == 3 and copies[0] is copies[1] is copies[2]


def test_memory_of_a_copied_tensor_is_free_again() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(8, name="x")
    a = build.mul(x, weight(gpu, 8, name="w"))
    y = build.mul(a, weight(host, 8, name="c"))
    place(sched, y)
    (copy,) = (s for s in y.src if s is not None and s.name.startswith("CPU#"))
    assert copy.data == x.data and y.data == copy.data  # x was needed up to its own copy
    assert sched.buffer_size(sched.backends[1]) == 32


def test_readable_memory_is_not_copied() -> None:
    host = cpu()
    gpu = FakeDevice("IGPU0", DeviceType.IGPU, also_reads=[host.buffer_type()])
    sched = scheduler(gpu, host)
    place(sched, build.mul(input_leaf(4, name="x"), weight(gpu, 4, name="w")))
    assert names(sched) == [("IGPU0", [])]


def test_copy_names_are_cut_at_63_bytes() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(4, name="n" * 63)
    y = build.mul(x, weight(gpu, 4, name="w"))
    place(sched, y)
    assert y.src[0] is not None and y.src[0].name == "CUDA0#" + "n" * 57


# ---------------------------------------------------------------- used experts
N_EXPERT, EXPERT_BYTES = 8, 4 * 4 * 4


def moe(host: FakeDevice, used: list[list[int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gate, up and down products of experts in host memory: (x, ids, products)."""
    n_tokens = len(used)
    x = input_leaf(4, 1, n_tokens, name="x")
    ids = new_tensor(I32, max(len(used[0]), 0), n_tokens, name="ids").as_input()
    gate, up, down = (weight(host, 4, 4, N_EXPERT, name=n, seed=len(n)) for n in MOE_NAMES)
    a = build.mul_mat_id(gate, x, ids).named("a")
    b = build.mul_mat_id(up, x, ids).named("b")
    c = build.mul_mat_id(down, build.mul(a, b), ids).named("c")
    return x, ids, [a, b, c]


MOE_NAMES = ("gate", "upup", "downn")


def run_moe(sched: Scheduler, host: FakeDevice, used: list[list[int]]) -> np.ndarray:
    x, ids, nodes = moe(host, used)
    graph = place(sched, *nodes)
    write(x, np.random.default_rng(1).standard_normal((len(used), 1, 4)))
    write(ids, np.array(used, np.int32).reshape(1, 1, len(used), -1))
    host.trace.clear()
    assert sched.graph_compute(graph) == Status.SUCCESS
    return read(nodes[-1])


@pytest.mark.parametrize("late", [False, True])
def test_only_used_experts_are_copied(late: bool) -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID, is_late=late)
    gpu.trace = host.trace
    used = [[1, 2], [2, 5], [7, 1]]
    sched = scheduler(gpu, host)
    result = run_moe(sched, host, used)
    sets = [t.removeprefix("CUDA0 set CUDA0#") for t in host.trace if " set " in t]
    # runs 1-2, 5 and 7 with one expert (less than 512 bytes) of overrun, none after the last
    runs = ["64+192", "320+128", "448+64"]
    assert sets == [f"{name}#0 {run}" for name in MOE_NAMES for run in runs]
    gets = [t for t in host.trace if " get " in t]
    # the first product reads the ids before they are copied, the others know them
    assert gets == ["CPU get ids"]
    np.testing.assert_array_equal(result, run_moe(scheduler(host), host, used))


def test_weights_that_experts_are_applied_to_are_copied_whole() -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID)
    x, experts = weight(host, 4, 1, 4, name="x"), weight(host, 4, 4, N_EXPERT, name="experts")
    ids = new_tensor(I32, 1, 4, name="ids").as_input()
    y = build.mul_mat_id(experts, x, ids)
    sched = scheduler(gpu, host)
    graph = place(sched, y)
    assert names(sched) == [("CUDA0", ["experts", "x", "ids"])]
    write(ids, [[0]] * 4)
    sched.graph_compute(graph)
    expected = read(x)[0, :, 0] @ read(experts)[0, 0].T
    np.testing.assert_allclose(read(y)[0, :, 0], expected, rtol=1e-5)


def test_ids_are_read_again_for_every_evaluation() -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID)
    sched = scheduler(gpu, host)
    x, ids, nodes = moe(host, [[0]])
    graph = place(sched, *nodes)
    write(x, np.ones((1, 1, 4)))
    for expert in (3, 6):
        write(ids, [[expert]])
        sched.graph_compute(graph)
        gate = next(t for t in graph.leafs if t.name == "gate")
        np.testing.assert_allclose(read(nodes[0]).ravel(), read(gate)[0, expert].sum(-1), rtol=1e-5)


def test_absent_experts_are_not_copied() -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID)
    gpu.trace = host.trace
    run_moe(scheduler(gpu, host), host, [[-1, 2], [2, -1]])
    sets = [t.split()[-1] for t in host.trace if " set " in t]
    assert sets == ["128+128"] * 3
    run_moe(scheduler(gpu, host), host, [[-1, -1]])
    assert not any(" set " in t for t in host.trace)


def test_experts_that_do_not_exist_are_not_copied() -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID)
    gpu.trace = host.trace
    with pytest.raises(IdError, match="MUL_MAT_ID a: .*ids.* asks for expert 8"):
        run_moe(scheduler(gpu, host), host, [[1, 8]])
    assert not any(" set " in t for t in host.trace)


@pytest.mark.parametrize("late", [False, True])
def test_cold_experts_continue_a_product_of_another_device(late: bool) -> None:
    """Its rows are copied once; the result takes the place of the copy."""
    host, gpu = cpu(), FakeDevice("CUDA0", refused=[Op.MUL_MAT_ID_COLD], is_late=late)
    gpu.trace = host.trace
    x = input_leaf(4, 1, 2, name="x")
    tables = [[[1, -1], [-1, 3]], [[1, 0], [2, 3]]]  # of the hot experts 1 and 3, and of all
    hot_ids, ids = (new_tensor(I32, 2, 2, name=n).as_input() for n in ("hot_ids", "ids"))
    marks = new_tensor(I32, 4, name="marks").as_input()
    experts = weight(host, 4, 4, 4, name="experts")
    copy = weight(gpu, 4, 4, 4, name="copy")  # of the same seed
    hot = build.mul_mat_id(copy, x, hot_ids).named("hot")
    joined = build.mul_mat_id_cold(experts, x, ids, marks, into=hot).named("joined")
    result = build.scale(joined, 1.0)
    sched = scheduler(gpu, host)
    graph = place(sched, result)
    write(x, np.random.default_rng(1).standard_normal((2, 1, 4)))
    write(hot_ids, tables[0])
    write(ids, tables[1])
    write(marks, [1, 0, 1, 0])
    assert sched.graph_compute(graph) == Status.SUCCESS
    into = joined.src[4]
    assert into is not None and into.name == "CPU#hot#0" and into.data == joined.data
    picked = read(experts)[0][tables[1]]  # [n_tokens, n_used, n, k]
    expected = (picked @ read(x)[0][..., None])[..., 0]
    np.testing.assert_allclose(read(result)[0], expected, rtol=1e-5)


def test_experts_that_the_host_has_yet_to_write_are_copied_afterwards() -> None:
    """Even if their ids lie on the GPU, so that nobody waits for the host because of them."""
    host = cpu(is_late=True)
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID, is_late=True)
    experts = weight(host, 4, 4, N_EXPERT, name="experts")
    ids = new_tensor(I32, 1, 2, name="ids")
    alloc_tensors([ids], gpu.buffer_type())
    write(ids, [[2], [5]])
    x, fresh = input_leaf(4, 1, 2, name="x"), input_leaf(4, 4, N_EXPERT, name="fresh")
    graph = build_graph([build.cpy(fresh, experts)])
    y = build.mul_mat_id(experts, x, ids).as_output()
    graph.expand(y)
    sched = scheduler(gpu, host)
    sched.alloc_graph(graph)
    assert names(sched) == [("CPU", []), ("CUDA0", ["experts", "x"])]
    write(x, np.ones((2, 1, 4)))
    write(fresh, np.repeat(np.arange(N_EXPERT), 16))
    sched.graph_compute(graph)
    np.testing.assert_array_equal(read(y).reshape(2, 4), [[8] * 4, [20] * 4])


def test_no_tokens_copy_no_experts() -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0", offloads=lambda n: n.op == Op.MUL_MAT_ID)
    gpu.trace = host.trace
    x = input_leaf(4, 1, 0, name="x")
    ids = new_tensor(I32, 2, 0, name="ids").as_input()
    y = build.mul_mat_id(weight(host, 4, 4, N_EXPERT, name="experts"), x, ids)
    sched = scheduler(gpu, host)
    assert sched.graph_compute(build_graph([y])) == Status.SUCCESS
    assert names(sched)[0][0] == "CUDA0"
    assert not any(" set " in t for t in host.trace)


@pytest.mark.parametrize("computed", [False, True])
def test_experts_that_are_no_weights_are_copied_whole(computed: bool) -> None:
    host = cpu()
    gpu = FakeDevice("CUDA0")
    gpu.trace = host.trace
    given = input_leaf(4, 4, N_EXPERT, name="experts")
    x, ids = input_leaf(4, 1, 1, name="x"), new_tensor(I32, 1, 1, name="ids").as_input()
    experts = build.scale(given, 1.0) if computed else given
    y = build.mul_mat_id(experts, x, ids)
    sched = scheduler(gpu, host)
    sched.set_tensor_backend(experts, sched.backends[1])
    sched.set_tensor_backend(y, sched.backends[0])
    graph = place(sched, y)
    assert names(sched)[-1][0] == "CUDA0"
    write(given, np.ones((N_EXPERT, 4, 4)))
    write(ids, [[3]])
    write(x, np.ones((1, 1, 4)))
    sched.graph_compute(graph)
    np.testing.assert_array_equal(read(y).ravel(), [4] * 4)
    assert not any(" set " in t for t in host.trace)


def test_weights_of_another_device_are_copied_whole() -> None:
    """Only the host's memory can be read in parts without the device that has it."""
    first, second, host = FakeDevice("CUDA0"), FakeDevice("CUDA1", peer_copies=True), cpu()
    first.peer_copies = True
    second.trace = first.trace
    x, ids = input_leaf(4, 1, 1, name="x"), new_tensor(I32, 1, 1, name="ids").as_input()
    experts = weight(first, 4, 4, N_EXPERT, name="experts")
    y = build.mul_mat_id(experts, x, ids)
    sched = scheduler(first, second, host)
    sched.set_tensor_backend(y, sched.backends[1])
    graph = place(sched, y)
    write(ids, [[3]])
    write(x, np.ones((1, 1, 4)))
    sched.graph_compute(graph)
    np.testing.assert_allclose(read(y).ravel(), read(experts)[0, 3].sum(-1), rtol=1e-5)
    assert "CUDA1 copy experts" in second.trace
