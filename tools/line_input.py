"""Messages of a chat: edited on a terminal, else lines of stdin."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

from pyggml.errors import UserError
from pyggml.tools.settings import Options
from pyggml.tools.ui import GREEN, Screen

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import Output

COMMANDS = ("/help", "/clear", "/regen", "/exit")
PROMPT = "> "


class Reader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """The next message. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""


def make_reader(options: Options, screen: Screen) -> Reader:
    """Line editing if there is a terminal that can do it."""
    can_edit = sys.stdin.isatty() and screen.is_terminal and os.environ.get("TERM") != "dumb"
    if can_edit and not options.simple_io:
        return EditedLines(screen, multiline=options.multiline)
    return PlainLines(screen, multiline=options.multiline)


class PlainLines:
    """Lines of stdin, joined by a final backslash, or with `multiline` ended by one."""

    def __init__(self, screen: Screen, *, multiline: bool) -> None:
        self.screen = screen
        self.multiline = multiline

    def read(self) -> str:
        if sys.stdin.isatty():
            self.screen.err.write(self.screen.paint(PROMPT, GREEN))
            self.screen.err.flush()
        lines: list[str] = []
        while True:
            raw = sys.stdin.buffer.readline()
            if not raw and not lines:
                raise EOFError
            line = _decode(raw).rstrip("\r\n")
            ends = line.endswith("\\")
            lines.append(line.removesuffix("\\"))
            if ends == self.multiline or not raw:
                return "\n".join(lines)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"stdin: not UTF-8: byte {error.start} of a line is 0x{raw[error.start]:02x}"
        ) from None


class EditedLines:
    """Lines with history, pasting of several lines, and completion of commands."""

    def __init__(self, screen: Screen, *, multiline: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.shortcuts import CompleteStyle

        self.screen = screen
        self._session: PromptSession[str] = PromptSession(
            [("ansigreen" if screen.has_color else "", PROMPT)],
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(multiline=multiline),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            output=_output(screen),
        )

    def read(self) -> str:
        return self._session.prompt()


def _output(screen: Screen) -> Output:
    """Prompts go to stderr: stdout is for answers."""
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = create_output(screen.err)
    if isinstance(output, Vt100_Output):
        # asking where the cursor is helps only menus, and some terminals never answer
        output.enable_cpr = False
    return output


def _keys(*, multiline: bool) -> KeyBindings:
    """Enter sends, Alt-Enter begins a line; with `multiline` the other way round.

    After a backslash Enter does the other thing too, and Ctrl-C first clears what was typed.
    """
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def enter(event: KeyPressEvent, *, sends: bool) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            sends = not sends
        if sends:
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        enter(event, sends=not multiline)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        enter(event, sends=multiline)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return keys
