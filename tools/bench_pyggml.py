"""pyggml as a side of the benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyggml.backend import tensor_get, tensor_set
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams
from pyggml.llama.loader import Model, ModelParams, load_model
from pyggml.tensor import Tensor
from pyggml.tools.bench_measure import DecodingSide, IntArray, Vocabulary, Work
from pyggml.tools.bench_tasks import Task
from pyggml.version import __version__

if TYPE_CHECKING:
    from pyggml.backends.cuda.simulate import Simulation


class MemoryState:
    """What a context's memory held: cells and tensors."""

    def __init__(self, context: Context) -> None:
        memory = context.memory
        self._cells = [cache.cells.clone() for cache in memory.caches]
        self._states = memory.state.cells.clone() if memory.state else None
        self._data: list[tuple[Tensor, bytearray]] = []
        for tensor in (tensor for part in memory.parts for tensor in part.tensors):
            data = bytearray(tensor.nbytes)
            tensor_get(tensor, memoryview(data))
            self._data.append((tensor, data))

    def restore(self, context: Context) -> None:
        """Bring the memory back to this state."""
        for cache, cells in zip(context.memory.caches, self._cells, strict=True):
            cache.cells = cells.clone()
        if context.memory.state and self._states:
            context.memory.state.cells = self._states.clone()
        for tensor, data in self._data:
            tensor_set(tensor, memoryview(data))


class PyggmlSide(DecodingSide[MemoryState]):
    """Decodes as a session does: logits of the last token of each batch."""

    name = "pyggml"
    version = __version__

    def __init__(self, simulation: Simulation | None = None) -> None:
        """With a simulation time is that of its clock."""
        self._simulation = simulation
        self._key: tuple[object, ...] = ()
        self._model: Model | None = None
        self._context: Context | None = None
        self._n_past = 0

    @property
    def model(self) -> Model:
        assert self._model is not None
        return self._model

    @property
    def context(self) -> Context:
        assert self._context is not None
        return self._context

    def open(self, task: Task) -> None:
        self._close_context()
        if self._key != task.model_key:
            self.close()
            params = ModelParams(
                load_mode=task.load_mode,
                repack=task.repack,
                numa=task.numa,
                placement=task.placement,
            )
            devices = self._simulation.devices if self._simulation else None
            self._model = load_model(task.model, params, devices=devices)
            self._key = task.model_key
        self._context = Context(self.model, context_params(task))

    def run(self, work: Work) -> int:
        if self._simulation is None:
            return super().run(work)
        start = self._simulation.clock.now
        super().run(work)
        return round(1e9 * (self._simulation.clock.now - start))

    def vocabulary(self) -> Vocabulary:
        vocab = self.model.vocab
        return Vocabulary(self.model.hparams.n_vocab, vocab.special.bos if vocab.add_bos else None)

    def _state(self) -> MemoryState:
        return MemoryState(self.context)

    def _restore(self, state: MemoryState, work: Work) -> None:
        state.restore(self.context)
        self._n_past = sum(map(len, work.depth))

    def close(self) -> None:
        self._close_context()
        if self._model is not None:
            self._model.close()
            self._model, self._key = None, ()

    def _clear(self) -> None:
        self.context.memory.clear()
        self._n_past = 0

    def _close_context(self) -> None:
        self._at_depth = None
        if self._context is not None:
            self._context.close()
            self._context = None

    def _decode_batches(self, batches: tuple[IntArray, ...]) -> None:
        for tokens in batches:
            self.context.decode(Batch.of(tokens, self._n_past))
            self._n_past += len(tokens)

    def _generate(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self.context.decode(Batch.of((token,), self._n_past))
            self._n_past += 1


def context_params(task: Task) -> ContextParams:
    """A context just large enough."""
    return ContextParams(
        n_ctx=task.n_ctx,
        n_batch=task.n_batch,
        n_ubatch=task.n_ubatch,
        n_threads=task.n_threads,
        n_threads_batch=task.n_threads,
        flash_attn=task.flash_attn,
        type_k=task.type_k,
        type_v=task.type_v,
        kv_offload=not task.no_kv_offload,
        op_offload=not task.no_op_offload,
        cpu=task.cpu,
    )
