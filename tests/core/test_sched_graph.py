"""A split graph as data says exactly what its scheduler has decided."""

import json
from dataclasses import asdict

import pytest
from fakes import FakeDevice, cpu
from sched_described import check_described, name_of
from sched_graphs import I32, cache_graph, cache_on, input_leaf, scheduler, weight
from sched_layers import N_EMBD, N_EXPERT, N_USED, LayeredModel

from pyggml import build
from pyggml.cost import Rates, expected_experts
from pyggml.estimate import estimate
from pyggml.graph import build_graph
from pyggml.ops import Op
from pyggml.sched_cause import Placed, reason_of
from pyggml.sched_graph import describe
from pyggml.sched_layers import Fold, fold, layer_of, sections_of
from pyggml.tensor import Tensor, new_tensor

F32 = build.F32


@pytest.mark.parametrize("offload", [False, True])
def test_data_equals_the_splits(offload: bool) -> None:
    sched, _ = LayeredModel(offload=offload).split(64)
    assert len(check_described(sched).splits) == sched.n_splits > 3


def test_totals_are_sums() -> None:
    model = LayeredModel()
    graph = model.described(8)
    assert sum(d.nodes for d in graph.devices) == sum(not n.is_view for n in graph.nodes)
    assert sum(d.splits for d in graph.devices) == len(graph.splits)
    assert sum(d.traffic for d in graph.devices) == sum(n.traffic for n in graph.nodes)
    assert sum(s.copies for s in graph.seams) == len(graph.copies)
    assert sum(s.moved for s in graph.seams) == sum(c.moved for c in graph.copies)
    ends = {(s.origin, s.target) for s in graph.seams}
    assert ends == {("CUDA0", "CPU"), ("CPU", "CUDA0")}
    weights = sum(leaf.bytes for leaf in graph.leafs if leaf.kind == "weight")
    assert sum(m.weights for m in graph.memory) == weights
    _, sizes = LayeredModel().split(8)
    assert [m.compute for m in graph.memory] == sizes
    json.dumps(asdict(graph))


def test_only_used_experts_move() -> None:
    graph = LayeredModel(n_layer=1, offload=True).described(64)
    (copy,) = (c for c in graph.copies if c.kind == "used experts")
    assert (copy.origin, copy.target) == ("CPU", "CUDA0")
    assert copy.bytes == 4 * N_EMBD * N_EMBD * N_EXPERT
    used = expected_experts(N_EXPERT, N_USED, 64)
    assert copy.moved == round(used * 4 * N_EMBD * N_EMBD)
    kinds = {name_of(graph, c.source): c.kind for c in graph.copies}
    assert kinds["embd"] == "result" and kinds["attn_inp_mask"] == "input"


def test_what_is_written_elsewhere_comes_back() -> None:
    gpu = FakeDevice("CUDA0", refused={Op.SET_ROWS})
    sched = scheduler(gpu, cpu())
    w, cache = weight(gpu, 4, name="w"), cache_on(gpu, 4, 8)
    sched.reserve_size(cache_graph(gpu, w, cache)[0])
    graph = describe(sched, "token", 1)
    (copy,) = (c for c in graph.copies if c.back)
    assert (name_of(graph, copy.source), copy.origin, copy.target) == ("cache", "CUDA0", "CPU")
    node = next(n for n in graph.nodes if n.name == "stored")
    assert (node.backend, node.cause) == ("CPU", "1.back") and "copied back" in node.reason
    back = sum(c.copies for c in graph.seams if (c.origin, c.target) == ("CPU", "CUDA0"))
    assert back == 1 + sum(c.target == "CUDA0" for c in graph.copies)


def test_times_are_those_of_the_cost_model() -> None:
    model = LayeredModel()
    assert {n.seconds for n in model.described(8).nodes} == {None}
    assert model.described(8).seconds is None
    for device, speed in ((model.gpu, 100.0), (model.host, 10.0)):
        device.rates = lambda speed=speed: Rates(  # type: ignore[method-assign,misc]  # for the test
            speed, speed, h2d_gbs=5.0, d2h_gbs=5.0
        )
    sched, sizes = model.split(8)
    graph = describe(sched, "prompt", 8, sizes)
    times = estimate(sched)
    assert graph.seconds == round(times.seconds, 9) > 0
    copying = [split.copying for split in graph.splits]
    assert copying == [round(split.copying, 9) for split in times.splits]
    engines = sum(d.h2d + d.d2h for d in times.devices)
    assert sum(c for c in copying if c) == pytest.approx(engines, abs=1e-8)
    assert all((c == 0) == (not s.copies) for c, s in zip(copying, graph.splits, strict=True))
    for device in graph.devices:
        mine = [n.seconds for n in graph.nodes if n.backend == device.name]
        assert device.seconds == pytest.approx(sum(s for s in mine if s is not None), abs=1e-8)
        assert device.seconds is not None and device.seconds > 0


# ---------------------------------------------------------------- reasons
def test_reasons_are_sentences() -> None:
    graph = LayeredModel(n_layer=1, offload=True).described(64)
    reason = {n.name: n.reason for n in graph.nodes}
    assert reason["Qcur-0"] == "its weight blk.0.attn_q.weight lies in CUDA0"
    assert reason["norm-0"] == "its neighbours in the graph run on CUDA0, which can run it too"
    assert "blk.0.ffn_up_exps.weight lies in CPU, but there are enough" in reason["ffn_moe_up-0"]
    assert reason["attn_out-0 (reshaped)"] == "a view: it stays with attn_out-0"
    leafs = {leaf.name: leaf.reason for leaf in graph.leafs}
    assert leafs["inp_tokens"].startswith("a graph input")
    assert leafs["output.weight"] == "it lies in CUDA0"


def test_memory_of_another_name_is_told() -> None:
    gpu, host = FakeDevice("CUDA0"), cpu()
    gpu.also_reads.append(host.buffer_type())
    w = weight(host, 4, 4, name="w")
    y = build.mul_mat(w, input_leaf(4, 2, name="x")).named("y")
    sched = scheduler(gpu, host)
    sched.reserve_size(build_graph([y.as_output()]))
    (node,) = describe(sched, "prompt", 2).nodes
    assert node.reason == "its weight w lies in CPU, memory that CUDA0 uses"


@pytest.mark.parametrize("cause", ["usr", "1.vsrc", "3.best", "3.upg", "1.back", "4.cur", ""])
def test_every_word_has_a_sentence(cause: str) -> None:
    tensor = build.scale(input_leaf(4, name="x"), 2.0)
    sentence = reason_of(Placed(tensor, tensor.src, "CUDA7"), cause)
    assert " " in sentence and (cause == "1.vsrc" or "CUDA7" in sentence)


def test_an_unknown_word_stands_for_itself() -> None:
    tensor = new_tensor(F32, 4)
    assert reason_of(Placed(tensor, (), "CPU"), "9.new") == "9.new"


def test_a_tensor_that_nobody_needs() -> None:
    tensor = new_tensor(F32, 4)
    assert reason_of(Placed(tensor, (), "CPU"), "") == "no node needs it: it counts as one of CPU"


# ---------------------------------------------------------------- layers
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("ffn_out-3", 3),
        ("Kcur-12 (reshaped)", 12),
        ("cache_k_l7 (view)", 7),
        ("result_output", None),
        ("node_12", None),
        ("attn-norm", None),
    ],
)
def test_layers_by_name(name: str, layer: int | None) -> None:
    assert layer_of(build.scale(new_tensor(F32, 4), 2.0).named(name)) == layer


@pytest.mark.parametrize("name", ["blk.5.ffn_up.weight", "CUDA0#blk.5.ffn_up.weight#0"])
def test_layers_by_weight(name: str) -> None:
    assert layer_of(build.mul(input_leaf(4, name="x"), new_tensor(F32, 4, name=name))) == 5


def nodes_named(*names: str) -> list[Tensor]:
    return [build.scale(new_tensor(F32, 4), 2.0).named(name) for name in names]


def test_sections_are_runs() -> None:
    nodes = nodes_named("embd", "norm-0", "node_2", "out-0", "norm-1", "node_5", "out-1", "result")
    shown = [(s.name, s.start, s.stop) for s in sections_of(nodes)]
    assert shown == [("input", 0, 1), ("layer 0", 1, 4), ("layer 1", 4, 7), ("output", 7, 8)]
    assert [s.name for s in sections_of(nodes_named("a", "b"))] == ["graph"]
    assert sections_of([]) == ()


@pytest.mark.parametrize(
    ("looks", "folds"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("abab", [(0, 2, 2)]),
        ("xaaabaaabz", [(0, 1, 1), (1, 4, 2), (9, 1, 1)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ],
)
def test_alike_layers_are_folded(looks: str, folds: list[tuple[int, int, int]]) -> None:
    sections = sections_of(nodes_named(*(f"x-{i}" for i in range(len(looks)))))
    assert fold(sections, looks) == tuple(Fold(*f) for f in folds)


def test_layers_on_other_devices_are_not_alike() -> None:
    graph = LayeredModel(n_layer=8, on_gpu=3).described(8)
    folded = [f for f in graph.folds if f.repeats > 1]
    assert [(graph.sections[f.first].layer, f.repeats) for f in folded] == [(1, 2), (3, 5)]


def test_a_graph_of_no_nodes() -> None:
    sched = scheduler(cpu())
    sched.reserve_size(build_graph([new_tensor(I32, 4, name="x").as_input()]))
    graph = describe(sched, "empty", 1)
    assert (graph.nodes, graph.splits, graph.sections, graph.folds) == ((), (), (), ())
    assert [leaf.kind for leaf in graph.leafs] == ["input"]


def test_ops_are_named() -> None:
    graph = LayeredModel(n_layer=1).described(8)
    assert Op.MUL_MAT_ID.name in {n.op for n in graph.nodes}
