"""Chat on a terminal, or one turn of it anywhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from pyggml.errors import UserError
from pyggml.llama.api import Chat, Llama
from pyggml.llama.sampling import Sampler
from pyggml.llama.session import GenerateParams
from pyggml.tools.completion import print_tokens, stats, warn_if_full
from pyggml.tools.settings import Options
from pyggml.tools.ui import GREEN, Screen

HELP = r"""commands:
  /help    this list
  /clear   forget the conversation
  /regen   answer the last message again
  /exit    leave (or Ctrl-D)
a line that ends in \ goes on in the next one; Ctrl-C stops an answer, a second one leaves"""


def run(
    llama: Llama,
    chat: Chat,
    sampler: Sampler,
    params: GenerateParams,
    options: Options,
    screen: Screen,
    first: str | None,
    system: str | None,
) -> None:
    """Talk until the person leaves; with --single-turn until the first answer."""
    if options.single_turn and first is None and not sys.stdin.isatty():
        raise UserError("--single-turn without a terminal needs a message: give one with -p")
    talk = Talk(llama, chat, sampler, params, options, screen, system)
    if first is not None:
        talk.say(first)
    if options.single_turn and first is not None:
        return
    if screen.is_terminal:
        screen.say("/help lists the commands; Ctrl-D leaves")
    for message in talk.messages():
        talk.say(message)
        if options.single_turn:
            return


class Talk:
    """The state of one chat on the terminal."""

    def __init__(
        self,
        llama: Llama,
        chat: Chat,
        sampler: Sampler,
        params: GenerateParams,
        options: Options,
        screen: Screen,
        system: str | None,
    ) -> None:
        self.llama = llama
        self.chat = chat
        self.sampler = sampler
        self.params = params
        self.options = options
        self.screen = screen
        self.system = system
        self.interrupted = False
        with contextlib.suppress(ImportError):
            # line editing and history for input()
            import readline  # noqa: F401

    # ------------------------------------------------------------ input
    def messages(self) -> Iterator[str]:
        """What the person types, commands carried out."""
        while True:
            try:
                text = self._read()
            except EOFError:
                self.screen.write("\n")
                return
            except KeyboardInterrupt:
                self.screen.write("\n")
                if self.interrupted or not sys.stdin.isatty():
                    return
                self.interrupted = True
                self.screen.say("Ctrl-C again, or Ctrl-D, leaves")
                continue
            self.interrupted = False
            command = text.strip()
            if command == "/exit":
                return
            if command.startswith("/") and self._command(command):
                continue
            if command:
                yield text

    def _read(self) -> str:
        """A message: lines joined by a final backslash, or with --multiline-input ended by one."""
        prompt = self.screen.paint("> ", GREEN) if sys.stdin.isatty() else ""
        lines: list[str] = []
        while True:
            line = input(prompt if not lines else "")
            ends = line.endswith("\\")
            lines.append(line.removesuffix("\\"))
            if ends == self.options.multiline:
                return "\n".join(lines)

    def _command(self, text: str) -> bool:
        """Carry out a command; False if it is none."""
        commands = {"/help": self._help, "/clear": self._clear, "/regen": self._regenerate}
        if text not in commands:
            near = ", ".join([*commands, "/exit"])
            self.screen.say(f"no command is called {text.split()[0]!r}: {near}")
            return True
        commands[text]()
        return True

    def _help(self) -> None:
        self.screen.say(HELP)

    def _clear(self) -> None:
        self.chat.clear()
        self.sampler.reset()
        self.screen.say("forgotten")

    def _regenerate(self) -> None:
        last = self.chat.take_back()
        if last is None:
            self.screen.say("there is no message to answer again")
        else:
            self.say(last)

    # ------------------------------------------------------------ answer
    def say(self, text: str) -> None:
        """Send a message and show the answer."""
        finish = None
        try:
            steps = self.chat.chat(
                text,
                system=self.system,
                sampler=self.sampler,
                params=self.params,
                on_prompt=self.screen.prompt_progress,
            )
            if self.options.verbose_prompt:
                print_tokens(self.llama, self.chat.session.prompt, self.screen)
            self.screen.clear_progress()
            for step in steps:
                self.screen.write(step.text)
                finish = step.finish
        except KeyboardInterrupt:
            if self.options.single_turn or not sys.stdin.isatty():
                raise
            self.interrupted = True
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            self.screen.say(f"error: {error}")
            return
        self.screen.write("\n")
        if self.options.perf:
            self.screen.say(stats(self.chat.timings))
        warn_if_full(finish, self.screen)
