"""Allocating a list of tensors at once: the alloc_buffer_n and size cases of ggml's test-alloc."""

from collections.abc import Sequence

import pytest
from plan_only import BASE, PlanBufferType

from pyggml import build
from pyggml.backend import Buffer, MultiBuffer, Usage, alloc_tensors, tensors_size
from pyggml.errors import OutOfMemory
from pyggml.tensor import Tensor, new_tensor


def floats(*sizes: int) -> list[Tensor]:
    """F32 vectors of these many bytes."""
    return [new_tensor(build.F32, n // 4) for n in sizes]


def check_disjoint(tensors: Sequence[Tensor]) -> None:
    """All tensors lie inside their buffers and share no byte."""
    for i, t in enumerate(tensors):
        assert t.buffer is not None and t.data is not None
        assert t.buffer.base <= t.data and t.data + t.nbytes <= t.buffer.base + t.buffer.size
        for other in tensors[:i]:
            assert other.data is not None
            apart = t.data + t.nbytes <= other.data or other.data + other.nbytes <= t.data
            assert t.buffer is not other.buffer or apart


# sizes of the tensors, largest buffer, alignment -> sizes of the buffers
PLANS = {
    "one buffer": ((8, 8), 1 << 40, 8, [16]),
    "several buffers": ((8, 8, 8, 8), 16, 8, [16, 16]),
    "rounded up": ((4, 4), 1 << 40, 16, [32]),
    "rounded up to eight": ((4, 4, 8), 1 << 40, 8, [24]),
    "one tensor above the largest": ((16,), 8, 8, [16]),
    "nothing has elements": ((0, 0), 1 << 40, 8, []),
    "no tensors": ((), 1 << 40, 8, []),
    "a full buffer before a large one": ((8, 24, 8), 16, 8, [8, 24, 8]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_plan(plan: tuple[tuple[int, ...], int, int, list[int]]) -> None:
    sizes, max_size, alignment, expected = plan
    buft = PlanBufferType(max_size, alignment)
    tensors = floats(*sizes)
    assert tensors_size(tensors, buft) == sum(expected)
    assert buft.buffers == [] and all(t.data is None for t in tensors)  # it only predicts
    buffer = alloc_tensors(tensors, buft)
    assert [b.size for b in buft.buffers] == expected
    if not expected:
        assert buffer is None
        return
    assert buffer is not None and buffer.size == sum(expected)
    assert isinstance(buffer, MultiBuffer) == (len(expected) > 1)
    check_disjoint(tensors)


def test_results_of_operations_are_placed_too() -> None:
    a, b = floats(8, 8)
    c = build.add(a, b)
    buft = PlanBufferType()
    buffer = alloc_tensors([a, b, c], buft)
    assert buffer is buft.buffers[0] and buffer.size == 24
    check_disjoint([a, b, c])


def test_already_allocated() -> None:
    a0, a1, b = floats(8, 8, 8)
    buft = PlanBufferType()
    first = alloc_tensors([a0, a1], buft)
    places = [(t.buffer, t.data) for t in (a0, a1)]
    assert tensors_size([a0, a1, b], buft) == 8
    assert alloc_tensors([a0, a1], buft) is None
    second = alloc_tensors([a0, a1, b], buft)
    assert second is not None and second is not first and second.size == 8
    assert b.buffer is second and [(t.buffer, t.data) for t in (a0, a1)] == places
    assert alloc_tensors([a0, a1, b], buft) is None


def test_views_share_their_source() -> None:
    base, extra = floats(16, 8)
    view = build.view(base, (2,), offset=8)
    buft = PlanBufferType()
    assert tensors_size([base, view, extra], buft) == 24
    buffer = alloc_tensors([base, view, extra], buft)
    assert buffer is not None and buffer.size == 24
    assert base.data == BASE and view.data == BASE + 8
    assert base.buffer is view.buffer is extra.buffer is buffer


class Override(PlanBufferType):
    """Allocates 64 bytes for whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def alloc_size_n(self, tensors: Sequence[Tensor]) -> int:
        self.calls.append("size")
        return 64

    def alloc_buffer_n(self, tensors: Sequence[Tensor]) -> Buffer | None:
        self.calls.append("alloc")
        return self.alloc_buffer(64)


def test_buffer_type_may_plan_itself() -> None:
    buft = Override()
    assert tensors_size(floats(8, 8), buft) == 64
    buffer = alloc_tensors(floats(8, 8), buft)
    assert buffer is not None and buffer.size == 64
    assert buft.calls == ["size", "alloc"]


def test_out_of_memory_leaves_nothing() -> None:
    buft = PlanBufferType(max_size=16, room=40)
    tensors = floats(16, 16, 16)
    with pytest.raises(OutOfMemory, match="16 bytes wanted, 8 free"):
        alloc_tensors(tensors, buft)
    assert buft.total == 0 and all(t.data is None for t in tensors)


def test_multi_buffer_passes_on() -> None:
    buft = PlanBufferType(max_size=16)
    buffer = alloc_tensors(floats(16, 16), buft)
    assert isinstance(buffer, MultiBuffer)
    buffer.set_usage(Usage.WEIGHTS)
    assert all(b.usage == Usage.WEIGHTS for b in buft.buffers)
    buffer.free()
    assert buft.total == 0
