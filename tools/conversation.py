"""Chat on a terminal, or with the lines of stdin."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from pyggml.errors import UserError
from pyggml.llama.session import FULL
from pyggml.tools.line_input import COMMANDS, Reader, make_reader
from pyggml.tools.task import Task
from pyggml.tools.ui import GREEN

HELP = r"""commands:
  /help    this list
  /clear   forget the conversation
  /regen   answer the last message again
  /exit    leave (or Ctrl-D)
a message of several lines: paste it, press Alt-Enter between lines, or end lines with \
Ctrl-C stops an answer, a second one leaves"""

# what looks like a command; a path or a fraction does not
_COMMAND = re.compile(r"/[a-z]+", re.IGNORECASE)


def run(task: Task, first: str | None, system: str | None) -> None:
    """Talk until the person leaves; with --single-turn until the first answer."""
    if task.options.single_turn and first is None and not sys.stdin.isatty():
        raise UserError("--single-turn without a terminal needs a message: give one with -p")
    screen = task.screen
    if screen.is_terminal:
        context = task.chat.session.context
        screen.say(f"context of {context.n_ctx} tokens · /help lists the commands; Ctrl-D leaves")
    talk = Talk(task, system, make_reader(task.options, screen))
    if first is not None:
        if screen.is_terminal:
            screen.say(screen.paint("> ", GREEN) + first, color="")
        talk.answer(first)
        if task.options.single_turn:
            return
    for message in talk.messages():
        talk.answer(message)
        if task.options.single_turn:
            return


class Talk:
    """The state of one chat."""

    def __init__(self, task: Task, system: str | None, reader: Reader) -> None:
        self.task = task
        self.system = system
        self.reader = reader
        self.was_interrupted = False
        self.unanswered: str | None = None  # a message whose answer never began

    # ------------------------------------------------------------ input
    def messages(self) -> Iterator[str]:
        """What the person types, commands carried out.

        A second Ctrl-C in a row is a KeyboardInterrupt.
        """
        say = self.task.screen.say
        while True:
            if self.task.screen.is_terminal:
                say("", color="")
            try:
                text = self.reader.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                if self.was_interrupted or not sys.stdin.isatty():
                    raise
                self.was_interrupted = True
                say("Ctrl-C again, or Ctrl-D, leaves")
                continue
            self.was_interrupted = False
            command = text.strip()
            if command == "/exit":
                return
            if _COMMAND.fullmatch(command):
                self._command(command)
            elif command:
                yield text

    def _command(self, text: str) -> None:
        commands = {"/help": self._help, "/clear": self._clear, "/regen": self._regenerate}
        if text in commands:
            commands[text]()
        else:
            self.task.screen.say(f"there is no command {text}: {', '.join(COMMANDS)}")

    def _help(self) -> None:
        self.task.screen.say(HELP)

    def _clear(self) -> None:
        self.unanswered = None
        self.task.chat.clear()
        self.task.sampler.reset()
        self.task.screen.say("forgotten")

    def _regenerate(self) -> None:
        last = self.unanswered or self.task.chat.take_back()
        if last is None:
            self.task.screen.say("there is no message to answer again")
        else:
            self.answer(last)

    # ------------------------------------------------------------ answer
    def answer(self, text: str) -> None:
        """Send a message and show the answer. On a terminal, Ctrl-C stops only the answer."""
        task, screen = self.task, self.task.screen
        on_terminal = sys.stdin.isatty()
        self.unanswered = text
        try:
            steps = task.chat.chat(
                text,
                system=self.system,
                sampler=task.sampler,
                params=task.params,
                on_prompt=screen.prompt_progress,
            )
            self.unanswered = None
            if task.options.verbose_prompt:
                task.print_tokens(task.chat.session.prompt)
            finish = task.show(steps, stop=False)
        except KeyboardInterrupt:
            if task.options.single_turn or not on_terminal:
                raise
            self.was_interrupted = True
            screen.say("stopped; Ctrl-C again leaves")
            return
        except UserError as error:
            if not on_terminal:
                raise
            screen.warn(f"{error}\n/clear forgets the conversation")
            return
        if finish == FULL:
            screen.warn(
                "the context is full: /clear forgets the conversation; "
                "--ctx-size and --context-shift make more of it"
            )
