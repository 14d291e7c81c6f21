"""Where a product lies that continues another one."""

from memory_check import check_all_placed, check_no_overlap
from plan_only import PlanBufferType

from pyggml import build
from pyggml.alloc import GraphAllocator
from pyggml.graph import build_graph
from pyggml.tensor import Tensor, new_tensor

F32, I32 = build.F32, build.I32


def products() -> tuple[Tensor, Tensor, Tensor]:
    """Activations, a product of experts, and one that continues it: all of one layout."""
    weights, x = new_tensor(F32, 8, 8, 4).as_input(), new_tensor(F32, 8, 2, 3).as_input()
    ids, cold = (new_tensor(I32, *ne).as_input() for ne in ((2, 3), (4,)))
    x = build.scale(x, 2.0)
    hot = build.mul_mat_id(weights, x, ids)
    return x, hot, build.mul_mat_id_cold(weights, x, ids, cold, into=hot)


def allocate(*results: Tensor) -> None:
    graph = build_graph([result.as_output() for result in results])
    assert GraphAllocator([PlanBufferType()]).alloc_graph(graph)
    check_all_placed(graph)
    check_no_overlap(graph)


def test_a_product_takes_the_place_of_what_it_continues() -> None:
    x, hot, joined = products()
    assert x.same_layout(hot) and hot.same_layout(joined)
    allocate(joined)
    assert joined.data == hot.data != x.data


def test_a_product_never_takes_the_place_of_its_activations() -> None:
    x, hot, _ = products()
    allocate(hot)
    assert hot.data != x.data


def test_what_others_read_is_continued_elsewhere() -> None:
    _, hot, joined = products()
    allocate(build.add(joined, hot))
    assert joined.data != hot.data


def test_an_output_is_continued_elsewhere() -> None:
    _, hot, joined = products()
    allocate(hot, joined)
    assert joined.data != hot.data
