"""The Python face: load a model, generate, chat, look at logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyggml import registry
from pyggml.backend import Device
from pyggml.errors import ConfigError, UserError
from pyggml.gguf import Override, parse_override
from pyggml.llama.batch import Batch
from pyggml.llama.chat import ChatTemplate, select_template
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams, RopeOverrides
from pyggml.llama.cpu_params import CpuParams
from pyggml.llama.fit import Fitted
from pyggml.llama.fit_model import Fit
from pyggml.llama.loader import (
    Model,
    ModelFile,
    ModelParams,
    Progress,
    load_model,
    open_model,
)
from pyggml.llama.memory_table import MemoryTable, memory_table
from pyggml.llama.placement import use_devices
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.sampling import Sampler, SamplingParams, VocabInfo, make_chain
from pyggml.llama.session import GenerateParams, Session, Step, Timings

PromptProgress = Callable[[int, int], None]  # prompt tokens done, in all


class Chat:
    """A conversation: messages, and a session that holds their tokens."""

    def __init__(self, llama: Llama, session: Session) -> None:
        self.llama = llama
        self.session = session
        self.messages: list[dict[str, Any]] = []

    @property
    def timings(self) -> Timings:
        """What the last call took."""
        return self.session.timings

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampler: Sampler | None = None,
        params: GenerateParams | None = None,
        on_prompt: PromptProgress | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Continue a text or tokens. Keywords: fields of GenerateParams and SamplingParams.

        >>> text = "".join(s.text for s in chat.generate("Once upon", n_predict=8, temp=0))
        """
        general, sampling = _split(GenerateParams, options)
        if sampler is None:
            sampler = self.llama.sampler(**sampling)
        elif sampling:
            raise ConfigError(f"{', '.join(sampling)}: the given sampler decides about sampling")
        params = replace(params or GenerateParams(), **general)
        tokens = self.llama.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.session.generate(tokens, sampler, params, on_prompt)

    def chat(self, text: str, *, system: str | None = None, **options: Any) -> Iterator[Step]:
        """Say something; the answer's steps. Keywords as for `generate`.

        Both texts join the messages, the answer as it grows. `system` begins a new conversation.
        """
        n = len(self.messages)
        if system is not None and not self.messages:
            self.messages.append({"role": "system", "content": system})
        self.messages.append({"role": "user", "content": text})
        try:
            steps = self.generate(self.render(), **options)
        except BaseException:
            # a message that was not understood is not part of the conversation
            del self.messages[n:]
            raise
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        return _written(steps, answer)

    def render(self) -> list[int]:
        """The messages as prompt tokens, ending where the assistant speaks."""
        text = self.llama.template.render(self.messages, add_generation_prompt=True)
        return self.llama.tokenize(text, parse_special=True)

    def take_back(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                text: str = self.messages[i]["content"]
                del self.messages[i:]
                return text
        return None

    def clear(self) -> None:
        """Forget the messages and the memory."""
        self.messages.clear()
        self.session.clear()

    def close(self) -> None:
        """Give the memory back; the model stays loaded."""
        self.llama.close_context(self.session.context)


def _written(steps: Iterator[Step], answer: dict[str, Any]) -> Iterator[Step]:
    for step in steps:
        answer["content"] += step.text
        yield step


class Llama:
    """A loaded model; usable as a context manager."""

    def __init__(
        self,
        model: Model,
        context_params: ContextParams,
        template: ChatTemplate,
        fitted: Fitted | None = None,
    ) -> None:
        """`fitted`: what was chosen so that everything fits, if there was something to choose."""
        self.model = model
        self.fitted = fitted
        self.context_params = context_params
        self.template = template
        self._contexts: list[Context] = []
        self._scratch: Context | None = None

    @property
    def has_template(self) -> bool:
        """Whether the user or the model chose the chat template."""
        return self.template.explicit

    # ------------------------------------------------------------ text and tokens
    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text."""
        return self.model.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.model.vocab.detokenize(ids)

    # ------------------------------------------------------------ running
    def context(self) -> Context:
        """A new context with this model's parameters, warmed up unless they say otherwise."""
        context = Context(self.model, self.context_params)
        self._contexts.append(context)
        if self.context_params.warmup and not self.model.no_alloc:
            context.warm_up()
        return context

    def memory_table(self) -> MemoryTable:
        """Which device has what of the model and of all contexts; a plan has one at least.

        >>> [(d.name, d.use.model, d.free) for d in llama.memory_table().devices]
        """
        if self.model.no_alloc and not self._contexts:
            self.context()
        return memory_table(self.model, *self._contexts)

    def close_context(self, context: Context) -> None:
        """Stop a context's threads and give its memory back."""
        if context in self._contexts:
            self._contexts.remove(context)
            context.close()

    def session(self) -> Chat:
        """A new conversation with a memory of its own."""
        return Chat(self, Session(self.context()))

    def sampler(self, **params: Any) -> Sampler:
        """A sampler chain; keywords are fields of SamplingParams."""
        for_sampling, unknown = _split(SamplingParams, params)
        _refuse(unknown, SamplingParams, GenerateParams)
        return self.sampler_of(SamplingParams(**for_sampling))

    def sampler_of(self, params: SamplingParams) -> Sampler:
        """A sampler chain of given parameters."""
        return make_chain(params, self.vocab_info())

    def vocab_info(self) -> VocabInfo:
        """What sampling needs to know of the vocabulary."""
        vocab, hp = self.model.vocab, self.model.hparams
        ends = [i for i in (vocab.special.eot, vocab.special.eos) if i is not None]
        return VocabInfo(
            n_vocab=hp.n_vocab,
            n_ctx=self.context_params.resolved(hp, self.model.n_cores).n_ctx,
            eog_ids=vocab.eog,
            end_id=ends[0] if ends else -1,
            suppress_ids=frozenset(vocab.suppressed),
            token_to_piece=lambda token: vocab.token_to_piece(token, special=True),
            tokenize=lambda text: vocab.tokenize(text, add_special=False, parse_special=False),
        )

    def logits(self, ids: Sequence[int], *, all: bool = False) -> npt.NDArray[np.float32]:
        """Logits after these tokens: [n_vocab], or with `all` one row per token."""
        if not len(ids):
            raise UserError("logits of no tokens: give at least one")
        if self._scratch is None:
            self._scratch = self.context()
        context = self._scratch
        if len(ids) > context.n_ctx:
            raise UserError(
                f"logits of {len(ids)} tokens: a context of {context.n_ctx} cannot hold them, "
                "use a larger n_ctx"
            )
        context.memory.clear()
        step, rows = context.params.n_batch, []
        for i in range(0, len(ids), step):
            context.decode(Batch.of(ids[i : i + step], i, logits="all" if all else "last"))
            rows.append(context.all_logits())
        return np.concatenate(rows) if all else context.logits(-1)

    # ------------------------------------------------------------ lifetime
    def close(self) -> None:
        """Stop threads and give all memory back."""
        for context in list(self._contexts):
            self.close_context(context)
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(
    path: str | Path,
    *,
    progress: Progress | None = None,
    chat_template: str | None = None,
    jinja: bool = True,
    override_kv: Sequence[str | Override] = (),
    devices: Sequence[Device] | None = None,
    no_alloc: bool = False,
    **params: Any,
) -> Llama:
    """Load a GGUF model; with `no_alloc` only plan it, for which its header is enough.

    Keywords are the command line's parameters: the fields of ModelParams (load_mode, repack,
    check_tensors, numa), of PlacementParams (n_gpu_layers, tensor_split, rules="exps=CPU", ...), of
    ContextParams (n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, flash_attn, type_k, type_v,
    swa_full, ...), of CpuParams (cpu_mask, cpu_range, cpu_strict, prio, poll, and each with _batch)
    and of RopeOverrides (freq_base, freq_scale, ...).

    >>> with load("model.gguf", n_ctx=2048) as llama:
    ...     for step in llama.session().chat("Why is the sky blue?", n_predict=32, temp=0):
    ...         print(step.text, end="")
    """
    overrides = tuple(parse_override(o) if isinstance(o, str) else o for o in override_kv)
    model_params, context_params = _parameters(params, overrides)
    use_devices(model_params.placement, devices or registry.devices())  # mistakes come first
    file = open_model(path, model_params.overrides, allow_no_data=no_alloc)
    fitted = None
    if model_params.placement.fit:
        fitted = _fit(file, model_params, context_params, devices, no_alloc=no_alloc)
    if fitted is not None:
        model_params = replace(model_params, placement=fitted.placement)
        context_params = replace(context_params, n_ctx=fitted.n_ctx)
    model = load_model(file, model_params, progress, devices=devices, no_alloc=no_alloc)
    try:
        template = select_template(model.metadata, model.vocab, chat_template, jinja=jinja)
    except BaseException:
        model.close()
        raise
    return Llama(model, context_params, template, fitted)


def _fit(
    file: ModelFile,
    params: ModelParams,
    context: ContextParams,
    devices: Sequence[Device] | None,
    *,
    no_alloc: bool,
) -> Fitted | None:
    """What -fit chooses; what cannot be loaded may still be planned. Raises OutOfMemory."""
    try:
        search = Fit(file, params, context, devices or registry.devices())
        fitted = search.run(planning=no_alloc)
        if fitted is not None and not no_alloc:
            search.check(fitted)
        return fitted
    except BaseException:
        file.gguf.close()
        raise


def _parameters(
    options: dict[str, Any], overrides: tuple[Override, ...]
) -> tuple[ModelParams, ContextParams]:
    """Keywords of `load`. Raises ConfigError."""
    for_model, options = _split(ModelParams, options)
    for_placement, options = _split(PlacementParams, options)
    for_rope, options = _split(RopeOverrides, options)
    for_cpu, options = _split(CpuParams, options)
    for_context, unknown = _split(ContextParams, options)
    _refuse(unknown, ModelParams, PlacementParams, ContextParams, CpuParams, RopeOverrides)
    rope = replace(for_context.pop("rope", RopeOverrides()), **for_rope)
    cpu = replace(for_context.pop("cpu", CpuParams()), **for_cpu)
    placement = for_model.get("placement", PlacementParams())
    for_model["placement"] = placement.changed(**for_placement)
    for_model["overrides"] = (*for_model.get("overrides", ()), *overrides)
    return ModelParams(**for_model), ContextParams(rope=rope, cpu=cpu, **for_context)


def _split(cls: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that are fields of a dataclass, and the others."""
    names = {f.name for f in fields(cls)}
    mine = {k: v for k, v in options.items() if k in names}
    return mine, {k: v for k, v in options.items() if k not in names}


def _refuse(unknown: Mapping[str, Any], *known: type) -> None:
    """Raise ConfigError for keywords that nobody takes."""
    for name in unknown:
        near = get_close_matches(name, [f.name for cls in known for f in fields(cls)], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no parameter {name!r}{hint}")
