"""The Python face: load a model, generate, chat, look at logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyggml.errors import ConfigError, UserError
from pyggml.gguf import Override, parse_override
from pyggml.llama.batch import Batch
from pyggml.llama.chat import ChatTemplate, select_template
from pyggml.llama.context import Context
from pyggml.llama.context_params import ContextParams, RopeOverrides
from pyggml.llama.loader import Model, ModelParams, Progress, load_model
from pyggml.llama.sampling import Sampler, SamplingParams, VocabInfo, make_chain
from pyggml.llama.session import GenerateParams, Session, Step, Timings

PromptProgress = Callable[[int, int], None]  # prompt tokens done, in all


class Chat:
    """A session with messages: `chat("Hello")` yields the answer's steps."""

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
        params = replace(params or GenerateParams(), **general)
        sampler = sampler or self.llama.sampler(**sampling)
        tokens = self.llama.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return self.session.generate(tokens, sampler, params, on_prompt)

    def chat(self, text: str, *, system: str | None = None, **options: Any) -> Iterator[Step]:
        """Say something; the answer's text joins the messages when it ends."""
        if system is not None and not self.messages:
            self.messages.append({"role": "system", "content": system})
        self.messages.append({"role": "user", "content": text})
        try:
            steps = self.generate(self.render(), **options)
        except BaseException:
            # a message that was not understood is not part of the conversation
            self.messages.pop()
            raise
        return self._answer(steps)

    def render(self) -> list[int]:
        """The messages as prompt tokens, ending where the assistant speaks."""
        text = self.llama.template.render(self.messages, add_generation_prompt=True)
        return self.llama.tokenize(text, parse_special=True)

    def _answer(self, steps: Iterator[Step]) -> Iterator[Step]:
        parts: list[str] = []
        try:
            for step in steps:
                parts.append(step.text)
                yield step
        finally:
            self.messages.append({"role": "assistant", "content": "".join(parts)})

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


class Llama:
    """A loaded model; usable as a context manager."""

    def __init__(self, model: Model, context_params: ContextParams, template: ChatTemplate) -> None:
        self.model = model
        self.context_params = context_params
        self.template = template
        self._contexts: list[Context] = []
        self._scratch: Context | None = None

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
        """A new context with this model's parameters."""
        context = Context(self.model, self.context_params)
        self._contexts.append(context)
        return context

    def session(self) -> Chat:
        """A new conversation with a memory of its own."""
        return Chat(self, Session(self.context()))

    def sampler(self, **params: Any) -> Sampler:
        """A sampler chain; keywords are fields of SamplingParams."""
        return self.sampler_of(SamplingParams(**params))

    def sampler_of(self, params: SamplingParams) -> Sampler:
        """A sampler chain of given parameters."""
        return make_chain(params, self.vocab_info())

    def vocab_info(self) -> VocabInfo:
        """What sampling needs to know of the vocabulary."""
        vocab = self.model.vocab
        return VocabInfo(
            n_vocab=self.model.hparams.n_vocab,
            n_ctx=self.context_params.n_ctx or self.model.hparams.n_ctx_train,
            eog_ids=vocab.eog,
            end_id=vocab.end_id,
            suppress_ids=frozenset(vocab.suppressed),
            token_to_piece=lambda token: vocab.token_to_piece(token, special=True),
            tokenize=lambda text: vocab.tokenize(text, add_special=False, parse_special=False),
        )

    def logits(self, ids: Sequence[int], *, all: bool = False) -> npt.NDArray[np.float32]:
        """Logits after these tokens: [n_vocab], or with `all` one row per token."""
        if not ids:
            raise UserError("logits of no tokens: give at least one")
        if self._scratch is None:
            self._scratch = self.context()
        context = self._scratch
        context.memory.clear()
        rows = []
        for i in range(0, len(ids), context.params.n_batch):
            part = ids[i : i + context.params.n_batch]
            is_last = i + context.params.n_batch >= len(ids)
            wanted = "all" if all else "last" if is_last else "none"
            context.decode(Batch.of(part, i, logits=wanted))
            rows.append(context.all_logits())
        return np.concatenate(rows) if all else rows[-1][-1]

    # ------------------------------------------------------------ lifetime
    def close(self) -> None:
        """Stop threads and give all memory back."""
        for context in self._contexts:
            context.close()
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
    **params: Any,
) -> Llama:
    """Load a GGUF model.

    Keywords are the command line's parameters: the fields of ModelParams (load_mode, repack,
    check_tensors), of ContextParams (n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch,
    flash_attn, type_k, type_v, swa_full, ...) and of RopeOverrides (freq_base, freq_scale, ...).

    >>> with load("model.gguf", n_ctx=2048) as llama:
    ...     for step in llama.session().chat("Why is the sky blue?", temp=0):
    ...         print(step.text, end="")
    """
    overrides = tuple(parse_override(o) if isinstance(o, str) else o for o in override_kv)
    for_model, params = _split(ModelParams, params)
    for_rope, params = _split(RopeOverrides, params)
    for_context, unknown = _split(ContextParams, params)
    if unknown:
        raise ConfigError(f"load() has no parameter {', '.join(map(repr, unknown))}")
    context_params = ContextParams(**{"rope": RopeOverrides(**for_rope), **for_context})
    model = load_model(path, ModelParams(overrides=overrides, **for_model), progress)
    template = select_template(model.metadata, model.vocab, chat_template, jinja=jinja)
    return Llama(model, context_params, template)


def _split(cls: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that are fields of a dataclass, and the others."""
    names = {f.name for f in fields(cls)}
    mine = {k: v for k, v in options.items() if k in names}
    return mine, {k: v for k, v in options.items() if k not in names}
