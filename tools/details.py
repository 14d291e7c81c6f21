"""What is told beyond the answer: model, sampling, times, memory.

Most of it only with -v (or -lv 4) and --log-file; rules, and memory of GPUs, in any case.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pyggml.gguf import Metadata, ValueType
from pyggml.llama.context import Context
from pyggml.llama.loader import Model
from pyggml.llama.sampling import SamplingParams
from pyggml.tools.task import Task

log = logging.getLogger("pyggml.tools")

MIB = 1 << 20
SHOWN_TEXT = 60  # characters of a value
SAID = 3  # the verbosity at which the log does not show it itself


def log_start(task: Task, params: SamplingParams) -> None:
    """The model, and how tokens will be chosen."""
    if not log.isEnabledFor(logging.INFO):
        return
    model, context, run = task.llama.model, task.chat.session.context, task.params
    for line in (*model_lines(model), *context_lines(context)):
        log.info("%s", line)
    if task.llama.has_template:
        log.info("chat template example:\n%s", task.llama.template.example())
    log.info("sampler seed: %d", task.sampler.seed)
    log.info("sampler params:\n%s", params.describe())
    log.info("sampler chain: %s", task.sampler.description)
    numbers = (context.n_ctx, context.params.n_batch, run.n_predict, run.keep)
    log.info("generate: n_ctx = %d, n_batch = %d, n_predict = %d, n_keep = %d", *numbers)


def tell_rules(task: Task) -> None:
    """What each rule has placed; of one that has placed nothing there was a warning."""
    model = task.llama.model
    if not model.placement.rules or task.screen.verbosity != SAID:
        return
    from pyggml.llama.dry_run import rules_of  # which imports planning

    for rule in rules_of(model, task.chat.session.context):
        if rule.tensors:
            task.screen.say(str(rule))


def tell_end(task: Task) -> None:
    """Times and memory of everything since the model was ready."""
    if log.isEnabledFor(logging.INFO):
        for line in perf_lines(task):
            log.info("%s", line)
    if task.screen.verbosity == SAID and task.llama.model.placement.gpus:
        tell: Callable[[str], None] = task.screen.say
    elif log.isEnabledFor(logging.INFO):
        tell = log.info
    else:
        return
    for line in task.llama.memory_table().lines():
        tell(line)


# ---------------------------------------------------------------- model
def model_lines(model: Model) -> Iterator[str]:
    """Metadata, tensors and sizes."""
    kv, gguf, hp = model.metadata, model.gguf, model.hparams
    yield (
        f"loaded meta data with {len(kv)} key-value pairs and {len(gguf.tensors)} tensors "
        f"from {gguf.path}"
    )
    for i, key in enumerate(kv):
        yield f"- kv {i:3d}: {key:>42} {kv.type_label(key):<8} = {_shown(kv, key)}"
    types = Counter(t.type for t in gguf.tensors.values())
    for type_, n in types.most_common():
        yield f"- type {type_.label:>4}: {n:4d} tensors"
    bits = 8 * model.nbytes / model.n_params if model.n_params else 0
    yield f"file size = {model.nbytes / MIB:.2f} MiB ({bits:.2f} BPW)"
    yield f"model = {model.description}, {model.n_params:,} parameters"
    yield (
        f"n_ctx_train = {hp.n_ctx_train}, n_embd = {hp.n_embd}, n_layer = {hp.n_layer}, "
        f"n_head = {_same(hp.n_head)}, n_head_kv = {_same(hp.n_head_kv)}, n_ff = {_same(hp.n_ff)}, "
        f"n_vocab = {hp.n_vocab}, n_swa = {hp.n_swa}"
    )


def _shown(kv: Metadata, key: str) -> str:
    """A value in one short line; arrays are not decoded."""
    if kv.type_of(key) is ValueType.ARRAY:
        return "..."
    text = " ".join(str(kv[key]).split())
    return text if len(text) <= SHOWN_TEXT else text[: SHOWN_TEXT - 3] + "..."


def _same(values: tuple[int, ...]) -> str:
    """One number if all layers agree."""
    return str(values[0]) if len(set(values)) == 1 else str(list(values))


def context_lines(context: Context) -> Iterator[str]:
    """What the context was made with."""
    p = context.params
    yield (
        f"n_ctx = {p.n_ctx}, n_batch = {p.n_batch}, n_ubatch = {p.n_ubatch}, "
        f"flash_attn = {int(context.flash_attn)}, n_threads = {p.n_threads}, "
        f"n_threads_batch = {p.n_threads_batch}, K {p.type_k}, V {p.type_v}"
    )


# ---------------------------------------------------------------- times
def perf_lines(task: Task) -> Iterator[str]:
    """llama.cpp's lines of times, with its columns."""
    perf, totals = task.chat.session.context.perf, task.totals
    total = 1e3 * (time.perf_counter() - totals.start)
    known = totals.sample_ms + perf.prompt_ms + perf.eval_ms
    load, n_sampled = task.llama.model.load_ms, totals.n_sampled
    yield f"   sampling time = {totals.sample_ms:10.2f} ms"
    yield f"   samplers time = {totals.sample_ms:10.2f} ms / {n_sampled:5d} tokens"
    yield f"       load time = {load:10.2f} ms"
    yield f"prompt eval time = {_eval(perf.prompt_ms, perf.n_prompt, 'tokens')}"
    yield f"       eval time = {_eval(perf.eval_ms, perf.n_eval, 'runs  ')}"
    yield f"      total time = {total:10.2f} ms / {perf.n_prompt + perf.n_eval:5d} tokens"
    rest = total - known
    share = 100 * rest / total if total else 0.0
    yield (
        f"unaccounted time = {rest:10.2f} ms / {share:5.1f} %      "
        "(total - sampling - prompt eval - eval) / (total)"
    )
    yield f"   graphs reused = {perf.n_reused:10d}"


def _eval(ms: float, n: int, what: str) -> str:
    n = max(1, n)
    rate = 1e3 * n / ms if ms else 0.0
    return (
        f"{ms:10.2f} ms / {n:5d} {what} ({ms / n:8.2f} ms per token, {rate:8.2f} tokens per second)"
    )
