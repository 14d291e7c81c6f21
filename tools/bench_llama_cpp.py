"""llama.cpp as a side of the benchmark: the C functions that llama-cpp-python wraps."""

from __future__ import annotations

import ctypes
import time
from types import ModuleType
from typing import Any

import numpy as np

from pyggml.dtypes import GGMLType
from pyggml.errors import UserError
from pyggml.tools.bench_measure import IntArray, Vocabulary, Work
from pyggml.tools.bench_tasks import Task

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
TYPES = {"f16": GGMLType.F16, "f32": GGMLType.F32}
# struct ggml_threadpool_params is smaller
PARAMS_BYTES = 4096


class LlamaCppSide:
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
        self._at_depth: ctypes.Array[ctypes.c_uint8] | None = None

    def open(self, task: Task) -> None:
        lib = self._lib
        self._close_context()
        if self._key != task.model_key:
            self.close()
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
        self._pool = _ThreadPool(lib.llama_cpp._lib, self._context, task.n_threads)

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
        params.flash_attn_type = FLASH_ATTN[task.flash_attn]
        params.type_k = TYPES[task.type_k]
        params.type_v = TYPES[task.type_v]
        params.swa_full = False
        params.offload_kqv = params.op_offload = False
        return params

    def vocabulary(self) -> Vocabulary:
        lib = self._lib
        vocab = lib.llama_model_get_vocab(self._model)
        bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
        return Vocabulary(lib.llama_vocab_n_tokens(vocab), bos)

    def warm_up(self, work: Work) -> None:
        self._clear()
        self._decode_batches(work.prompt)
        self._generate(work.gen[:1])
        self._clear()

    def prepare(self, work: Work) -> None:
        self._clear()
        if not work.depth:
            return
        lib = self._lib
        if self._at_depth is None:
            self._decode_batches(work.depth)
            size = lib.llama_state_seq_get_size(self._context, 0)
            self._at_depth = (ctypes.c_uint8 * size)()
            lib.llama_state_seq_get_data(self._context, self._at_depth, size, 0)
        else:
            n = lib.llama_state_seq_set_data(self._context, self._at_depth, len(self._at_depth), 0)
            assert n > 0, "llama.cpp refuses its own state"

    def run(self, work: Work) -> int:
        start = time.perf_counter_ns()
        self._decode_batches(work.prompt)
        self._generate(work.gen)
        return time.perf_counter_ns() - start

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


class _ThreadPool:
    """Threads that outlive a graph, which llama-bench gives its contexts as well.

    llama-cpp-python does not declare these functions. Without them llama.cpp makes a pool per
    graph.
    """

    def __init__(self, library: ctypes.CDLL, context: Any, n_threads: int) -> None:
        self._lib = library
        params = ctypes.create_string_buffer(PARAMS_BYTES)
        library.ggml_threadpool_params_init(params, ctypes.c_int(n_threads))
        library.ggml_threadpool_new.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(library.ggml_threadpool_new(params))
        library.llama_attach_threadpool(ctypes.c_void_p(context), self._pool, None)

    def free(self) -> None:
        self._lib.ggml_threadpool_free(self._pool)
