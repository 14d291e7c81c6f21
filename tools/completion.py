"""Raw completion: the prompt, then what the model makes of it."""

import sys
from collections.abc import Sequence

from pyggml.errors import UserError
from pyggml.llama.api import Chat, Llama
from pyggml.llama.sampling import Sampler
from pyggml.llama.session import EOG, FULL, GenerateParams, Timings
from pyggml.tools.settings import Options
from pyggml.tools.ui import YELLOW, Screen


def run(
    llama: Llama,
    chat: Chat,
    sampler: Sampler,
    params: GenerateParams,
    options: Options,
    screen: Screen,
    prompt: str | None,
) -> None:
    """Print the continuation of a prompt."""
    tokens = llama.tokenize(prompt or "")
    if not tokens:
        raise UserError("there is no prompt: give one with -p, -f or on stdin")
    if options.verbose_prompt:
        print_tokens(llama, tokens, screen)
    if options.display_prompt and prompt:
        screen.write_prompt(prompt)
    finish = None
    try:
        steps = chat.session.generate(tokens, sampler, params, screen.prompt_progress)
        screen.clear_progress()
        for step in steps:
            screen.write(step.text + step.matched)
            finish = step.finish
    finally:
        screen.write("\n")
        if options.perf:
            screen.say(stats(chat.timings))
    if finish == EOG and screen.is_terminal:
        screen.say("[end of text]")
    warn_if_full(finish, screen)


def warn_if_full(finish: str | None, screen: Screen) -> None:
    """Say why the text ends early."""
    if finish == FULL:
        screen.say("the context is full: use a larger --ctx-size, or --context-shift", YELLOW)


def print_tokens(llama: Llama, tokens: Sequence[int], screen: Screen) -> None:
    """One line per token: id, arrow, piece (llama-tokenize's form)."""
    for token in tokens:
        piece = llama.model.vocab.token_to_piece(token, special=True).decode("utf-8", "replace")
        print(f"{token:6d} -> '{piece}'", file=sys.stderr)


def stats(t: Timings) -> str:
    """The line of timings."""
    cached = f" ({t.n_cached} more reused)" if t.n_cached else ""
    parts = [
        f"prompt {t.n_prompt} tokens{cached}, {t.prompt_rate:.1f} t/s",
        f"generated {t.n_generated} tokens, {t.rate:.1f} t/s",
    ]
    return "[ " + " | ".join(parts) + " ]"
