"""Sessions: the one generator that command line, server, bench and tests consume.

A session owns a context and remembers which tokens its memory holds, so that a prompt that begins
like the last one is only computed from where it differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pyggml.errors import UserError
from pyggml.llama.batch import Batch
from pyggml.llama.context import Context
from pyggml.llama.detokenize import Detokenizer
from pyggml.llama.sampling import Sampler
from pyggml.llama.stop_strings import StopStrings
from pyggml.llama.vocab import Vocab

log = logging.getLogger("pyggml.session")

EOG, LIMIT, STOP, FULL = "eog", "limit", "stop", "full"
ENDLESS = 1 << 62
PROMPT_MARGIN = 4  # llama.cpp refuses prompts that leave less room than this


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token.

    `text` is what became readable with it (incomplete characters and possible stop strings are
    held back). `finish` is None while generation goes on, else why it ended: "eog" (the model
    ended), "limit" (n_predict), "stop" (a stop string, in `matched`), "full" (the context).
    """

    token: int
    text: str
    finish: str | None = None
    matched: str = ""


@dataclass(slots=True)
class Timings:
    """What one `generate` call took; milliseconds."""

    n_cached: int = 0  # prompt tokens whose work was reused
    n_prompt: int = 0
    prompt_ms: float = 0.0
    n_generated: int = 0
    generate_ms: float = 0.0
    sample_ms: float = 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return 1e3 * self.n_prompt / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def rate(self) -> float:
        """Generated tokens per second; the first comes with the prompt and does not count."""
        return 1e3 * (self.n_generated - 1) / self.generate_ms if self.generate_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """When a generation ends and what happens when the context is full.

    n_predict: -1 without limit, -2 until the context is full. keep: prompt tokens that a context
    shift keeps (-1: all).
    """

    n_predict: int = -1
    stop: tuple[str, ...] = ()
    keep: int = 0
    context_shift: bool = False
    special: bool = False  # show special tokens

    def __post_init__(self) -> None:
        if self.n_predict < -2:
            raise UserError(f"--predict {self.n_predict}: a number of tokens, -1 or -2")
        if self.context_shift and self.n_predict == -2:
            raise UserError("--context-shift and --predict -2 (until full) contradict each other")


@dataclass(slots=True)
class Session:
    """A conversation with one model."""

    context: Context
    tokens: list[int] = field(default_factory=list)  # what the memory holds, by position
    prompt: list[int] = field(default_factory=list)  # of the latest generation
    timings: Timings = field(default_factory=Timings)
    seq: int = 0
    n_exact: int = ENDLESS  # tokens from here on were computed from more than is left of the text

    @property
    def vocab(self) -> Vocab:
        return self.context.model.vocab

    def clear(self) -> None:
        """Forget everything."""
        self._cut(0)

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        params: GenerateParams | None = None,
        on_prompt: Callable[[int, int], None] | None = None,
    ) -> Iterator[Step]:
        """Continue a prompt, token by token. Closing the iterator stops cleanly.

        The prompt is computed before this returns; `on_prompt(done, total)` is called meanwhile.
        The prompt's tokens become the sampler's text, in place of what it knew.
        """
        params = params or GenerateParams()
        if not len(prompt):
            raise UserError("the prompt is empty and the model has no BOS token to start from")
        self._check_fits(len(prompt), params)
        self.prompt = list(prompt)
        self.timings = Timings()
        run = _Run(self, sampler, params, self._n_keep(len(prompt), params.keep))
        self.evaluate(self.prompt, on_prompt)
        sampler.forget()
        for token in self.prompt:
            sampler.accept(token)
        return run.steps()

    def evaluate(
        self, prompt: Sequence[int], on_prompt: Callable[[int, int], None] | None = None
    ) -> None:
        """Bring the memory to exactly these tokens, with the logits of the last one."""
        start = time.perf_counter()
        n_past = self._reuse(prompt)
        todo = prompt[n_past:]
        # ubatch by ubatch: progress is seen, and what was computed before a Ctrl-C is not lost
        step, total = self.context.params.n_ubatch, len(todo)
        self.timings.n_cached = n_past
        if on_prompt:
            on_prompt(0, total)
        for i in range(0, total, step):
            self._decode(todo[i : i + step], logits="last" if i + step >= total else "none")
            self.timings.n_prompt = min(i + step, total)
            self.timings.prompt_ms = 1e3 * (time.perf_counter() - start)
            if on_prompt:
                on_prompt(self.timings.n_prompt, total)

    # An interrupt may come between any two lines: `tokens` is cut before the memory is, and grows
    # after it, so that it never promises what the memory does not hold.

    def _decode(self, tokens: Sequence[int], *, logits: Literal["last", "none"] = "last") -> None:
        self.context.decode(Batch.of(tokens, len(self.tokens), seq=self.seq, logits=logits))
        self.tokens.extend(tokens)

    def _cut(self, n: int) -> None:
        del self.tokens[n:]
        self.context.memory.remove(self.seq, n)
        if n <= self.n_exact:
            self.n_exact = ENDLESS

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Cut the memory back to the common prefix; the last prompt token is always recomputed."""
        n = 0
        for mine, wanted in zip(self.tokens[: self.n_exact], prompt[:-1], strict=False):
            if mine != wanted:
                break
            n += 1
        if not self.context.memory.can_remove(self.seq, n):
            n = 0
        self._cut(n)
        # a sliding window that has moved on, or an interrupted step, may have left less
        if not self.context.memory.can_continue(self.seq, n):
            n = 0
            self._cut(0)
        return n

    def _check_fits(self, n_prompt: int, params: GenerateParams) -> None:
        limit = self.context.n_ctx - PROMPT_MARGIN
        if n_prompt > limit:
            raise UserError(
                f"the prompt is too long: {n_prompt} tokens, but a context of "
                f"{self.context.n_ctx} holds at most {limit}: use a larger --ctx-size"
            )
        if params.context_shift and not self.context.memory.can_shift:
            raise UserError(
                "--context-shift: the positions of this model cannot be shifted"
                if self.context.hparams.n_pos > 1
                else "--context-shift: this model's sliding-window memory cannot be shifted; "
                "add --swa-full"
            )

    def _n_keep(self, n_prompt: int, keep: int) -> int:
        if keep < 0 or keep > n_prompt:
            return n_prompt
        return min(keep + int(self.vocab.add_bos), n_prompt)

    def shift(self, n_keep: int) -> None:
        """Drop half of what follows the first n_keep tokens and move the rest down."""
        n_discard = (len(self.tokens) - n_keep) // 2
        if n_discard < 1:
            raise UserError(f"--keep {n_keep} leaves no room in the context: keep fewer tokens")
        moved, memory = self.tokens[n_keep + n_discard :], self.context.memory
        self.n_exact = min(self.n_exact, n_keep)
        del self.tokens[n_keep:]
        memory.remove(self.seq, n_keep, n_keep + n_discard)
        memory.shift(self.seq, n_keep + n_discard, n_keep + n_discard + len(moved), -n_discard)
        self.tokens.extend(moved)


class _Run:
    """One generation after its prompt was computed."""

    def __init__(
        self, session: Session, sampler: Sampler, params: GenerateParams, n_keep: int
    ) -> None:
        self.session = session
        self.sampler = sampler
        self.params = params
        self.n_keep = n_keep
        self.text = Detokenizer(session.vocab, special=params.special)
        self.stops = StopStrings(params.stop)

    def steps(self) -> Iterator[Step]:
        n_generated = 0
        if self.params.n_predict == 0:
            return
        while True:
            token = self._sample()
            n_generated += 1
            self.session.timings.n_generated = n_generated
            ends = self.session.vocab.is_eog(token)
            finish = EOG if ends else self._limit(n_generated)
            text, matched = self._text(token if not ends or self.params.special else None, finish)
            finish = STOP if matched else finish
            yield Step(token, text, finish, matched)
            if finish:
                return
            self._advance(token)

    def _sample(self) -> int:
        start = time.perf_counter()
        token = self.sampler.sample(self.session.context.logits(-1))
        self.sampler.accept(token)
        self.session.timings.sample_ms += 1e3 * (time.perf_counter() - start)
        return token

    def _limit(self, n_generated: int) -> str | None:
        if n_generated == self.params.n_predict:
            return LIMIT
        is_full = len(self.session.tokens) >= self.session.context.n_ctx
        return FULL if is_full and not self.params.context_shift else None

    def _advance(self, token: int) -> None:
        start = time.perf_counter()
        if len(self.session.tokens) >= self.session.context.n_ctx:
            self.session.shift(self.n_keep)
        self.session._decode([token])
        self.session.timings.generate_ms += 1e3 * (time.perf_counter() - start)

    def _text(self, token: int | None, finish: str | None) -> tuple[str, str]:
        """What a token makes readable, with all the rest at the end; and a stop string found."""
        text, matched = self.stops.feed("" if token is None else self.text.push(token))
        if finish and not matched:
            rest, matched = self.stops.feed(self.text.flush())
            text += rest + self.stops.flush()
        return text, matched
