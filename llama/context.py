"""A context: memory, scheduler and the decode loop over one model (llama_context)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml import build
from pyggml.backend import Backend, Status, tensor_set
from pyggml.dtypes import GGMLType
from pyggml.errors import OutOfMemory, UserError
from pyggml.graph import Graph
from pyggml.llama.batch import Batch, BatchError, IntArray, Ubatch
from pyggml.llama.builder import (
    Builder,
    GraphInputs,
    GraphShape,
    Pins,
    attn_temperatures,
    rope_factors,
    rope_positions,
    shift_params,
)
from pyggml.llama.context_params import ContextParams
from pyggml.llama.context_placement import (
    compute_buffer_types,
    is_pipeline_parallel,
    less_compute,
    new_memory,
    pin,
    place_memory,
    resolve_flash_attn,
)
from pyggml.llama.kv_cache import (
    KvCache,
    hadamard,
    rotate,
    rotation_input,
)
from pyggml.llama.kv_cells import Cells
from pyggml.llama.loader import Model
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, new_tensor

log = logging.getLogger("pyggml.context")

F32 = npt.NDArray[np.float32]
Slots = tuple[IntArray, ...]  # the cells of one ubatch, per cache
MIB = 1 << 20


class ContextFull(UserError):
    """No free cells for a batch (llama_decode returns 1)."""


@dataclass(slots=True)
class Perf:
    """What llama_perf counts: milliseconds and tokens of prompts and of single-token decodes."""

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
class GraphSize:
    """How large a graph is."""

    nodes: int
    splits: int


@dataclass(frozen=True, slots=True)
class _Built:
    """An allocated graph and the leafs to fill before it runs."""

    shape: GraphShape
    graph: Graph
    inputs: GraphInputs
    logits: Tensor
    pins: Pins


class Context:
    """Decodes batches of one model; holds its KV cache."""

    def __init__(
        self, model: Model, params: ContextParams | None = None, *, is_trial: bool = False
    ) -> None:
        """`is_trial`: one of many that are only measured; GGML_SCHED_DEBUG is not about it."""
        self.model = model
        self._is_trial = is_trial
        hp = model.hparams
        self.params = (params or ContextParams()).resolved(hp, model.n_cores)
        self.hparams = self.params.rope.apply_all(hp)
        self._threads, self._threads_batch = self.params.threads(1), self.params.threads(2)
        self.perf = Perf()
        self.graph_sizes: dict[int, GraphSize] = {}  # of reserved graphs, by number of tokens
        self._built: _Built | None = None
        self._logits: F32 = np.empty((0, hp.n_vocab), np.float32)
        self._row_of: dict[int, int] = {}
        self.params.check_cache(self.hparams)
        self.flash_attn = resolve_flash_attn(model, self.hparams, self.params)
        self.memory = new_memory(self.hparams, self.params, self.flash_attn)
        place_memory(self.memory, model, self.params)
        self.backends: list[Backend] = []
        try:
            model.use_numa(model.numa)  # another model may have been loaded meanwhile
            self.backends += (device.init_backend() for device in model.devices)
            self.is_parallel = is_pipeline_parallel(model.placement, self.params)
            self.sched = self._make_scheduler()
            self._reserve_first()
        except BaseException:
            self.close()
            raise
        self._report()

    def _report(self) -> None:
        if self.is_parallel:
            log.info("pipeline parallelism enabled")
        for backend, buft in zip(self.backends, self.sched.bufts, strict=True):
            size = self.sched.buffer_size(backend) / MIB
            log.info("%12s compute buffer size = %8.2f MiB", buft.name, size)
        pp, tg = max(self.graph_sizes), min(self.graph_sizes)
        large, small = self.graph_sizes[pp], self.graph_sizes[tg]
        log.info(
            "graph (pp bs=%d, tg bs=%d): nodes = %d / %d, splits = %d / %d, sched copies = %d",
            *(pp, tg, large.nodes, small.nodes, large.splits, small.splits, self.sched.n_copies),
        )
        n_ctx, trained = self.params.n_ctx, self.hparams.n_ctx_train
        if n_ctx > trained:
            log.warning(
                "the context of %d tokens is longer than the %d the model was trained with",
                n_ctx,
                trained,
            )

    # ------------------------------------------------------------ construction
    def _reserve(self) -> None:
        """Allocate and compile for the largest graphs: a full ubatch and a single token."""
        n_kv = tuple(cache.params.size for cache in self.memory.caches)
        n_tokens = min(self.params.n_ctx, self.params.n_ubatch)
        shapes = [(1, 1), (n_tokens, 1)]
        if self.memory.state:  # their states take room too
            n_seqs = min(self.params.n_seq_max, n_tokens)
            shapes += [(n_seqs, n_seqs), (n_tokens // n_seqs * n_seqs, n_seqs)]
        for n, n_seqs in dict.fromkeys(shapes):
            built = self._describe(GraphShape(n, n, n_kv, n_seqs))
            graph = built.graph
            self._pin(self.sched, built)
            self.sched.reserve(graph)
            log.debug("graph of %d tokens: nodes = %d", n, len(graph.nodes))
            self.graph_sizes[n] = GraphSize(len(graph.nodes), self.sched.n_splits)
            if self.model.no_alloc:
                continue
            self._use_threads(n)
            for split in self.sched.layout.splits:
                self.backends[split.backend_id].prepare(split.graph)

    def _reserve_first(self) -> None:
        """`_reserve`; without ubatches in flight if there is too little memory for them."""
        if self.is_parallel:
            try:
                self._reserve()
            except OutOfMemory:
                log.warning(
                    "compute buffer allocation failed, retrying without pipeline parallelism"
                )
            else:
                return
            self.is_parallel = False
            self.sched = self._make_scheduler()
        try:
            self._reserve()
        except OutOfMemory as e:
            raise OutOfMemory(f"{e}{less_compute(self.model.placement, self.params)}") from e

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self.backends,
            compute_buffer_types(self.model.placement),
            parallel=self.is_parallel,
            op_offload=self.params.op_offload,
            no_alloc=self.model.no_alloc,
            debug=0 if self._is_trial else None,
        )

    def _pin(self, sched: Scheduler, built: _Built) -> None:
        pin(sched, built.pins, self.model.placement, self.params, built.shape.n_tokens)

    def plan_graph(self, n_tokens: int, *, full: bool = True) -> tuple[Scheduler, list[int]]:
        """A scheduler that has split the graph of a ubatch, as it runs when the memory is full, or
        if the memory stays as it is.

        It has allocated nothing: it tells what would run where. And the bytes to compute in, per
        backend.
        """
        caches = self.memory.caches
        n_kv = tuple(cache.params.size if full else cache.n_kv() for cache in caches)
        sched = self._make_scheduler()
        built = self._describe(GraphShape(n_tokens, 1, n_kv, 1))
        self._pin(sched, built)
        return sched, sched.reserve_size(built.graph)

    def warm_up(self) -> None:
        """Run BOS and EOS once, so that later runs are as fast as they can be; leaves no trace."""
        special = self.model.vocab.special
        tokens = [t for t in (special.bos, special.eos) if t is not None] or [0]
        self.decode(Batch.of(tokens[: self.params.n_batch], 0))
        self.memory.clear()
        self._forget_logits()
        self.perf = Perf()

    def close(self) -> None:
        """Stop threads and free memory."""
        for backend in self.backends:
            backend.close()
        self.memory.free()

    # ------------------------------------------------------------ decode
    @property
    def n_ctx(self) -> int:
        return self.params.n_ctx

    def decode(self, batch: Batch) -> None:
        """Compute a batch; logits of its marked tokens are then available.

        Raises BatchError or ContextFull, then the memory is as before. Interrupted by anything
        else it keeps the ubatches that were computed, and nothing of the one that was not; with a
        recurrent state it keeps nothing of that one's sequences, and with several ubatches in
        flight nothing of the batch.
        """
        if self.model.no_alloc:
            raise UserError(
                f"{self.model.gguf.path} is loaded without data: it can only be planned"
            )
        start = time.perf_counter()
        self._check(batch)
        self._forget_logits()
        self._apply_shift()
        split = batch.split_equal if self.memory.state else batch.split
        ubatches = list(split(self.params.n_ubatch))
        slots = self._find_slots(ubatches)
        marked = np.concatenate([ubatch.places[ubatch.outputs] for ubatch in ubatches])
        logits: F32 = np.empty((len(marked), self.hparams.n_vocab), np.float32)
        row = 0
        try:
            for ubatch, cells in zip(ubatches, slots, strict=True):
                n = len(ubatch.outputs)
                self._run(ubatch, cells, logits[row : row + n])
                row += n
            if self.is_parallel:
                self.sched.synchronize()
        except BaseException:
            if self.is_parallel:  # nobody knows which of them are done
                for ubatch in ubatches:
                    self._take_back(ubatch)
            raise
        order = np.argsort(marked)
        if (order[1:] < order[:-1]).any():
            logits = logits[order]
        self._logits = logits
        self._row_of = {token: row for row, token in enumerate(marked[order].tolist())}
        self.perf.add(batch.n_tokens, 1e3 * (time.perf_counter() - start))

    def _forget_logits(self) -> None:
        self._logits, self._row_of = self._logits[:0], {}

    def logits(self, i: int = -1) -> F32:
        """[n_vocab] of token i of the last batch; a negative i counts from the last output."""
        row = self._row_of.get(i, -1) if i >= 0 else len(self._logits) + i
        if row < 0:
            raise BatchError(f"there are no logits of token {i}: mark it before decoding")
        result: F32 = self._logits[row]
        return result

    def all_logits(self) -> F32:
        """[n_outputs, n_vocab] of the last batch, in its order."""
        return self._logits

    def _check(self, batch: Batch) -> None:
        batch.check(self.hparams.n_vocab, self.params.n_seq_max)
        if batch.n_tokens > self.params.n_batch:
            raise BatchError(
                f"the batch has {batch.n_tokens} tokens, more than --batch-size "
                f"{self.params.n_batch}"
            )
        batch.follows(self.memory.pos_max)
        batch.check_shared(self.memory.fingerprint)

    def _find_slots(self, ubatches: Sequence[Ubatch]) -> list[Slots]:
        """Cells for every ubatch and cache, before anything is computed or changed."""
        # what the first ubatches take is tried out on copies; a single one takes nothing
        tried = [cache.cells for cache in self.memory.caches]
        if len(ubatches) > 1:
            tried = [cells.clone() for cells in tried]
        found: list[Slots] = []
        for ubatch in ubatches:
            slots = [
                self._find_slot(cache, cells, ubatch.n_tokens)
                for cache, cells in zip(self.memory.caches, tried, strict=True)
            ]
            found.append(tuple(slots))
            if len(ubatches) > 1:
                for cells, slot in zip(tried, slots, strict=True):
                    cells.occupy(slot, ubatch.pos, ubatch.seq_ids)
        return found

    def _find_slot(self, cache: KvCache, cells: Cells, n: int) -> IntArray:
        slot = cache.find_slot(cells, n)
        if slot is None:
            raise ContextFull(
                f"no room for {n} more tokens in a context of {self.params.n_ctx}: "
                "use a larger --ctx-size"
            )
        return slot

    # ------------------------------------------------------------ one ubatch
    def _run(self, ubatch: Ubatch, slots: Slots, out: F32) -> None:
        """Compute a ubatch and copy its logits to `out` [n_outputs, n_vocab]."""
        try:
            for cache, slot in zip(self.memory.caches, slots, strict=True):
                cache.cells.occupy(slot, ubatch.pos, ubatch.seq_ids)
            states = self.memory.state.begin(ubatch) if self.memory.state else None
            built = self._prepare(ubatch)
            self._fill(built.inputs, ubatch, slots)
            if self.memory.state and states and built.inputs.state:
                for leaf, rows in self.memory.state.rows(built.inputs.state, states):
                    _set(leaf, rows)
            self._start(built.graph, ubatch.n_tokens)
            if out.size:
                backend = self.sched.get_tensor_backend(built.logits)
                assert backend is not None
                backend.get_async(built.logits, out.data.cast("B"))
            if not self.is_parallel:
                self.sched.synchronize()
        except BaseException:
            # also Ctrl-C: what was not computed must not look as if it were
            self._take_back(ubatch)
            raise

    def _take_back(self, ubatch: Ubatch) -> None:
        """Forget what a ubatch has left in the memory."""
        self._built = None
        first: dict[int, int] = {}
        for pos, ids in zip(ubatch.pos.tolist(), ubatch.seq_ids, strict=True):
            for seq in ids:
                self.memory.remove_from(seq, first.setdefault(seq, pos))

    def _prepare(self, ubatch: Ubatch) -> _Built:
        """The graph for a ubatch: the latest one if it has the same shape."""
        n_kv = tuple(cache.n_kv() for cache in self.memory.caches)
        shape = GraphShape(ubatch.n_tokens, len(ubatch.outputs), n_kv, ubatch.n_seqs)
        if self._built is not None and self._built.shape == shape:
            self.perf.n_reused += 1
            if self.is_parallel:  # its inputs may still be needed
                self.sched.synchronize()
            return self._built
        self._built = None
        built = self._describe(shape)
        self.sched.reset()
        self._pin(self.sched, built)
        self.sched.alloc_graph(built.graph)
        self._built = built
        return built

    def _start(self, graph: Graph, n_tokens: int) -> None:
        """Compute without waiting for devices that work on their own."""
        self._use_threads(n_tokens)
        status = self.sched.graph_compute_async(graph)
        if status != Status.SUCCESS:
            raise RuntimeError(f"computing the graph failed: {status.name}")

    def _use_threads(self, n_tokens: int) -> None:
        threads = self._threads if n_tokens == 1 else self._threads_batch
        for backend in self.backends:
            backend.set_threads(threads)

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
        return _Built(shape, builder.graph, builder.inputs, logits, builder.pins)

    def _fill(self, inputs: GraphInputs, ubatch: Ubatch, slots: Slots) -> None:
        _set(inputs.tokens, ubatch.tokens)
        _set(inputs.pos, rope_positions(self.hparams, ubatch.pos))
        _set(inputs.out_ids, ubatch.outputs)
        if self.hparams.attn_temp_scale:
            _set(inputs.attn_temp, attn_temperatures(self.hparams, ubatch.pos))
        for cache, leafs, slot in zip(self.memory.caches, inputs.attention, slots, strict=True):
            hidden = cache.mask(ubatch, leafs.mask.ne[0])
            mask = np.zeros(hidden.shape, np.float16 if self.flash_attn else np.float32)
            mask[hidden] = -np.inf
            _set(leafs.mask, mask)
            _set(leafs.k_idxs, slot.astype(np.int64))
            _set(leafs.v_idxs, cache.v_indices(slot))
            for rot in (leafs.k_rot, leafs.v_rot):
                if rot is not None:
                    _set(rot, hadamard(rot.ne[0]))

    # ------------------------------------------------------------ position shift
    def _apply_shift(self) -> None:
        """Rotate the keys whose positions were moved (K-shift)."""
        shifted = [cache for cache in self.memory.caches if cache.cells.has_shift]
        if not shifted:
            return
        self._built = None
        try:
            for cache in shifted:
                self._shift_keys(cache)
                cache.cells.shift[:] = 0
            self._reserve()
        except BaseException:
            # some keys may be rotated and some not: none can be trusted
            self.memory.clear()
            raise

    def _shift_keys(self, cache: KvCache) -> None:
        hp, size = self.hparams, cache.params.size
        graph = Graph()
        shift = new_tensor(build.I32, size, name="k_shift").as_input()
        rot = rotation_input("attn_inp_k_rot", cache.k_rot)
        for il in filter(hp.rotates, cache.layers):
            k, head = cache.k[il], hp.n_embd_head_k
            scaling = hp.rope_of(il)
            heads = (head - hp.rope_offset, hp.n_head_kv[il], size)
            strides = k.type.row_size(head), k.nb[1]
            view = build.view(k, heads, strides, k.type.row_size(hp.rope_offset))
            layer = self.model.weights.layers[il]
            factors = rope_factors(layer, self.params.n_ctx > scaling.n_ctx_orig)
            # rope computes in F32 or F16, and turned keys are turned back for it
            keys = view if k.type in (GGMLType.F32, GGMLType.F16) else build.cast(view, build.F32)
            moved = build.rope_ext(rotate(keys, rot), shift, factors, shift_params(hp, scaling))
            graph.expand(build.cpy(rotate(moved, rot), view))
        self.sched.reset()
        self.sched.alloc_graph(graph)
        _set(shift, cache.cells.shift)
        if rot is not None:
            _set(rot, hadamard(cache.k_rot))
        self._start(graph, size)
        self.sched.synchronize()


def _set(leaf: Tensor, values: npt.NDArray[np.generic]) -> None:
    """Fill an input; one that no node uses has no memory and stays empty."""
    if leaf.buffer is not None and values.size:
        tensor_set(leaf, np.ascontiguousarray(values).data.cast("B"))
