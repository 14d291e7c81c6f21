"""Which backend the scheduler gives every tensor, and why."""

import numpy as np
import pytest
from fakes import FakeBufferType, FakeDevice, cpu, read, write
from sched_graphs import (
    F32,
    I32,
    MIN_BATCH,
    backend_name,
    input_leaf,
    large_batch,
    names,
    place,
    scheduler,
    weight,
)

from pyggml import build
from pyggml.backend import DeviceType, Status, Usage, alloc_tensors, buffer_of
from pyggml.errors import UserError
from pyggml.graph import Graph
from pyggml.ops import Op
from pyggml.params import RopeParams
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor


# ---------------------------------------------------------------- placement by weights
def layer(gpu: FakeDevice, host: FakeDevice) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding on the host, one product and a norm on the GPU: (tokens, embedded, result)."""
    tokens = new_tensor(I32, 3, name="inp_tokens").as_input()
    embedded = build.get_rows(weight(host, 4, 10, name="token_embd"), tokens).named("inp_embd")
    normed = build.mul(build.rms_norm(embedded, 1e-6), weight(gpu, 4, name="norm"))
    return tokens, embedded, build.mul_mat(weight(gpu, 4, 6, name="w"), normed)


def test_nodes_follow_their_weights() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    tokens, embedded, result = layer(gpu, host)
    graph = place(sched, result)
    assert names(sched) == [("CPU", []), ("CUDA0", ["inp_embd"])]
    assert backend_name(sched, tokens) == "CPU" and sched.cause(tokens) == "1.inp"
    assert backend_name(sched, embedded) == "CPU" and sched.cause(embedded) == "1.wgt0"
    norm = graph.nodes[1]
    assert backend_name(sched, norm) == "CUDA0" and sched.cause(norm) == "2.sup"
    assert norm.src[0] is not None and norm.src[0].name == "CUDA0#inp_embd#0"
    assert buffer_of(norm.src[0]).buft is gpu.buffer_type()  # type: ignore[union-attr]  # placed
    assert sched.get_tensor_backend(norm.src[0]) is None
    write(tokens, [7, 0, 7])
    assert sched.graph_compute(graph) == Status.SUCCESS
    rows = read(embedded)[0, 0]
    normed = rows / np.sqrt(np.mean(rows * rows, -1, keepdims=True) + 1e-6)
    leafs = {t.name: read(t)[0, 0] for t in graph.leafs}
    expected = (normed * leafs["norm"]) @ leafs["w"].T
    np.testing.assert_allclose(read(result)[0, 0], expected, rtol=1e-5)


def products(sched: Scheduler, host: FakeDevice, n_tokens: int) -> tuple[Graph, list[Tensor]]:
    """Three products with host weights, allocated: the graph, its input and the products."""
    x = input_leaf(4, n_tokens, name="x")
    nodes = [x]
    for i in range(3):
        w = weight(host, 4, 4, name=f"w{i}", seed=i)
        nodes.append(build.mul_mat(w, nodes[-1]).named(f"y{i}"))
    return place(sched, nodes[-1]), nodes


def test_large_batches_go_to_the_gpu_one_split_per_weight() -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    sched = scheduler(gpu, host)
    graph, (x, y0, y1, y2) = products(sched, host, MIN_BATCH)
    assert names(sched) == [("CUDA0", ["w0", "x"]), ("CUDA0", ["w1"]), ("CUDA0", ["w2"])]
    assert sched.cause(y0) == "1.off"
    copies = [node.src[0] for node in (y0, y1, y2)]
    assert all(c is not None and c.data is not None for c in copies)
    assert copies[0].data == copies[2].data  # type: ignore[union-attr]  # its memory is free again
    write(x, np.ones((MIN_BATCH, 4)))
    sched.graph_compute(graph)
    on_gpu = read(y2)

    alone = scheduler(host)
    graph, (x, _, _, y2) = products(alone, host, MIN_BATCH)
    write(x, np.ones((MIN_BATCH, 4)))
    alone.graph_compute(graph)
    np.testing.assert_array_equal(read(y2), on_gpu)


@pytest.mark.parametrize("n_tokens", [1, MIN_BATCH - 1])
def test_small_batches_stay(n_tokens: int) -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    sched = scheduler(gpu, host)
    products(sched, host, n_tokens)
    assert names(sched) == [("CPU", [])]


def test_without_op_offload_everything_follows_the_weights() -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    sched = scheduler(gpu, host, op_offload=False)
    products(sched, host, 4 * MIN_BATCH)
    assert names(sched) == [("CPU", [])]


def test_offload_goes_to_the_first_device_that_wants_and_can() -> None:
    cannot = FakeDevice("CUDA0", refused={Op.MUL_MAT}, offloads=large_batch)
    does_not_want, wants = FakeDevice("CUDA1"), FakeDevice("CUDA2", offloads=large_batch)
    host = cpu()
    sched = scheduler(cannot, does_not_want, wants, host)
    _, (*_, y) = products(sched, host, MIN_BATCH)
    assert backend_name(sched, y) == "CUDA2"


def test_embedding_tables_are_never_offloaded() -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    sched = scheduler(gpu, host)
    tokens = new_tensor(I32, 512, name="inp_tokens").as_input()
    rows = build.get_rows(weight(host, 4, 10, name="token_embd"), tokens)
    place(sched, rows)
    assert backend_name(sched, rows) == "CPU"


@pytest.mark.parametrize(("n_tokens", "where"), [(MIN_BATCH - 1, "CPU"), (MIN_BATCH, "CUDA0")])
def test_experts_count_tokens_not_rows(n_tokens: int, where: str) -> None:
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    sched = scheduler(gpu, host)
    experts = weight(host, 4, 4, 8, name="experts")
    ids = new_tensor(I32, 8, n_tokens, name="ids").as_input()
    y = build.mul_mat_id(experts, input_leaf(4, 1, n_tokens, name="x"), ids)
    place(sched, y)
    assert backend_name(sched, y) == where


@pytest.mark.parametrize(("homes", "where"), [((0, 1), "CUDA0"), ((1, 0), "CPU")])
def test_the_first_of_several_weights_decides(homes: tuple[int, int], where: str) -> None:
    devices = FakeDevice("CUDA0"), cpu()
    sched = scheduler(*devices)
    a, b = (weight(devices[home], 4, name="w") for home in homes)
    y = build.add(a, b)
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == (where, "1.wgt0")


def test_weights_in_a_layout_of_the_cpu_are_not_offloaded() -> None:
    """Nobody else could read them, even as a copy."""
    gpu, host = FakeDevice("CUDA0", offloads=large_batch), cpu()
    repacked = FakeBufferType(host, is_host=False)
    host.also_reads.append(repacked)
    w = new_tensor(F32, 4, 4, name="w")
    buffer = alloc_tensors([w], repacked)
    assert buffer is not None
    buffer.set_usage(Usage.WEIGHTS)
    y = build.mul_mat(w, input_leaf(4, MIN_BATCH, name="x"))
    sched = scheduler(gpu, host)
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("CPU", "1.wgt0")


def test_rope_factors_do_not_decide() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    q = build.mul(input_leaf(4, 1, 2, name="x"), weight(gpu, 4, name="w"))
    pos = new_tensor(I32, 2, name="pos").as_input()
    y = build.rope_ext(q, pos, weight(host, 2, name="factors"), RopeParams(4))
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("CUDA0", "2.sup")


# ---------------------------------------------------------------- placement by neighbours
def test_gpu_spreads_down_and_up_but_not_over_cpu_nodes() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(4, name="x")
    above = build.scale(x, 2.0).named("above")
    on_gpu = build.mul(above, weight(gpu, 4, name="g")).named("on_gpu")
    below = build.scale(on_gpu, 2.0).named("below")
    on_cpu = build.mul(below, weight(host, 4, name="c")).named("on_cpu")
    rest = build.scale(on_cpu, 2.0).named("rest")
    place(sched, rest)
    where = [backend_name(sched, t) for t in (above, on_gpu, below, on_cpu, rest)]
    assert where == ["CUDA0", "CUDA0", "CUDA0", "CPU", "CPU"]
    assert names(sched) == [("CUDA0", ["x"]), ("CPU", ["below"])]


def test_the_cpu_spreads_down_and_up_where_no_gpu_has_spread() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    above = build.scale(input_leaf(4, name="x"), 2.0)
    on_cpu = build.mul(above, weight(host, 4, name="c"))
    below = build.scale(on_cpu, 2.0)
    place(sched, below)
    assert [sched.cause(t) for t in (above, on_cpu, below)] == ["2.sup", "1.wgt1", "2.sup"]
    assert names(sched) == [("CPU", [])]


def test_unsupported_nodes_in_a_gpu_part_run_elsewhere() -> None:
    gpu, host = FakeDevice("CUDA0", refused={Op.RMS_NORM}), cpu()
    sched = scheduler(gpu, host)
    a = build.mul(input_leaf(4, name="x"), weight(gpu, 4, name="w")).named("a")
    b = build.rms_norm(a, 1e-6).named("b")
    c = build.scale(b, 2.0).named("c")
    place(sched, c)
    assert [backend_name(sched, t) for t in (a, b, c)] == ["CUDA0", "CPU", "CUDA0"]
    assert sched.cause(b) == "3.best"
    assert names(sched) == [("CUDA0", ["x"]), ("CPU", ["a"]), ("CUDA0", ["b"])]


def test_leftover_node_goes_where_most_sources_can_be_read() -> None:
    first, second, host = FakeDevice("CUDA0"), FakeDevice("CUDA1"), cpu()
    sched = scheduler(first, second, host)
    state = new_tensor(F32, 4, name="state")
    alloc_tensors([state], second.buffer_type())  # not weights: decides nothing in pass 1
    y = build.scale(state, 2.0).named("y")
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("CUDA1", "3.best")
    assert names(sched) == [("CUDA1", [])]


def test_leftover_node_goes_to_the_first_of_equals() -> None:
    cannot_scale = FakeDevice("CUDA0", refused={Op.SCALE})
    sched = scheduler(cannot_scale, FakeDevice("CUDA1"), FakeDevice("CUDA2"), cpu())
    y = build.scale(new_tensor(F32, 4, name="plain"), 2.0)
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("CUDA1", "3.best")


def test_weights_that_a_gpu_reads_itself_are_not_offloaded() -> None:
    host = cpu()
    wants = FakeDevice("CUDA0", offloads=large_batch)
    reads = FakeDevice("IGPU0", DeviceType.IGPU, also_reads=[host.buffer_type()])
    sched = scheduler(wants, reads, host)
    _, (*_, y) = products(sched, host, MIN_BATCH)
    assert (backend_name(sched, y), sched.cause(y)) == ("IGPU0", "1.wgt0")


def test_node_stays_where_its_sources_can_be_read() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    blas = FakeDevice("BLAS", DeviceType.ACCEL, also_reads=[host.buffer_type()])
    host.also_reads.append(gpu.buffer_type())
    bufts = [gpu.buffer_type(), host.buffer_type(), host.buffer_type()]
    sched = Scheduler([d.init_backend() for d in (gpu, blas, host)], bufts)
    state = new_tensor(F32, 4, name="state")
    alloc_tensors([state], gpu.buffer_type())
    y, z = (build.add(input_leaf(4, name="x"), t) for t in (state, input_leaf(4, name="t")))
    for t in (y, z):
        sched.set_tensor_backend(t, sched.backends[2])
    place(sched, y, z)
    assert (backend_name(sched, y), sched.cause(y)) == ("CPU", "usr")
    assert (backend_name(sched, z), sched.cause(z)) == ("BLAS", "3.upg")


def test_node_moves_to_a_better_backend_with_the_same_memory() -> None:
    host = cpu()
    blas = FakeDevice("BLAS", DeviceType.ACCEL, refused=set(Op) - {Op.MUL_MAT})
    blas.also_reads.append(host.buffer_type())
    sched = Scheduler(
        [blas.init_backend(), host.init_backend()], [host.buffer_type(), host.buffer_type()]
    )
    x = input_leaf(4, 2, name="x")
    twice = build.mul(x, weight(host, 4, name="w"))
    y = build.mul_mat(twice, x).named("y")
    z = build.scale(y, 2.0).named("z")
    graph = place(sched, z)
    assert [backend_name(sched, t) for t in (y, z)] == ["BLAS", "CPU"]
    assert sched.cause(y) == "3.upg"
    assert names(sched) == [("CPU", []), ("BLAS", []), ("CPU", [])]  # nothing is copied
    values = np.array([[1, 2, 3, 4], [0, 1, 0, 1]], np.float32)
    write(x, values)
    sched.graph_compute(graph)
    (w,) = (read(t).ravel() for t in graph.leafs if t.name == "w")
    np.testing.assert_allclose(read(z)[0, 0], 2 * values @ (values * w).T, rtol=1e-5)


def test_of_several_better_backends_the_first_is_taken() -> None:
    host = cpu()
    better = [FakeDevice(f"BLAS{i}", also_reads=[host.buffer_type()]) for i in range(2)]
    devices = (*better, host)
    sched = Scheduler([d.init_backend() for d in devices], [host.buffer_type()] * 3)
    y = build.mul(input_leaf(4, name="x"), input_leaf(4, name="z"))
    sched.set_tensor_backend(y, sched.backends[2])
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("BLAS0", "3.upg")


def test_views_are_readable_where_their_source_is() -> None:
    first, host = FakeDevice("CUDA0"), cpu()
    second = FakeDevice("CUDA1", refused={Op.SQR})
    host.also_reads.append(second.buffer_type())
    sched = scheduler(first, second, host)
    a = build.mul(input_leaf(8, name="x"), weight(second, 8, name="w"))
    y = build.sqr(build.view(a, (4,), offset=16))
    place(sched, y)
    assert (backend_name(sched, y), sched.cause(y)) == ("CPU", "3.best")


def test_leaf_that_is_a_view_lives_with_its_source() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    x = input_leaf(8, name="x")
    part = new_tensor(F32, 4, name="part")
    part.view_src = x
    y = build.mul(build.mul(build.view(x, (4,)), part), weight(gpu, 4, name="w"))
    graph = place(sched, y)
    assert (backend_name(sched, part), sched.cause(part)) == ("CPU", "4.vsrc")
    write(x, np.arange(8))
    sched.graph_compute(graph)
    (w,) = (read(t).ravel() for t in graph.leafs if t.name == "w")
    np.testing.assert_array_equal(read(y).ravel(), np.float32([0, 1, 4, 9]) * w)


def test_memory_counts_not_who_it_was_given_to() -> None:
    """An integrated GPU gets the host's state, which the CPU reads all the same."""
    host = cpu()
    gpu = FakeDevice("IGPU0", DeviceType.IGPU, also_reads=[host.buffer_type()])
    state = new_tensor(F32, 4, name="state")
    alloc_tensors([state], host.buffer_type())
    y = build.scale(state, 2.0)
    sched = scheduler(gpu, host)
    sched.set_tensor_backend(y, sched.backends[1])
    place(sched, y)
    assert (backend_name(sched, state), backend_name(sched, y)) == ("IGPU0", "CPU")
    assert names(sched) == [("CPU", [])]


def test_view_lives_with_its_source() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    a = build.mul(input_leaf(8, name="x"), weight(gpu, 8, name="w")).named("a")
    view = build.view(a, (4,), offset=16).named("v")
    y = build.mul(view, weight(host, 4, name="c"))
    place(sched, y)
    assert backend_name(sched, view) == "CUDA0" and sched.cause(view) == "4.vsrc"
    assert names(sched) == [("CUDA0", ["x"]), ("CPU", ["v"])]


def test_plain_leaf_lives_with_its_first_reader() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    plain = new_tensor(F32, 4, name="plain")
    y = build.add(build.mul(plain, weight(gpu, 4, name="w")), plain)
    place(sched, y)
    assert (backend_name(sched, plain), sched.cause(plain)) == ("CUDA0", "4.cur")


def test_plain_leaf_read_through_a_view_only() -> None:
    sched = scheduler(FakeDevice("CUDA0"), cpu())
    plain = new_tensor(F32, 8, name="plain")
    y = build.scale(build.view(plain, (4,), offset=16), 2.0)
    graph = place(sched, y)
    write(plain, np.arange(8))
    sched.graph_compute(graph)
    np.testing.assert_array_equal(read(y).ravel(), [8, 10, 12, 14])


def test_leaf_as_result_and_graph_of_views() -> None:
    sched = scheduler(FakeDevice("CUDA0"), cpu())
    plain = new_tensor(F32, 8, name="plain")
    graph = place(sched, plain)
    assert plain.data is not None and sched.graph_compute(graph) == Status.SUCCESS
    sched.reset()
    x = input_leaf(8, name="x")
    place(sched, build.reshape(build.view(x, (4,)), 2, 2))
    assert names(sched) == [("CPU", [])]


def test_callers_choice_wins() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    sched = scheduler(gpu, host)
    a = build.mul(input_leaf(4, name="x"), weight(gpu, 4, name="w")).named("a")
    sched.set_tensor_backend(a, sched.backends[1])
    place(sched, build.scale(a, 2.0))
    assert (backend_name(sched, a), sched.cause(a)) == ("CPU", "usr")
    assert names(sched)[0] == ("CPU", ["w"])
    sched.reset()
    assert sched.get_tensor_backend(a) is None


def test_memory_that_nobody_can_compute_in() -> None:
    gpu, host = FakeDevice("CUDA0", refused={Op.CPY}), cpu(refused={Op.CPY})
    sched = scheduler(gpu, host)
    cache = new_tensor(F32, 4, name="cache_k")
    alloc_tensors([cache], gpu.buffer_type())
    with pytest.raises(UserError, match=r"cache_k.*CUDA0 buffer.*CPY\nbackends: CUDA0, CPU"):
        place(sched, build.cpy(input_leaf(4, name="x"), cache))


def test_node_that_nobody_can_run() -> None:
    sched = scheduler(FakeDevice("CUDA0", refused={Op.SCALE}), cpu(refused={Op.SCALE}))
    with pytest.raises(UserError, match="no backend can run <y: SCALE f32"):
        place(sched, build.scale(input_leaf(4, name="x"), 2.0).named("y"))
    sched.reset()
    place(sched, build.sqr(input_leaf(4, name="x")))  # still usable
