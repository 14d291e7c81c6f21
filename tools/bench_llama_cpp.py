"""llama.cpp as a side of the benchmark: the C functions that llama-cpp-python wraps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from pyggml.errors import UserError
from pyggml.llama.context_params import CACHE_TYPES
from pyggml.threads import POLL, Cpus, usable_cpus
from pyggml.tools.bench_measure import DecodingSide, IntArray, Vocabulary, Work
from pyggml.tools.bench_tasks import FLASH_ATTN_NUMBERS, Task

NUMA = {"": 0, "distribute": 1, "isolate": 2, "numactl": 3}
MAX_CPUS = 512

StateBytes = ctypes.Array[ctypes.c_uint8]


class LlamaCppSide(DecodingSide[StateBytes]):
    """Does what llama-bench does, on the CPU alone."""

    name = "llama.cpp"

    def __init__(self, library: ModuleType, *, verbose: bool = False) -> None:
        self._lib = library
        self.version = f"llama-cpp-python {library.__version__}"
        # kept: llama.cpp calls it as long as it lives
        self._log = library.llama_log_callback(lambda level, text, data: None)
        if not verbose:
            library.llama_log_set(self._log, None)
        library.llama_backend_init()
        self._key: tuple[object, ...] = ()
        self._model: Any = None
        self._context: Any = None
        self._pool: _ThreadPool | None = None
        self._cpus: Cpus | None = None  # of the calling thread while it works
        self._usable = usable_cpus()

    def open(self, task: Task) -> None:
        lib = self._lib
        self._close_context()
        if self._key != task.model_key:
            self.close()
            if task.numa:
                lib.llama_numa_init(NUMA[task.numa])
            self._model = lib.llama_model_load_from_file(
                task.model.encode(), self._model_params(task)
            )
            if not self._model:
                raise UserError(f"{task.model}: llama.cpp cannot load it; -v shows why")
            self._key = task.model_key
        self._context = lib.llama_init_from_model(self._model, self._context_params(task))
        if not self._context:
            raise UserError(f"{task.model}: llama.cpp cannot make a context; -v shows why")
        lib.llama_set_n_threads(self._context, task.n_threads, task.n_threads)
        was_placed, self._cpus = self._cpus is not None, task.cpu.cpus
        if was_placed and self._cpus is None:
            self._cpus = self._usable  # its threads would stay where they are
        params = thread_pool_params(lib.llama_cpp._lib, task, self._cpus)
        self._pool = _ThreadPool(lib.llama_cpp._lib, self._context, params)

    def _model_params(self, task: Task) -> Any:
        params = self._lib.llama_model_default_params()
        params.load_mode = self._lib.llama_load_mode_from_str(task.load_mode.encode())
        params.use_extra_bufts = task.repack
        params.n_gpu_layers = 0
        return params

    def _context_params(self, task: Task) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = task.n_ctx
        params.n_batch = task.n_batch
        params.n_ubatch = task.n_ubatch
        params.flash_attn_type = FLASH_ATTN_NUMBERS[task.flash_attn]
        params.type_k = CACHE_TYPES[task.type_k]
        params.type_v = CACHE_TYPES[task.type_v]
        params.swa_full = False
        params.offload_kqv = params.op_offload = False
        return params

    def vocabulary(self) -> Vocabulary:
        lib = self._lib
        vocab = lib.llama_model_get_vocab(self._model)
        bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
        return Vocabulary(lib.llama_vocab_n_tokens(vocab), bos)

    def _placed(self) -> AbstractContextManager[None]:
        return _running_on(self._cpus)

    def _state(self) -> StateBytes:
        size = self._lib.llama_state_seq_get_size(self._context, 0)
        state: StateBytes = (ctypes.c_uint8 * size)()
        self._lib.llama_state_seq_get_data(self._context, state, size, 0)
        return state

    def _restore(self, state: StateBytes, work: Work) -> None:
        n = self._lib.llama_state_seq_set_data(self._context, state, len(state), 0)
        assert n > 0, "llama.cpp refuses its own state"

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def _decode_batches(self, batches: tuple[IntArray, ...]) -> None:
        """Prompts, synchronized at their end."""
        for tokens in batches:
            self._decode(np.ascontiguousarray(tokens, np.int32))
        self._lib.llama_synchronize(self._context)

    def _generate(self, tokens: tuple[int, ...]) -> None:
        one = np.empty(1, np.int32)
        for token in tokens:
            one[0] = token
            self._decode(one)
            self._lib.llama_synchronize(self._context)

    def _decode(self, tokens: IntArray) -> None:
        """Logits for the last token, as llama_batch_get_one means it."""
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch = self._lib.llama_batch_get_one(pointer, len(tokens))
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise UserError(f"llama.cpp cannot decode {len(tokens)} tokens (status {status})")

    def _close_context(self) -> None:
        self._at_depth = None
        if self._context:
            self._lib.llama_free(self._context)
            self._context = None
        if self._pool:
            self._pool.free()
            self._pool = None

    def close(self) -> None:
        self._close_context()
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model, self._key = None, ()


class ThreadPoolParams(ctypes.Structure):
    """ggml_threadpool_params of ggml.h."""

    _fields_ = [
        ("cpumask", ctypes.c_bool * MAX_CPUS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


def thread_pool_params(library: ctypes.CDLL, task: Task, cpus: Cpus | None) -> ThreadPoolParams:
    """llama.cpp's own, with what a task says of threads."""
    params = ThreadPoolParams()
    library.ggml_threadpool_params_init(ctypes.byref(params), ctypes.c_int(task.n_threads))
    assert (params.n_threads, params.poll) == (task.n_threads, POLL), "another llama.cpp"
    params.poll, params.strict_cpu = task.poll, bool(task.cpu_strict)
    for cpu in cpus or ():
        params.cpumask[cpu] = True
    return params


@contextmanager
def _running_on(cpus: Cpus | None) -> Iterator[None]:
    """The calling thread is on these CPUs inside, and where it was afterwards.

    llama.cpp moves it as well, but not if it is alone, and it does not bring it back.
    """
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _ThreadPool:
    """Threads that outlive a graph, which llama-bench gives its contexts as well.

    llama-cpp-python does not declare these functions. Without them llama.cpp makes a pool per
    graph.
    """

    def __init__(self, library: ctypes.CDLL, context: Any, params: ThreadPoolParams) -> None:
        self._lib = library
        library.ggml_threadpool_new.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(library.ggml_threadpool_new(ctypes.byref(params)))
        library.llama_attach_threadpool(ctypes.c_void_p(context), self._pool, None)

    def free(self) -> None:
        self._lib.ggml_threadpool_free(self._pool)
