"""Raw completion: the prompt, then what the model makes of it."""

from pyggml.errors import UserError
from pyggml.llama.session import EOG, FULL
from pyggml.tools.task import Task


def run(task: Task, prompt: str | None) -> None:
    """Print the continuation of a prompt."""
    if prompt is None:
        raise UserError("there is no prompt: give one with -p, with -f or on stdin, or chat (-cnv)")
    screen, options = task.screen, task.options
    tokens = task.llama.tokenize(prompt)
    if options.verbose_prompt:
        task.print_tokens(tokens)
    try:
        steps = task.chat.session.generate(
            tokens, task.sampler, task.params, screen.prompt_progress
        )
    except KeyboardInterrupt:
        if options.perf:
            screen.say(task.stats())
        raise
    if options.display_prompt:
        screen.write_prompt(prompt)
    finish = task.show(steps, stop=True)
    if finish == EOG and screen.is_terminal:
        screen.say("[end of text]")
    if finish == FULL:
        screen.warn("the context is full: use a larger --ctx-size, or --context-shift")
