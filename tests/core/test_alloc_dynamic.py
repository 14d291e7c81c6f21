"""The dynamic allocator's choices, block by block."""

import pytest

from pyggml.alloc_dynamic import MAX_CHUNKS, DynamicAllocator
from pyggml.errors import OutOfMemory

NO_LIMIT = 1 << 62


def with_holes(*sizes: int, max_size: int = NO_LIMIT) -> DynamicAllocator:
    """Blocks of these sizes with free memory between them: 8 used, size free, 8 used, ..."""
    allocator = DynamicAllocator(8, max_size)
    holes = []
    for size in sizes:
        allocator.alloc(8)
        holes.append((*allocator.alloc(size), size))
    allocator.alloc(8)
    for hole in holes:
        allocator.free(*hole)
    return allocator


def test_sizes_are_rounded_up() -> None:
    allocator = DynamicAllocator(16, NO_LIMIT)
    assert [allocator.alloc(n) for n in (1, 16, 17)] == [(0, 0), (0, 16), (0, 32)]
    assert allocator.chunk_sizes == [64]


def test_best_fit_is_the_smallest_and_the_last_of_equals() -> None:
    assert with_holes(32, 16, 24, 16).alloc(16) == (0, 8 + 32 + 8 + 16 + 8 + 24 + 8)
    assert with_holes(32, 24).alloc(20) == (0, 8 + 32 + 8)


def test_holes_go_before_the_tail() -> None:
    allocator = with_holes(64)
    assert allocator.alloc(8) == (0, 8)
    assert allocator.alloc(56) == (0, 16)
    assert allocator.alloc(8) == (0, 80)
    assert allocator.chunk_sizes == [88]


def test_later_chunks_fill_their_holes_first() -> None:
    allocator = DynamicAllocator(8, 32)
    for _ in range(2):  # two full chunks
        for _ in range(4):
            allocator.alloc(8)
    allocator.free(0, 8, 8)
    allocator.free(0, 24, 8)
    allocator.free(1, 0, 16)
    allocator.free(1, 24, 8)
    assert allocator.alloc(8) == (1, 0)  # although 8 bytes would fit exactly in chunk 0
    assert allocator.alloc(8) == (1, 8)
    assert allocator.alloc(8) == (0, 8)


def test_tail_without_growth_and_with_the_least_waste() -> None:
    allocator = DynamicAllocator(8, 64)
    first, second, third = (allocator.alloc(n) for n in (40, 48, 64))
    assert [first, second, third] == [(0, 0), (1, 0), (2, 0)]
    for chunk, size in ((0, 40), (1, 48)):
        allocator.free(chunk, 0, size)
    assert allocator.alloc(24) == (0, 0)  # 16 bytes would be left of 40, 24 of 48
    assert allocator.alloc(32) == (1, 0)
    assert allocator.alloc(24) == (0, 24)  # both would grow by 8: the first


def test_tail_with_the_least_growth() -> None:
    allocator = DynamicAllocator(8, 64)
    allocator.alloc(40)
    allocator.alloc(48)
    allocator.free(1, 0, 48)
    assert allocator.alloc(16) == (1, 0)
    assert allocator.alloc(24) == (1, 16)
    assert allocator.alloc(24) == (1, 40)  # grows by 16; chunk 0 would grow by 24
    assert allocator.chunk_sizes == [40, 64]


def test_freed_neighbours_become_one() -> None:
    allocator = with_holes(16, 16)
    allocator.free(0, 24, 8)  # what was used between the holes
    assert allocator.alloc(40) == (0, 8)


def test_freed_block_joins_the_one_behind_it() -> None:
    allocator = with_holes(16)
    allocator.free(0, 0, 8)
    assert allocator.alloc(24) == (0, 0)
    allocator.free(0, 24, 8)  # the last used block, before the tail
    assert allocator.alloc(100) == (0, 24)


def test_nothing_takes_no_room() -> None:
    allocator = DynamicAllocator(8, NO_LIMIT)
    allocator.free(*allocator.alloc(0), 0)
    assert allocator.chunk_sizes == [0]
    assert allocator.alloc(8) == (0, 0)


def test_one_large_chunk_is_allowed() -> None:
    allocator = DynamicAllocator(8, 16)
    assert allocator.alloc(100) == (0, 0)
    assert allocator.alloc(8) == (1, 0)
    assert allocator.chunk_sizes == [104, 8]


def test_the_last_chunk_has_no_limit() -> None:
    allocator = DynamicAllocator(8, 8)
    places = [allocator.alloc(8) for _ in range(MAX_CHUNKS + 2)]
    assert places[-4:] == [(14, 0), (15, 0), (15, 8), (15, 16)]
    with pytest.raises(OutOfMemory, match="^9223372036854775808 bytes wanted, the largest"):
        allocator.alloc(1 << 63)


def test_full_chunks_have_no_last_block() -> None:
    """What is freed in them is looked at like other ends of chunks: the least waste wins."""
    allocator = DynamicAllocator(8, 32)
    assert [allocator.alloc(32), allocator.alloc(32)] == [(0, 0), (1, 0)]
    allocator.free(0, 0, 16)
    allocator.free(1, 24, 8)
    assert allocator.alloc(8) == (1, 24)


def test_freeing_nothing_changes_nothing() -> None:
    allocator = DynamicAllocator(8, 32)
    allocator.alloc(8)
    allocator.free(0, 0, 0)
    assert allocator.alloc(0) == (0, 8)
