"""What a person sees beside the answer: all of it on stderr, colours only on a terminal."""

import os
import shutil
import sys
import time
from typing import IO

DIM, GREEN, YELLOW, RESET = "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[2K"
REDRAW_SECONDS = 0.05
LONG_PROMPT = 256  # tokens


class Screen:
    """Writes to the terminal, or plainly if there is none."""

    def __init__(self, color: str = "auto", err: IO[str] | None = None) -> None:
        self.err = err or sys.stderr
        self.is_terminal = self.err.isatty()
        self.answer_is_terminal = sys.stdout.isatty()
        # https://no-color.org: any non-empty value means no
        wanted = self.is_terminal and not os.environ.get("NO_COLOR")
        self.has_color = wanted if color == "auto" else color == "on"
        self._drawn = 0.0

    def paint(self, text: str, color: str) -> str:
        return f"{color}{text}{RESET}" if self.has_color else text

    def say(self, text: str, color: str = DIM) -> None:
        """One line for the person."""
        self.clear_progress()
        print(self.paint(text, color), file=self.err, flush=True)

    # ------------------------------------------------------------ answer
    def write(self, text: str) -> None:
        """Part of the answer, to stdout."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def write_prompt(self, text: str) -> None:
        """Text of the user repeated before the answer, to stdout."""
        colored = self.has_color and self.answer_is_terminal
        self.write(f"{GREEN}{text}{RESET}" if colored else text)

    # ------------------------------------------------------------ progress
    def progress(self, what: str, share: float, detail: str = "") -> None:
        """Redraw the progress line; nothing without a terminal."""
        now = time.monotonic()
        if not self.is_terminal or (share < 1 and now - self._drawn < REDRAW_SECONDS):
            return
        self._drawn = now
        width = min(30, shutil.get_terminal_size().columns - len(what) - len(detail) - 12)
        bar = ""
        if width > 4:
            full = round(share * width)
            bar = "█" * full + "░" * (width - full) + " "
        line = f"{what} {bar}{share:4.0%} {detail}"
        self.err.write(CLEAR_LINE + self.paint(line, DIM))
        self.err.flush()

    def compiling(self, done: int, total: int, name: str) -> None:
        """Progress of kernels, which are compiled once per machine."""
        if not self.is_terminal and done in (0, total):
            # without a terminal: a line at the start and one at the end
            print(f"compiling kernels for this CPU: {done}/{total}", file=self.err, flush=True)
        self.progress("compiling kernels for this CPU (once)", done / total, name)
        if done == total:
            self.clear_progress()

    def prompt_progress(self, done: int, total: int) -> None:
        """Progress of a long prompt."""
        if total > LONG_PROMPT:
            self.progress("reading the prompt", done / total, f"{done}/{total} tokens")

    def clear_progress(self) -> None:
        """Remove the progress line."""
        if self.is_terminal and self._drawn:
            self.err.write(CLEAR_LINE)
            self.err.flush()
            self._drawn = 0.0


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
