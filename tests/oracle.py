"""Real llama.cpp, in process: distributions, greedy tokens, tokenization, chat templates.

`LlamaCpp` calls the C functions that the xllamacpp wheel exports. They give the logits of every
position from one decode, also where the server gives none (it reports no probabilities for a
sampled token that ends the text or is part of a character). `LlamaServer` is the wheel's own
server, for what the C functions lack: Jinja templates and the HTTP routes.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import pytest
from exact import log_softmax
from numpy.typing import NDArray
from tokenizer_oracle import LlamaVocab
from tokenizer_oracle import library as vocab_library

INT32, FLOAT, POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
KV_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
KV_TYPES |= {"IQ4_NL": 20, "BF16": 30}


class ContextParams(ctypes.Structure):
    """`llama_context_params` up to the last field set here; the tail is room for the others."""

    _fields_ = (
        *((f"n_{name}", INT32) for name in ("ctx", "batch", "ubatch", "seq_max", "rs_seq")),
        *((f"n_outputs_max{scope}", INT32) for scope in ("", "_per_seq")),
        *((f"n_threads{phase}", INT32) for phase in ("", "_batch")),
        *((f"{what}_type", INT32) for what in ("ctx", "rope_scaling", "pooling", "attention")),
        ("flash_attn_type", INT32),
        *((f"rope_freq_{what}", FLOAT) for what in ("base", "scale")),
        *((f"yarn_{what}", FLOAT) for what in ("ext_factor", "attn_factor")),
        *((f"yarn_{what}", FLOAT) for what in ("beta_fast", "beta_slow")),
        ("yarn_orig_ctx", INT32),
        ("defrag_thold", FLOAT),
        ("cb_eval", POINTER),
        ("cb_eval_user_data", POINTER),
        ("type_k", INT32),
        ("type_v", INT32),
        ("tail", ctypes.c_byte * 400),
    )


# The defaults that tell a moved field from the layout above.
CONTEXT_DEFAULTS = {"n_ubatch": 512, "flash_attn_type": -1, "yarn_beta_slow": -1}
CONTEXT_DEFAULTS |= {"yarn_orig_ctx": 0, "defrag_thold": -1, "type_k": 1, "type_v": 1}


class Batch(ctypes.Structure):
    """`llama_batch`; null positions follow the cache, null sequences are sequence 0."""

    _fields_ = (
        ("n_tokens", INT32),
        *((name, POINTER) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (POINTER, POINTER, ContextParams),
    "llama_free": (None, POINTER),
    "llama_get_memory": (POINTER, POINTER),
    "llama_memory_clear": (None, POINTER, ctypes.c_bool),
    "llama_memory_seq_rm": (ctypes.c_bool, POINTER, INT32, INT32, INT32),
    "llama_memory_seq_add": (None, POINTER, INT32, INT32, INT32, INT32),
    "llama_decode": (INT32, POINTER, Batch),
    "llama_get_logits": (POINTER, POINTER),
    "ggml_get_name": (ctypes.c_char_p, POINTER),
}


@functools.cache
def library() -> ctypes.CDLL:
    """llama.cpp's shared library with the functions of `SIGNATURES` typed.

    The layout of a C structure is no part of the wheel's contract: its defaults are checked, so
    that a release which moves a field fails here and not in a wrong number.
    """
    c = vocab_library()
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    params = c.llama_context_default_params()
    found = {name: getattr(params, name) for name in CONTEXT_DEFAULTS}
    assert found == CONTEXT_DEFAULTS, f"llama_context_params has moved: {found}"
    return c


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy token, its log-probability and that of the next best one."""

    token: int
    logprob: float
    runner_up: float


class LlamaCpp:
    """One model in llama.cpp on the CPU, with settings for strict comparison by default.

    An F32 cache and no flash attention keep rounding out that is no part of a model; without
    repacked weights a row is computed alike in batches of every size.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        n_threads: int = 1,
        kv_type: str | tuple[str, str] = "F32",
        flash_attention: bool | None = False,
        repack: bool = False,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        """`watch` hears the name of every node before it is computed."""
        self.path, self._c, self._close = path, library(), ExitStack()
        model_params = self._c.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = repack
        self._model = self._c.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp refuses {path}; LlamaServer(path, verbosity=4) says why")
        self._close.callback(self._c.llama_model_free, self._model)
        self.n_vocab: int = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        params = self._c.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = -1 if flash_attention is None else int(flash_attention)
        type_k, type_v = (kv_type, kv_type) if isinstance(kv_type, str) else kv_type
        params.type_k, params.type_v = KV_TYPES[type_k], KV_TYPES[type_v]
        if watch is not None:
            self._callback = _node_callback(self._c, watch)
            params.cb_eval = ctypes.cast(self._callback, POINTER)
        self._context = self._c.llama_init_from_model(self._model, params)
        if not self._context:
            self._close.close()
            raise ValueError(f"llama.cpp makes no context for {path}")
        self._close.callback(self._c.llama_free, self._context)
        self._memory = self._c.llama_get_memory(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[n_tokens, n_vocab]: the logits after each token of a prompt."""
        self._c.llama_memory_clear(self._memory, True)
        return self._decode(ids)

    def logprobs(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """[n_tokens, n_vocab]: the log-probabilities after each token of a prompt."""
        return log_softmax(self.logits(ids))

    def next_logprobs(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """[n_vocab]: the log-probabilities of the token that follows a prompt."""
        return log_softmax(self.logits(ids)[-1])

    def logits_after_cut(
        self, ids: Sequence[int], start: int, stop: int, more: Sequence[int]
    ) -> NDArray[np.float32]:
        """Logits of `more`, after positions start..stop-1 of `ids` were cut out (K-shift)."""
        self.logits(ids)
        assert self.remove(0, start, stop)
        self._c.llama_memory_seq_add(self._memory, 0, stop, len(ids), start - stop)
        return self._decode(more)

    def greedy(self, prompt: Sequence[int] | str, n: int) -> list[Step]:
        """The `n` most probable tokens, one after the other, also past the end of the text."""
        logits = self.logits(self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        steps: list[Step] = []
        while len(steps) < n:
            logprobs = log_softmax(logits[-1])
            token = int(logprobs.argmax())
            runner_up = np.partition(logprobs, -2)[-2]
            steps.append(Step(token, float(logprobs[token]), float(runner_up)))
            logits = self._decode([token])
        return steps

    def remove(self, seq: int, p0: int, p1: int) -> bool:
        """Forget positions p0..p1-1 of a sequence; False if the memory cannot."""
        removed: bool = self._c.llama_memory_seq_rm(self._memory, seq, p0, p1)
        return removed

    def _decode(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the cache; their logits, [n_tokens, n_vocab]."""
        tokens = np.asarray(ids, np.int32)
        wanted = np.ones(len(tokens), np.int8)
        addresses = (tokens.ctypes.data, None, None, None, None, wanted.ctypes.data)
        code = self._c.llama_decode(self._context, Batch(len(tokens), *addresses))
        if code != 0:
            raise ValueError(f"llama_decode returned {code} for {len(tokens)} tokens")
        count = len(tokens) * self.n_vocab
        found = (FLOAT * count).from_address(self._c.llama_get_logits(self._context))
        return np.array(found, np.float32).reshape(len(tokens), self.n_vocab)

    @functools.cached_property
    def vocab(self) -> LlamaVocab:
        """The vocabulary of the same file, with everything there is to ask of it."""
        vocab = LlamaVocab(self.path)
        self._close.callback(vocab.close)
        return vocab

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; control tokens written in it are recognized."""
        return self.vocab.tokenize(text.encode(), add_special, parse_special=True)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens included."""
        return self.vocab.detokenize(ids).decode(errors="replace")

    def apply_template(self, messages: list[dict[str, str]]) -> str:
        """The prompt that the chat template of the model makes of `messages`."""
        with LlamaServer(self.path) as server:
            prompt: str = server.post("/apply-template", messages=messages)["prompt"]
        return prompt


def _node_callback(c: ctypes.CDLL, watch: Callable[[str], None]) -> Any:
    """A ggml_backend_sched_eval_callback that asks for no data."""

    @ctypes.CFUNCTYPE(ctypes.c_bool, POINTER, ctypes.c_bool, POINTER)
    def callback(tensor: int, ask: bool, _: object) -> bool:
        if ask:
            watch(c.ggml_get_name(tensor).decode())
        return not ask

    return callback


class LlamaServer:
    """llama-server inside this process, on a loopback port; settings as strict as LlamaCpp's.

    Other settings are fields of `xllamacpp.CommonParams`.
    """

    def __init__(self, path: Path, **settings: Any) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        f32 = xllamacpp.ggml_type.GGML_TYPE_F32
        disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        strict = {"n_ctx": 512, "n_gpu_layers": 0, "cache_type_k": f32, "cache_type_v": f32}
        strict |= {"flash_attn_type": disabled, "no_extra_bufts": True}
        # nothing that costs time or memory and changes no answer; -1 logs not even errors
        quick = {"warmup": False, "fit_params": False, "cache_ram_mib": 0, "verbosity": -1}
        for name, value in {**strict, **quick, **settings}.items():
            setattr(params, name, value)
        self._server = xllamacpp.Server(params)
        self._address = urlsplit(self._server.listening_address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # the server has no stop(): it ends with its last reference, or never if its loop has not
        # begun before
        self.post("/completion", prompt="a", n_predict=1)
        del self._server

    def post(self, route: str, **body: Any) -> Any:
        """The JSON answer of one route, such as /completion or /tokenize."""
        connection = HTTPConnection(self._address.hostname or "", self._address.port, timeout=60)
        try:
            connection.request(
                "POST", route, json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer = json.load(response)
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{route}: {response.status} {answer}")
        return answer

    def next_logprobs(self, ids: Sequence[int], n_vocab: int) -> NDArray[np.float64]:
        """[n_vocab]: the distribution that the server reports after a prompt.

        It reports none when the sampled token is EOS or part of a character. The bias forces a
        harmless token; the reported distribution is the one before the bias. Its sum is off by
        up to 3e-4, hence the normalization.
        """
        [harmless, *_] = self.post("/tokenize", content="a", add_special=False)["tokens"]
        answer = self.post(
            "/completion",
            prompt=list(ids),
            n_predict=1,
            n_probs=n_vocab,
            temperature=0,
            logit_bias=[[harmless, 1e6]],
            cache_prompt=False,
        )
        logprobs = np.full(n_vocab, -np.inf)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            logprobs[entry["id"]] = entry["logprob"]
        return log_softmax(logprobs)
