"""A context: memory, scheduler and the decode loop over one model (llama_context)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pyggml import build
from pyggml.backend import Backend, Status, tensor_get, tensor_set
from pyggml.errors import UserError
from pyggml.graph import Graph
from pyggml.llama.batch import Batch, BatchError, IntArray, Ubatch
from pyggml.llama.builder import Builder, GraphInputs, GraphShape, rope_factors, shift_params
from pyggml.llama.context_params import CACHE_TYPES, ContextParams
from pyggml.llama.kv_cache import CacheParams, KvCache, Memory, make_memory
from pyggml.llama.loader import Model
from pyggml.params import FlashAttnParams
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

log = logging.getLogger("pyggml.context")

F32 = npt.NDArray[np.float32]


class ContextFull(UserError):
    """No free cells for a batch (llama_decode returns 1)."""


@dataclass(slots=True)
class Perf:
    """What llama_perf counts: milliseconds and tokens of prompts and of single-token decodes."""

    load_ms: float = 0.0
    prompt_ms: float = 0.0
    n_prompt: int = 0
    eval_ms: float = 0.0
    n_eval: int = 0
    n_reused: int = 0  # graphs

    def add(self, n_tokens: int, ms: float) -> None:
        """Account one decode."""
        if n_tokens == 1:
            self.eval_ms += ms
            self.n_eval += 1
        else:
            self.prompt_ms += ms
            self.n_prompt += n_tokens


@dataclass(frozen=True, slots=True)
class _Built:
    """An allocated graph and the leafs to fill before it runs."""

    shape: GraphShape
    graph: Graph
    inputs: GraphInputs
    logits: Tensor


class Context:
    """Decodes batches of one model; holds its KV cache."""

    def __init__(self, model: Model, params: ContextParams | None = None) -> None:
        self.model = model
        hp = model.hparams
        self.params = (params or ContextParams()).resolved(hp, model.n_cores)
        rope_swa = hp.rope_swa and self.params.rope.apply(hp.rope_swa)
        self.hparams = replace(hp, rope=self.params.rope.apply(hp.rope), rope_swa=rope_swa)
        self.backends: list[Backend] = [device.init_backend() for device in model.devices]
        self.flash_attn = self._resolve_flash_attn()
        self.memory = self._make_memory()
        self.sched = Scheduler(self.backends)
        self.perf = Perf()
        self._built: _Built | None = None
        self._logits: F32 = np.empty((0, hp.n_vocab), np.float32)
        self._row_of: dict[int, int] = {}
        self._reserve()
        if hp.n_ctx_train < self.params.n_ctx:
            log.warning(
                "the context of %d tokens is longer than the %d the model was trained with",
                self.params.n_ctx,
                hp.n_ctx_train,
            )

    # ------------------------------------------------------------ construction
    def _resolve_flash_attn(self) -> bool:
        if self.params.flash_attn != "auto":
            wanted = self.params.flash_attn == "on"
            if wanted and not self._flash_attn_supported():
                raise UserError("--flash-attn on: no device can run it for this model; use auto")
            return wanted
        return self._flash_attn_supported()

    def _flash_attn_supported(self) -> bool:
        hp = self.hparams
        n_kv, type_k = 256, CACHE_TYPES[self.params.type_k]
        q = new_tensor(build.F32, hp.n_embd_head_k, 1, hp.n_head[0])
        k = new_tensor(type_k, hp.n_embd_head_k, n_kv, hp.n_head_kv[0])
        v = new_tensor(CACHE_TYPES[self.params.type_v], hp.n_embd_head_v, n_kv, hp.n_head_kv[0])
        mask = new_tensor(CACHE_TYPES["f16"], n_kv, 1)
        node = build.flash_attn_ext(q, k, v, mask, FlashAttnParams(hp.kq_scale))
        return any(device.supports_op(node) for device in self.model.devices)

    def _make_memory(self) -> Memory:
        p = self.params
        cache = CacheParams(
            size=p.n_ctx,
            type_k=CACHE_TYPES[p.type_k],
            type_v=CACHE_TYPES[p.type_v],
            v_trans=not self.flash_attn,
            n_seq_max=p.n_seq_max,
        )
        memory = make_memory(self.hparams, cache, n_ubatch=p.n_ubatch, swa_full=p.swa_full)
        for part in memory.caches:
            part.allocate(self.model.devices[-1].buffer_type())
        return memory

    def _reserve(self) -> None:
        """Allocate for the largest graphs: a full ubatch and a single token over all cells."""
        n_kv = tuple(cache.params.size for cache in self.memory.caches)
        n_tokens = min(self.params.n_ctx, self.params.n_ubatch)
        self.n_nodes: dict[str, int] = {}
        for name, n in (("tg", 1), ("pp", n_tokens)):
            built = self._describe(GraphShape(n, n, n_kv))
            self.n_nodes[name] = len(built.graph.nodes)
            self.sched.reserve(built.graph)

    def close(self) -> None:
        """Stop threads and free memory."""
        for backend in self.backends:
            backend.close()

    # ------------------------------------------------------------ decode
    @property
    def n_ctx(self) -> int:
        return self.params.n_ctx

    def decode(self, batch: Batch) -> None:
        """Compute a batch; logits of its marked tokens are then available.

        Raises BatchError (nothing changed) or ContextFull (nothing changed).
        """
        start = time.perf_counter()
        self._check(batch)
        self._apply_shift()
        ubatches = list(batch.split(self.params.n_ubatch))
        slots = self._find_slots(ubatches)
        n_outputs = int(np.count_nonzero(batch.wants_logits))
        self._logits = np.empty((n_outputs, self.hparams.n_vocab), np.float32)
        marked = np.flatnonzero(batch.wants_logits)
        self._row_of = {int(token): row for row, token in enumerate(marked)}
        row = 0
        for ubatch, cells in zip(ubatches, slots, strict=True):
            self._run(ubatch, cells, self._logits[row : row + len(ubatch.outputs)])
            row += len(ubatch.outputs)
        self.perf.add(batch.n_tokens, 1e3 * (time.perf_counter() - start))

    def logits(self, i: int = -1) -> F32:
        """[n_vocab] of token i of the last batch; a negative i counts from the last output."""
        if i < 0:
            return self._logits[i]
        if i not in self._row_of:
            raise BatchError(f"token {i} of the batch was not marked for logits")
        return self._logits[self._row_of[i]]

    def all_logits(self) -> F32:
        """[n_outputs, n_vocab] of the last batch, in its order."""
        return self._logits

    def _check(self, batch: Batch) -> None:
        batch.check(self.hparams.n_vocab, self.params.n_seq_max)
        if batch.n_tokens == 0:
            raise BatchError("the batch is empty")
        if batch.n_tokens > self.params.n_batch:
            raise BatchError(
                f"the batch has {batch.n_tokens} tokens, more than --batch-size "
                f"{self.params.n_batch}"
            )
        expected: dict[int, int] = {}
        for pos, ids in zip(batch.pos.tolist(), batch.seq_ids, strict=True):
            for seq in ids:
                last = expected.get(seq, self.memory.pos_max(seq))
                # an empty sequence may start anywhere
                if pos != last + 1 and (seq in expected or last >= 0):
                    raise BatchError(
                        f"sequence {seq}: position {pos} follows {last}; "
                        "positions must remain consecutive"
                    )
                expected[seq] = pos

    def _find_slots(self, ubatches: Sequence[Ubatch]) -> list[tuple[IntArray, ...]]:
        """Cells for every ubatch and cache, before anything is computed or changed."""
        if len(ubatches) == 1:
            return [self._find_slot(ubatches[0])]
        saved = [cache.cells.save() for cache in self.memory.caches]
        slots = []
        try:
            for ubatch in ubatches:
                slots.append(self._find_slot(ubatch))
                self._occupy(ubatch, slots[-1])
        finally:
            for cache, state in zip(self.memory.caches, saved, strict=True):
                cache.cells.restore(state)
        return slots

    def _find_slot(self, ubatch: Ubatch) -> tuple[IntArray, ...]:
        slots = []
        for cache in self.memory.caches:
            slot = cache.cells.find_slot(ubatch.n_tokens, cache.params.n_swa)
            if slot is None:
                raise ContextFull(
                    f"no room for {ubatch.n_tokens} more tokens in a context of "
                    f"{self.params.n_ctx}: use a larger --ctx-size"
                )
            slots.append(slot)
        return tuple(slots)

    def _occupy(self, ubatch: Ubatch, slots: tuple[IntArray, ...]) -> None:
        for cache, slot in zip(self.memory.caches, slots, strict=True):
            cache.cells.occupy(slot, ubatch.pos, ubatch.seq_ids)

    # ------------------------------------------------------------ one ubatch
    def _run(self, ubatch: Ubatch, slots: tuple[IntArray, ...], out: F32) -> None:
        """Compute a ubatch and copy its logits to `out` [n_outputs, n_vocab]."""
        self._occupy(ubatch, slots)
        shape = GraphShape(
            ubatch.n_tokens,
            len(ubatch.outputs),
            tuple(cache.n_kv() for cache in self.memory.caches),
        )
        if self._built is not None and self._built.shape == shape:
            self.perf.n_reused += 1
        else:
            self._built = self._describe(shape)
            self.sched.reset()
            self.sched.alloc_graph(self._built.graph)
        self._fill(self._built.inputs, ubatch, slots)
        self._set_threads(ubatch.n_tokens)
        try:
            status = self.sched.graph_compute(self._built.graph)
            if status != Status.SUCCESS:
                raise RuntimeError(f"computing the graph failed: {status.name}")
        except BaseException:
            # also Ctrl-C: what was not computed must not look as if it were
            for pos, ids in zip(ubatch.pos.tolist(), ubatch.seq_ids, strict=True):
                for seq in ids:
                    self.memory.remove(seq, pos, pos + 1)
            raise
        if out.size:
            tensor_get(self._built.logits, memoryview(out).cast("B"))

    def _set_threads(self, n_tokens: int) -> None:
        n = self.params.n_threads if n_tokens == 1 else self.params.n_threads_batch
        for backend in self.backends:
            backend.set_n_threads(n)

    def _describe(self, shape: GraphShape) -> _Built:
        builder = Builder(
            self.hparams,
            shape,
            self.memory,
            flash_attn=self.flash_attn,
            n_ctx=self.params.n_ctx,
        )
        logits = self.model.arch.graph(builder, self.model.weights)
        builder.graph.expand(logits)
        return _Built(shape, builder.graph, builder.inputs, logits)

    def _fill(self, inputs: GraphInputs, ubatch: Ubatch, slots: tuple[IntArray, ...]) -> None:
        _set(inputs.tokens, ubatch.tokens)
        _set(inputs.pos, ubatch.pos)
        _set(inputs.out_ids, ubatch.outputs)
        for cache, leafs, slot in zip(self.memory.caches, inputs.attention, slots, strict=True):
            hidden = cache.mask(ubatch, leafs.mask.ne[0])
            mask = np.zeros(hidden.shape, np.float16 if self.flash_attn else np.float32)
            mask[hidden] = -np.inf
            _set(leafs.mask, mask)
            _set(leafs.k_idxs, slot.astype(np.int64))
            _set(leafs.v_idxs, cache.v_indices(slot))

    # ------------------------------------------------------------ position shift
    def _apply_shift(self) -> None:
        """Rotate the keys whose positions were moved (K-shift)."""
        for cache in self.memory.caches:
            if cache.cells.has_shift:
                self._shift_cache(cache)
                cache.cells.shift[:] = 0

    def _shift_cache(self, cache: KvCache) -> None:
        hp, size = self.hparams, cache.params.size
        graph = Graph()
        shift = new_tensor(build.I32, size, name="k_shift").as_input()
        for il in cache.layers:
            k, head = cache.k[il], hp.n_embd_head_k
            scaling = hp.rope_swa if hp.swa(il) and hp.rope_swa else hp.rope
            heads = (head, hp.n_head_kv[il], size)
            view = build.view(k, heads, (k.type.row_size(head), k.nb[1]))
            factors = rope_factors(self.model.weights, self.params.n_ctx > scaling.n_ctx_orig)
            rotated = build.rope_ext(view, shift, factors, shift_params(hp, scaling))
            graph.expand(build.cpy(rotated, view))
        self.sched.reset()
        self.sched.alloc_graph(graph)
        self._built = None
        _set(shift, cache.cells.shift)
        self.sched.graph_compute(graph)


def _set(leaf: Tensor, values: npt.NDArray[np.generic]) -> None:
    """Fill an input; one that no node uses has no memory and stays empty."""
    if leaf.buffer is not None and values.size:
        tensor_set(leaf, memoryview(np.ascontiguousarray(values)).cast("B"))
