"""What a person sees beside the answer: all of it on stderr, colours only on a terminal."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from pyggml import registry

DIM, GREEN, YELLOW, RESET = "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[2K"
REDRAW_SECONDS = 0.05
LONG_PROMPT = 32  # tokens
DETAIL_WIDTH = 24
# On a terminal, control characters of a model's answer are shown instead of obeyed.
VISIBLE: dict[int, int | str | None] = {
    **{code: 0x2400 + code for code in range(32)},
    **dict.fromkeys(range(127, 160), 0xFFFD),
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}

log = logging.getLogger("pyggml.tools")


class Screen:
    """Writes to the terminal, or plainly if there is none.

    `verbosity` is llama.cpp's: 1 errors, 2 also warnings, 3 also what is going on.
    """

    def __init__(
        self,
        color: str = "auto",
        err: TextIO | None = None,
        out: TextIO | None = None,
        *,
        verbosity: int = 3,
    ) -> None:
        self.err = err or sys.stderr
        self.out = out or sys.stdout
        self.verbosity = verbosity
        self.is_terminal = self.err.isatty()
        self.answer_is_terminal = self.out.isatty()
        obeys_codes = os.environ.get("TERM") != "dumb"
        # https://no-color.org: any non-empty value means no
        may_color = obeys_codes and not os.environ.get("NO_COLOR")
        self.has_color = _wanted(color, self.is_terminal and may_color)
        self.answer_has_color = _wanted(color, self.answer_is_terminal and may_color)
        self.can_redraw = self.is_terminal and obeys_codes and verbosity >= 3
        self._drawn = 0.0
        self._in_line = False  # the answer has not ended its line
        self._what = ""

    def paint(self, text: str, color: str) -> str:
        return f"{color}{text}{RESET}" if self.has_color else text

    def say(self, text: str, color: str = DIM) -> None:
        """A line for the person; nothing if only warnings are wanted."""
        self._line(text, color, 3, logging.INFO)

    def warn(self, text: str) -> None:
        """A line that should not be missed."""
        self._line(f"warning: {text}", YELLOW, 2, logging.WARNING)

    def _line(self, text: str, color: str, verbosity: int, level: int) -> None:
        log.log(level, text, extra={"shown": True})
        if self.verbosity >= verbosity:
            self.make_room()
            print(self.paint(text, color), file=self.err, flush=True)

    def make_room(self) -> None:
        """Let the next text on stderr start in a line of its own."""
        self.clear_progress()
        if self._in_line and self.is_terminal and self.answer_is_terminal:
            self.end_line()

    # ------------------------------------------------------------ answer
    def write(self, text: str) -> None:
        """Part of the answer, to stdout."""
        if not text:
            return
        self.clear_progress()
        self.out.write(text.translate(VISIBLE) if self.answer_is_terminal else text)
        self.out.flush()
        self._in_line = not text.endswith("\n")

    def write_prompt(self, text: str) -> None:
        """Text of the user repeated before the answer, to stdout."""
        if self.answer_has_color:
            self.out.write(GREEN)
        self.write(text)
        if self.answer_has_color:
            self.out.write(RESET)
            self.out.flush()

    def end_line(self) -> None:
        """End the answer's last line, unless it has ended."""
        if self._in_line:
            self.write("\n")

    # ------------------------------------------------------------ progress
    def progress(self, what: str, share: float, detail: str = "") -> None:
        """Redraw the progress line; nothing without a terminal."""
        now = time.monotonic()
        is_news = share == 1 or what != self._what or now - self._drawn >= REDRAW_SECONDS
        if not self.can_redraw or not is_news:
            return
        self._what = what
        # the same width whatever the detail, so that the bar stands still
        width = min(30, self._columns() - len(what) - DETAIL_WIDTH - 8)
        bar = ""
        if width > 4:
            full = round(share * width)
            bar = "█" * full + "░" * (width - full) + " "
        self._draw(f"{what} {bar}{share:4.0%} {detail}", now)

    def status(self, text: str) -> None:
        """What is going on, until something else is written; nothing without a terminal."""
        if self.can_redraw:
            self._draw(text, time.monotonic())

    def _draw(self, line: str, now: float) -> None:
        if self._in_line and self.answer_is_terminal:
            return  # it would wipe out the end of the answer
        self._drawn = now
        self.err.write(CLEAR_LINE + self.paint(line[: self._columns() - 1], DIM))
        self.err.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.err.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def compiling(self, done: int, total: int, name: str) -> None:
        """Progress of kernels, which are compiled once per machine."""
        if done == 0 and not self.can_redraw:
            self.say(f"compiling kernels for this CPU (once): {total}")
        self.progress("compiling kernels (once)", done / total, name)
        if done == total:
            self.clear_progress()

    def prompt_progress(self, done: int, total: int) -> None:
        """Progress of a prompt that may take a while."""
        if total > LONG_PROMPT:
            self.progress("reading the prompt", done / total, f"{done}/{total} tokens")

    def clear_progress(self) -> None:
        """Remove the progress line."""
        if self._drawn:
            self._drawn = 0.0
            self.err.write(CLEAR_LINE)
            self.err.flush()


def _wanted(color: str, automatic: bool) -> bool:
    return automatic if color == "auto" else color == "on"


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


@contextmanager
def compiling_shown(screen: Screen) -> Iterator[None]:
    """While it lasts, the screen shows what is compiled; devices outlive the screen."""
    for device in registry.devices():
        device.watch_compiling(screen.compiling)
    try:
        yield
    finally:
        for device in registry.devices():
            device.watch_compiling(None)
        screen.clear_progress()
