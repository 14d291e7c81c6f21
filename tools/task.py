"""What a completion and a chat have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyggml.llama.api import Chat, Llama
from pyggml.llama.sampling import Sampler
from pyggml.llama.session import GenerateParams, Step, Timings
from pyggml.tools.settings import Options
from pyggml.tools.simulated import Modelled
from pyggml.tools.ui import Screen


@dataclass(slots=True)
class Totals:
    """What all answers took together."""

    start: float = field(default_factory=time.perf_counter)
    sample_ms: float = 0.0
    n_sampled: int = 0

    def add(self, t: Timings) -> None:
        """Count one answer."""
        self.sample_ms += t.sample_ms
        self.n_sampled += t.n_generated


@dataclass(frozen=True, slots=True)
class Task:
    """A model, how it is sampled, and where the answer goes."""

    llama: Llama
    chat: Chat
    sampler: Sampler
    params: GenerateParams
    options: Options
    screen: Screen
    totals: Totals = field(default_factory=Totals)
    modelled: Modelled | None = None  # of simulated cards

    def show(self, steps: Iterable[Step], *, stop: bool) -> str | None:
        """Print an answer as it grows, with the stop string that ends it or without; why it ended.

        However it ends, the cursor is at the start of a line then and the timings are shown.
        """
        finish = None
        if self.modelled:
            self.modelled.prompt_done(self.chat.timings.n_prompt)
        try:
            for step in steps:
                self.screen.write(step.text + step.matched if stop else step.text)
                finish = step.finish
            self.screen.end_line()
        except BrokenPipeError:
            raise
        except BaseException:
            self.screen.end_line()
            raise
        finally:
            self.totals.add(self.chat.timings)
            if self.modelled:
                self.modelled.answer_done(self.chat.timings.n_generated)
            if self.options.perf:
                self.screen.say(self.stats())
        return finish

    def stats(self) -> str:
        """The line of timings."""
        t, session = self.chat.timings, self.chat.session
        reused = f" + {t.n_cached} reused" if t.n_cached else ""
        generated = "1 token" if t.n_generated == 1 else f"{t.n_generated} tokens"
        parts = (
            f"prompt {t.n_prompt}{reused}{_rate(t.prompt_rate)}",
            f"generated {generated}{_rate(t.rate)}",
            f"context {len(session.tokens)}/{session.context.n_ctx}",
        )
        return f"[ {' | '.join(parts)} ]"

    def print_tokens(self, tokens: Sequence[int]) -> None:
        """One line per token: id, arrow, piece (llama-tokenize's form)."""
        vocab = self.llama.model.vocab
        for token in tokens:
            piece = vocab.token_to_piece(token, special=True).decode("utf-8", "replace")
            print(f"{token:6d} -> '{piece}'", file=self.screen.err)


def _rate(per_second: float) -> str:
    return f", {per_second:.1f} t/s" if per_second else ""
