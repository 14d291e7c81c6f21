"""Runs the command line as people do: as a process with pipes, or on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Result:
    """What a run in this process left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]  # flags, stdin=b"", typed=False

MODULE = [sys.executable, "-m", "pyggml"]
PATIENCE = 120.0  # seconds; kernels may have to be compiled
ERASED = re.compile(r"[^\n]*\r\x1b\[2K")  # lines that were drawn over
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\x07")

# what the child does before it becomes the program: let Ctrl-C of the terminal reach it
LAUNCHER = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables without those that flags and colours depend on."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_ARG_", "PYGGML_ARG_", "NO_COLOR", "PYTHONIOENCODING"))
    }
    return {**kept, **(changes or {})}


def run_cli(
    *args: str, stdin: bytes | None = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`pyllama cli ARGS` with pipes; `stdin` None closes it."""
    return subprocess.run(
        [*MODULE, "cli", *args],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env=environment(env),
        timeout=PATIENCE,
    )


class Terminal:
    """A program on a terminal of its own."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        size: tuple[int, int] = (24, 80),
        stdout: int | None = None,
    ) -> None:
        self.master, terminal = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *command],
            stdin=terminal,
            stdout=terminal if stdout is None else stdout,
            stderr=terminal,
            start_new_session=True,
            env={**environment(), "TERM": "xterm-256color", **(env or {})},
        )
        os.close(terminal)
        self.raw = ""  # everything that was shown
        self._seen = 0  # characters of `text` that were waited for

    @property
    def text(self) -> str:
        """What is left on the screen, without colours and cursor movements."""
        return ESCAPES.sub("", ERASED.sub("", self.raw)).replace("\r", "")

    def wait_for(self, wanted: str) -> str:
        """Read until a text (a regular expression) is shown; returns what came with it."""
        end = time.monotonic() + PATIENCE
        while True:
            text = self.text
            found = re.compile(wanted).search(text, self._seen)
            if found:
                start, self._seen = self._seen, found.end()
                return text[start : found.end()]
            if not self._read(end):
                raise AssertionError(f"waiting for {wanted!r}, the terminal shows:\n{text}")

    def _read(self, end: float) -> bool:
        """Read what there is; False at the end of the output or of the patience."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # Linux: all ends on the other side are closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def rest(self) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)
