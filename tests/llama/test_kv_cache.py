"""KV caches: layout, windows, masks and the sequence operations over all caches of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_only import PlanBufferType
from tiny_llama import hparams

from pyggml.backend import BufferType, buffer_of
from pyggml.backends.reference.device import RefDevice
from pyggml.dtypes import GGMLType
from pyggml.errors import OutOfMemory, UserError
from pyggml.llama.batch import Batch, Ubatch
from pyggml.llama.hparams import HParams
from pyggml.llama.kv_cache import CacheParams, KvCache, Memory, make_memory
from pyggml.llama.memory_part import Where


def params(size: int = 512, **changes: Any) -> CacheParams:
    values: dict[str, Any] = {"type_k": GGMLType.F16, "type_v": GGMLType.F16, "v_trans": False}
    return CacheParams(size=size, **{**values, **changes})


def on(buft: BufferType) -> Where:
    return lambda il, name: buft


def windowed(n_swa: int = 300, **changes: Any) -> HParams:
    return hparams(n_swa=n_swa, is_swa=(True, True, False), **changes)


def allocated(memory: Memory) -> Memory:
    for cache in memory.caches:
        cache.allocate(on(RefDevice().buffer_type()))
    return memory


def put(memory: Memory, pos: range, *seqs: int) -> None:
    for cache in memory.caches:
        slot = cache.find_slot(cache.cells, len(pos))
        assert slot is not None
        cache.cells.occupy(slot, np.array(pos, np.int32), [seqs] * len(pos))


# ---------------------------------------------------------------- layout
def test_tensors_have_the_names_and_shapes_of_llama_cpp() -> None:
    cache = KvCache(hparams(), range(3), params())
    assert [(t.name, t.ne[:2]) for t in cache.k.values()] == [
        (f"cache_k_l{il}", (12, 512)) for il in range(3)
    ]
    assert [(t.name, t.ne[:2]) for t in cache.v.values()] == [
        (f"cache_v_l{il}", (6, 512)) for il in range(3)
    ]
    assert cache.nbytes == 3 * 512 * (12 + 6) * 2


def test_keys_and_values_are_seen_head_by_head() -> None:
    cache = KvCache(hparams(), range(3), params())
    keys, values = cache.keys(1, 256), cache.values(1, 256)
    assert keys.ne[:3] == (4, 256, 3) and keys.nb[:3] == (2, 12 * 2, 4 * 2)
    assert values.ne[:3] == (2, 256, 3) and values.nb[:3] == (2, 6 * 2, 2 * 2)


def test_transposed_values_have_a_row_per_dimension() -> None:
    cache = KvCache(hparams(), range(3), params(v_trans=True))
    values = cache.values(1, 256)
    assert values.ne[:3] == (256, 2, 3) and values.nb[:3] == (2, 512 * 2, 512 * 2 * 2)
    indices = cache.v_indices(np.array([7, 9], np.int32)).reshape(2, 6)
    assert indices.tolist() == [[j * 512 + cell for j in range(6)] for cell in (7, 9)]


def test_a_fresh_cache_is_zero() -> None:
    memory = allocated(make_memory(hparams(), params(256), n_ubatch=32))
    buffer = buffer_of(memory.caches[0].k[0])
    assert buffer is not None
    raw = memoryview(bytearray(b"x" * memory.caches[0].k[0].nbytes))
    buffer.get(memory.caches[0].k[0], raw)
    assert not any(raw)


def test_memory_that_does_not_fit_has_no_cells() -> None:
    buft = PlanBufferType(room=1000)
    cache = KvCache(hparams(), range(3), params())
    with pytest.raises(OutOfMemory):
        cache.allocate(on(buft))
    assert cache.cells.size == 0 and buft.total == 0


# ---------------------------------------------------------------- which caches
@pytest.mark.parametrize(
    ("n_swa", "n_ubatch", "n_seq_max", "swa_full", "size"),
    [
        (300, 32, 1, False, 512),  # 332 rounded up
        (200, 32, 1, False, 256),
        (300, 32, 2, False, 768),  # one window for each sequence: 632
        (300, 32, 4, False, 1024),
        (300, 32, 1, True, 1024),
        (5000, 32, 1, False, 1024),
    ],
)
def test_size_of_a_window_cache(
    n_swa: int, n_ubatch: int, n_seq_max: int, swa_full: bool, size: int
) -> None:
    memory = make_memory(
        windowed(n_swa), params(1024, n_seq_max=n_seq_max), n_ubatch=n_ubatch, swa_full=swa_full
    )
    full, window = memory.caches
    assert (full.layers, window.layers) == ((2,), (0, 1))
    assert (full.params.size, full.params.n_swa) == (1024, 0)
    assert (window.params.size, window.params.n_swa) == (size, n_swa)
    assert memory.can_shift is (size == 1024)
    assert [memory.index_of_layer(il) for il in range(3)] == [1, 1, 0]


def test_models_of_one_kind_of_layer_have_one_cache() -> None:
    assert len(make_memory(hparams(), params(), n_ubatch=32).caches) == 1
    all_windowed = hparams(n_swa=8, is_swa=(True,) * 3)
    (cache,) = make_memory(all_windowed, params(), n_ubatch=32).caches
    assert cache.layers == (0, 1, 2) and cache.params.reuse


def test_a_window_cache_as_large_as_the_other_holds_the_same_cells() -> None:
    memory = allocated(make_memory(windowed(3), params(256), n_ubatch=32, swa_full=True))
    put(memory, range(256), 0)
    with pytest.raises(AssertionError):
        put(memory, range(256, 257), 0)
    memory.remove(0, 10, 100)
    memory.shift(0, 100, 256, -90)
    assert [cache.cells.pos_min(0) for cache in memory.caches] == [0, 0]
    assert memory.can_continue(0, 166)


def test_graphs_look_at_steps_of_256_cells() -> None:
    memory = allocated(make_memory(hparams(), params(1024), n_ubatch=32))
    (cache,) = memory.caches
    assert cache.n_kv() == 256
    put(memory, range(256), 0)
    assert cache.n_kv() == 256
    put(memory, range(256, 257), 0)
    assert cache.n_kv() == 512
    memory.remove(0, 100)
    assert cache.n_kv() == 256
    assert KvCache(hparams(), range(3), params(100)).n_kv() == 100


# ---------------------------------------------------------------- over all caches
def test_a_window_cache_forgets_what_the_other_holds() -> None:
    memory = allocated(make_memory(windowed(8), params(1024), n_ubatch=32))
    full, window = memory.caches
    for start in range(0, 640, 32):
        put(memory, range(start, start + 32), 0)
    assert full.cells.pos_min(0) == 0
    assert window.params.size == 256 and 0 < window.cells.pos_min(0) <= 640 - 8
    assert memory.pos_min(0) == window.cells.pos_min(0) and memory.pos_max(0) == 639
    assert memory.can_continue(0, 640)
    memory.remove(0, 100)
    assert memory.pos_max(0) == 99 and not memory.can_continue(0, 100)


def test_operations_reach_every_cache() -> None:
    memory = allocated(make_memory(windowed(300), params(512, n_seq_max=3), n_ubatch=8))
    put(memory, range(6), 0)
    memory.copy(0, 1, 0, 4)
    memory.copy(0, 2)
    assert memory.fingerprint(0) == memory.fingerprint(2) != memory.fingerprint(1)
    assert [memory.pos_max(s) for s in range(3)] == [5, 3, 5]
    memory.remove(2, 2)
    memory.keep(2)
    assert [memory.pos_max(s) for s in range(3)] == [-1, -1, 1]
    memory.shift(2, 0, 2, 3)
    memory.divide(2, 0, 9, 2)
    for cache in memory.caches:
        assert cache.cells.pos[:2].tolist() == [1, 2] and cache.cells.shift[:2].tolist() == [1, 1]
    memory.clear()
    assert memory.pos_max(2) == -1


@pytest.mark.parametrize("seq", [-2, -1, 3])
def test_unknown_sequences_are_refused(seq: int) -> None:
    memory = allocated(make_memory(hparams(), params(256, n_seq_max=3), n_ubatch=8))
    put(memory, range(2), 0)
    calls: list[tuple[Any, ...]] = [
        (memory.pos_max, seq),
        (memory.pos_min, seq),
        (memory.copy, 0, seq),
        (memory.copy, seq, 0),
        (memory.keep, seq),
        (memory.shift, seq, 0, 1, 1),
        (memory.divide, seq, 0, 1, 1),
        (memory.can_continue, seq, 0),
    ]
    for call, *arguments in calls:
        with pytest.raises(UserError, match=rf"no sequence {seq}: they are 0..2"):
            call(*arguments)
    if seq != -1:  # which means all of them
        with pytest.raises(UserError, match="no sequence"):
            memory.remove(seq)


# ---------------------------------------------------------------- masks
@settings(deadline=None)
@given(
    held=st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 2))), max_size=12),
    tokens=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1)), min_size=1
    ),
    n_swa=st.integers(0, 4),
)
def test_a_token_sees_the_past_of_its_first_sequence(
    held: list[tuple[int, set[int]]], tokens: list[tuple[int, list[int]]], n_swa: int
) -> None:
    cache = KvCache(hparams(), range(3), params(16, n_seq_max=3, n_swa=n_swa))
    cache.allocate(on(RefDevice().buffer_type()))
    for i, (pos, seqs) in enumerate(held):
        if seqs:
            cache.cells.occupy(np.array([i], np.int32), np.array([pos], np.int32), [tuple(seqs)])
    cells = {
        i: (int(cache.cells.pos[i]), set(np.flatnonzero(cache.cells.seq[:, i])))
        for i in np.flatnonzero(cache.cells.pos >= 0)
    }
    n = len(tokens)
    positions = np.array([p for p, _ in tokens], np.int32)
    seq_ids = tuple(tuple(ids) for _, ids in tokens)
    hidden = cache.mask(
        Ubatch(np.zeros(n, np.int32), positions, seq_ids, positions[:0], positions), 14
    )
    assert hidden.shape == (n, 14)
    for row, (p, ids) in zip(hidden, tokens, strict=True):
        seen = {
            i
            for i, (cell_pos, cell_seqs) in cells.items()
            if ids[0] in cell_seqs and cell_pos <= p and (not n_swa or p - cell_pos < n_swa)
        }
        assert set(np.flatnonzero(~row)) == seen


def test_the_mask_of_a_prompt_is_a_triangle() -> None:
    memory = allocated(make_memory(hparams(), params(256), n_ubatch=8))
    put(memory, range(5), 0)
    (ubatch,) = Batch.of([1] * 5, 0).split(8)
    hidden = memory.caches[0].mask(ubatch, 256)
    np.testing.assert_array_equal(~hidden[:, :5], np.tri(5, dtype=bool))
    assert hidden[:, 5:].all()
