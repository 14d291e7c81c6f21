"""Contexts on the reference device: exact results whatever the batches, the memory and the luck."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import Exact, kl, knows
from oracle import LlamaCpp
from tiny import TABLE_GELU, VARIANTS, write_tiny
from tiny_linear import LINEAR_ARCHS
from tiny_llama import DEVICE, Breaking, Limited, context_of, logits_after_cut, run, tiny_model

from pyggml.backend import Device, Status
from pyggml.backends.reference.device import RefDevice
from pyggml.errors import OutOfMemory, UserError
from pyggml.llama.batch import Batch, BatchError
from pyggml.llama.context import Context, ContextFull
from pyggml.llama.context_params import RopeOverrides
from pyggml.llama.loader import Model, load_model
from pyggml.ops import Op
from pyggml.registry import cpu_device
from pyggml.tensor import Tensor

EXACT = 1e-11  # of float32 against float64, in nats
# where llama.cpp rounds more: GELUs to F16, sums over all tokens in float32
ROUNDED = {**dict.fromkeys(TABLE_GELU, 1e-6), **dict.fromkeys(LINEAR_ARCHS, 1e-9)}
N_VOCAB = 300


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([seed, n]).integers(N_VOCAB, size=n)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("context") / "llama.gguf")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Its keys and values depend on token and position only, so that shifted ones can be exact."""
    path = tmp_path_factory.mktemp("context") / "one.gguf"
    return tiny_model(path, extra=("rope_freqs",), n_layer=1)


# ---------------------------------------------------------------- results
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_is_exact(tmp_path: Path, variant: str, flash_attn: str) -> None:
    arch, options = VARIANTS[variant]
    tiny = tiny_model(tmp_path / "m.gguf", arch, **options)
    context = context_of(tiny, flash_attn=flash_attn, n_ubatch=16)
    assert context.flash_attn is (flash_attn == "on")
    ids = prompt(40)
    if knows(arch, options):
        expected, allowed = Exact(tmp_path / "m.gguf").logits(ids), EXACT
    else:
        with LlamaCpp(tmp_path / "m.gguf") as reference:
            expected, allowed = reference.logits(ids), ROUNDED.get(arch, EXACT)
    assert kl(expected, run(context, ids)).max() < allowed


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


@pytest.mark.parametrize(
    "metadata",
    [
        YARN,
        YARN | {"rope.scaling.attn_factor": 1.5},
        YARN | {"rope.scaling.factor": 0.5},
        YARN | {"rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_log_multiplier": 0.5},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scale_linear": 2.0},
    ],
    ids=lambda m: ",".join(f"{k.removeprefix('rope.scaling.')}={v}" for k, v in m.items()),
)
@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_positions_are_scaled_as_in_llama_cpp(
    tmp_path: Path, arch: str, metadata: dict[str, Any]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch, metadata=metadata)
    ids = prompt(40)
    found = run(context_of(load_model(path, devices=[DEVICE])), ids)
    with LlamaCpp(path) as reference:
        allowed = 1e-6 if arch in TABLE_GELU else 1e-10
        assert kl(reference.logits(ids), found).mean() < allowed


@pytest.mark.parametrize("n_ubatch", [1, 7, 64])
@pytest.mark.parametrize("n_batch", [10, 64])
def test_batches_make_no_difference(model: Model, n_ubatch: int, n_batch: int) -> None:
    ids = prompt(50)
    expected = run(context_of(model), ids)
    found = run(context_of(model, n_ubatch=n_ubatch, n_batch=n_batch), ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_window_forgets_only_what_nobody_sees(tmp_path: Path) -> None:
    """Cells of the window cache are used again and again."""
    tiny = tiny_model(tmp_path / "m.gguf", "gemma3", n_layer=3)
    context = context_of(tiny, n_ctx=1024, n_ubatch=64)
    window = context.memory.caches[1]
    assert window.params.size == 256
    ids = prompt(600)
    found = run(context, ids)
    assert window.cells.pos_min(0) > 256
    # angles of float32: their error grows with the position
    assert kl(Exact(tmp_path / "m.gguf").logits(ids), found).max() < 1e-8


# ---------------------------------------------------------------- outputs
def test_logits_of_the_marked_tokens(model: Model) -> None:
    context = context_of(model, n_ubatch=3)
    ids = prompt(9)
    everything = run(context_of(model), ids)
    batch = Batch.of(ids, 0)
    batch.wants_logits[[0, 4]] = True
    context.decode(batch)
    assert context.all_logits().shape == (3, N_VOCAB)
    for i in (0, 4, 8):
        np.testing.assert_allclose(context.logits(i), everything[i], atol=1e-5)
    np.testing.assert_array_equal(context.logits(-1), context.logits(8))
    np.testing.assert_array_equal(context.logits(-3), context.logits(0))
    for i in (1, 9, -4):
        with pytest.raises(BatchError, match=f"no logits of token {i}"):
            context.logits(i)


def test_a_batch_without_outputs_still_fills_the_memory(model: Model) -> None:
    context = context_of(model, n_ubatch=4)
    ids = prompt(11)
    context.decode(Batch.of(ids[:10], 0, logits="none"))
    assert context.all_logits().shape == (0, N_VOCAB)
    with pytest.raises(BatchError, match="no logits"):
        context.logits(-1)
    found = run(context, ids[10:], 10)
    np.testing.assert_allclose(found[0], run(context_of(model), ids)[-1], atol=1e-5)


def test_a_refused_batch_leaves_no_old_logits_and_no_trace(model: Model) -> None:
    context = context_of(model)
    run(context, prompt(4))
    with pytest.raises(BatchError):
        context.decode(Batch.of([1], 7))
    assert context.memory.pos_max(0) == 3
    np.testing.assert_array_equal(context.logits(-1).shape, N_VOCAB)  # of the batch before


def test_graphs_are_reused_while_their_shape_stays(model: Model) -> None:
    context = context_of(model)
    run(context, prompt(10))
    for i in range(5):
        run(context, [i], 10 + i)
    assert context.perf.n_reused == 4
    assert (context.perf.n_prompt, context.perf.n_eval) == (10, 5)


# ---------------------------------------------------------------- sequences
def test_sequences_do_not_see_each_other(model: Model) -> None:
    context = context_of(model, n_seq_max=3)
    a, b = prompt(9, 1), prompt(7, 2)
    expected = [run(context_of(model), ids) for ids in (a, b)]
    tokens, pos, seqs = [], [], []
    for i in range(9):
        for seq, ids in ((0, a), (2, b)):
            if i < len(ids):
                tokens.append(ids[i])
                pos.append(i)
                seqs.append((seq,))
    batch = Batch(
        np.array(tokens, np.int32), np.array(pos, np.int32), tuple(seqs), np.ones(16, np.bool_)
    )
    context.decode(batch)
    for seq, rows in ((0, expected[0]), (2, expected[1])):
        mine = [i for i, ids in enumerate(seqs) if ids == (seq,)]
        np.testing.assert_allclose(context.all_logits()[mine], rows, atol=1e-5)


def test_a_copied_sequence_goes_its_own_way(model: Model) -> None:
    context = context_of(model, n_seq_max=2)
    start, a, b = prompt(8, 1), prompt(4, 2), prompt(4, 3)
    run(context, start)
    context.memory.copy(0, 1)
    assert context.memory.caches[0].cells.n_used == 8
    for seq, rest in ((0, a), (1, b)):
        found = run(context, rest, 8, seq)
        expected = run(context_of(model), start + rest)[8:]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_shared_tokens_belong_to_both(model: Model) -> None:
    context = context_of(model, n_seq_max=2)
    ids = prompt(5)
    pos = np.arange(5, dtype=np.int32)
    both = Batch(np.array(ids, np.int32), pos, ((0, 1),) * 5, np.ones(5, np.bool_))
    context.decode(both)
    found = run(context, [7], 5, seq=1)
    np.testing.assert_allclose(found[0], run(context_of(model), [*ids, 7])[-1], atol=1e-5)
    # they differ by that token now
    with pytest.raises(BatchError, match="sequence 1: position 5 follows 5"):
        context.decode(Batch(both.tokens[:1], both.pos[:1] + 5, ((0, 1),), both.wants_logits[:1]))
    context.memory.remove(1, 5)
    run(context, [8], 5, seq=0)
    run(context, [9], 5, seq=1)
    with pytest.raises(BatchError, match="whose earlier tokens differ"):
        context.decode(Batch(both.tokens[:1], both.pos[:1] + 6, ((0, 1),), both.wants_logits[:1]))


# ---------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch.of([], 0), "the batch is empty"),
        (Batch.of([0] * 33, 0), "the batch has 33 tokens, more than --batch-size 32"),
        (Batch.of([300], 0), "token 0 of the batch is 300: ids are 0..299"),
        (Batch.of([1], 0, seq=1), r"sequences \(1,\)"),
    ],
)
def test_batches_that_cannot_be(model: Model, batch: Batch, message: str) -> None:
    context = context_of(model, n_batch=32)
    with pytest.raises(BatchError, match=message):
        context.decode(batch)
    assert context.memory.pos_max(0) == -1


def test_a_full_context_changes_nothing(model: Model) -> None:
    context = context_of(model, n_batch=64, n_ubatch=8)
    run(context, prompt(240))
    cells = context.memory.caches[0].cells
    before = cells.clone()
    with pytest.raises(ContextFull, match="no room for 8 more tokens in a context of 256"):
        context.decode(Batch.of(prompt(24), 240))
    assert np.array_equal(cells.pos, before.pos) and cells.head == before.head
    assert run(context, prompt(16), 240).shape == (16, N_VOCAB)


def test_a_cache_that_does_not_fit_names_the_flag(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    device = Limited(4_000_000)
    tiny = load_model(path, devices=[device])
    held = device.live
    with pytest.raises(OutOfMemory) as caught:
        context_of(tiny, n_ctx=100_000)
    # 2 layers x 2 x 64 numbers of 4 bytes
    assert str(caught.value).startswith(
        "a context of 100096 tokens needs 98 MiB for keys and values, which REF does not have: "
        "use a smaller --ctx-size\n"
    )
    assert device.live == held
    with pytest.raises(OutOfMemory):
        context_of(tiny, n_ctx=2**31)
    context_of(tiny, n_ctx=512, n_ubatch=16).close()


def test_graphs_that_do_not_fit_give_everything_back(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    device = Limited(4_000_000)
    tiny = load_model(path, devices=[device])
    held = device.live
    with pytest.raises(OutOfMemory, match="a smaller batch"):
        context_of(tiny, n_ctx=1024, n_ubatch=1024, type_k="f16", type_v="f16")
    assert device.live == held


def test_more_context_than_the_model_was_trained_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_model(tmp_path / "m.gguf", metadata={"context_length": 100})
    context_of(tiny, n_ctx=257)
    assert "the context of 512 tokens is longer than the 100 the model was trained" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        context_of(tiny, n_ctx=50)


class NoFlash(RefDevice):
    """Cannot do flash attention."""

    def supports_op(self, node: Tensor) -> bool:
        return node.op != Op.FLASH_ATTN_EXT and super().supports_op(node)


def test_flash_attention_without_a_device_for_it(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    tiny = load_model(path, devices=[NoFlash()])
    assert not context_of(tiny).flash_attn
    with pytest.raises(UserError, match="--flash-attn on: .* with keys of f32 and values of f32"):
        context_of(tiny, flash_attn="on")


# ---------------------------------------------------------------- shifted positions
@pytest.mark.parametrize(
    "rope", [RopeOverrides(), RopeOverrides(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=64)]
)
@pytest.mark.parametrize(("type_k", "atol"), [("f32", 2e-5), ("f16", 2e-2), ("bf16", 0.2)])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("device", [DEVICE, cpu_device()], ids=lambda device: device.name)
def test_shifted_keys_are_those_of_the_new_positions(
    one_layer: Model,
    rope: RopeOverrides,
    type_k: str,
    atol: float,
    flash_attn: str,
    device: Device,
) -> None:
    ids = prompt(30)
    given: dict[str, Any] = {
        "rope": rope,
        "flash_attn": flash_attn,
        "type_k": type_k,
        "type_v": type_k,
    }
    with closing(load_model(one_layer.gguf.path, devices=[device])) as tiny:
        context = context_of(tiny, **given)
        found = logits_after_cut(context, ids, 4, 12, [5, 6, 7])
        assert not context.memory.caches[0].cells.has_shift
        context.close()
    expected = run(context_of(one_layer, **given), ids[:4] + ids[12:] + [5, 6, 7])
    np.testing.assert_allclose(found, expected[-3:], atol=atol)


def test_windowed_layers_are_shifted_with_their_own_frequencies(tmp_path: Path) -> None:
    tiny = tiny_model(
        tmp_path / "m.gguf",
        "gemma3",
        n_layer=1,
        metadata={"attention.sliding_window_pattern": 0, "rope.freq_base_swa": 2e4},
    )
    ids = prompt(30)
    context = context_of(tiny)
    assert context.memory.can_shift
    found = logits_after_cut(context, ids, 0, 10, [5])
    np.testing.assert_allclose(found, run(context_of(tiny), ids[10:] + [5])[-1:], atol=1e-4)


def test_a_shift_makes_room(model: Model) -> None:
    context = context_of(model, n_batch=64)
    run(context, prompt(256))
    with pytest.raises(ContextFull):
        context.decode(Batch.of([1], 256))
    context.memory.remove(0, 0, 100)
    context.memory.shift(0, 100, 256, -100)
    assert run(context, prompt(100), 156).shape == (100, N_VOCAB)


# ---------------------------------------------------------------- interrupts and failures
@pytest.fixture
def breaking(tmp_path: Path) -> Iterator[tuple[Breaking, Context]]:
    device = Breaking()
    tiny = load_model(write_tiny(tmp_path / "m.gguf", "llama"), devices=[device])
    yield device, context_of(tiny, n_ubatch=8)


def test_an_interrupt_keeps_the_ubatches_before_it(
    breaking: tuple[Breaking, Context], model: Model
) -> None:
    device, context = breaking
    ids = prompt(30)
    device.fuse = 3
    with pytest.raises(KeyboardInterrupt):
        context.decode(Batch.of(ids, 0))
    assert context.memory.pos_max(0) == 15
    with pytest.raises(BatchError, match="no logits"):
        context.logits(-1)
    found = run(context, ids[16:], 16)
    np.testing.assert_allclose(found, run(context_of(model), ids)[16:], atol=1e-5)


def test_a_failed_run_is_an_error_and_leaves_nothing(breaking: tuple[Breaking, Context]) -> None:
    device, context = breaking
    device.fuse, device.failure = 1, lambda: Status.FAILED
    with pytest.raises(RuntimeError, match="computing the graph failed: FAILED"):
        context.decode(Batch.of([1, 2], 0))
    assert context.memory.pos_max(0) == -1


def test_half_shifted_keys_are_thrown_away(breaking: tuple[Breaking, Context]) -> None:
    device, context = breaking
    run(context, prompt(20))
    context.memory.remove(0, 0, 10)
    context.memory.shift(0, 10, 20, -10)
    device.fuse = 1
    with pytest.raises(KeyboardInterrupt):
        context.decode(Batch.of([1], 10))
    assert context.memory.pos_max(0) == -1
    assert run(context, prompt(5)).shape == (5, N_VOCAB)


# ---------------------------------------------------------------- warm-up
def test_warming_up_leaves_no_trace(model: Model) -> None:
    context = context_of(model, n_batch=1)
    context.warm_up()
    assert context.memory.pos_max(0) == -1 and context.perf.n_eval == 0
    assert context.all_logits().shape == (0, N_VOCAB)
    np.testing.assert_array_equal(
        run(context, prompt(3)), run(context_of(model, n_batch=1), prompt(3))
    )


def test_what_runs_where_is_told_without_allocating(model: Model) -> None:
    with closing(context_of(model, n_ctx=64, n_ubatch=8)) as context:
        before = context.memory.nbytes
        sched, sizes = context.plan_graph(8)
        (split,) = sched.splits
        assert sched.cut is not None and sched.cut.graph.nodes == split.graph.nodes
        assert sizes[0] > 0 and sched.buffer_size(context.backends[0]) == 0
        assert sched is not context.sched and context.memory.nbytes == before
        tokens = sched.cut.graph.find("inp_tokens")
        assert tokens is not None and tokens.ne[0] == 8
        context.decode(Batch.of(prompt(8), 0))
