"""What is written to a terminal and in which order, on streams that pretend to be one."""

import io
from typing import Any

import pytest

from pyggml import registry
from pyggml.tools.ui import CLEAR_LINE, DIM, GREEN, RESET, Screen, compiling_shown, size


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """One terminal for the answer and for the rest."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Tty()


def test_a_line_does_not_stick_to_an_unfinished_answer(terminal: Tty) -> None:
    screen = Screen("off", terminal, terminal)
    screen.write("The answer")
    screen.say("a note")
    screen.write("goes on\n")
    screen.say("the end")
    assert terminal.getvalue() == "The answer\na note\ngoes on\nthe end\n"


def test_an_answer_in_a_pipe_stays_as_it_is() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen("auto", err, out)
    screen.write("The \x1b[31manswer\r")
    screen.say("a note")
    screen.progress("loading", 0.5)
    screen.status("busy")
    screen.end_line()
    screen.end_line()
    assert out.getvalue() == "The \x1b[31manswer\r\n"
    assert err.getvalue() == "a note\n"


def test_progress_is_drawn_over_and_removed(terminal: Tty) -> None:
    screen = Screen("off", terminal, terminal)
    screen.progress("loading", 0.0)
    screen.progress("loading", 0.001)  # too soon to be drawn
    screen.status("warming up")
    screen.progress("loading", 1.0, "done")
    screen.write("text")
    lines = terminal.getvalue().split(CLEAR_LINE)
    assert lines == [
        "",
        "loading " + 30 * "░" + "   0% ",
        "warming up",
        "loading " + 30 * "█" + " 100% done",
        "text",
    ]


def test_progress_never_wipes_out_the_answer(terminal: Tty) -> None:
    screen = Screen("off", terminal, terminal)
    screen.write("half a line")
    screen.progress("loading", 0.5)
    screen.compiling(0, 3, "")
    screen.prompt_progress(64, 128)
    screen.status("busy")
    assert terminal.getvalue() == "half a line"


def test_short_prompts_have_no_progress(terminal: Tty) -> None:
    screen = Screen("off", terminal, terminal)
    screen.prompt_progress(0, 32)
    assert terminal.getvalue() == ""
    screen.prompt_progress(0, 33)
    assert "reading the prompt" in terminal.getvalue()


def test_compiling_is_announced_without_a_terminal() -> None:
    err = io.StringIO()
    screen = Screen("auto", err)
    for done in range(4):
        screen.compiling(done, 3, "kernel")
    assert err.getvalue() == "compiling kernels for this CPU (once): 3\n"


def test_compiling_ends_without_a_trace_on_a_terminal(terminal: Tty) -> None:
    screen = Screen("off", terminal, terminal)
    for done in range(4):
        screen.compiling(done, 3, "kernel")
    assert terminal.getvalue().split(CLEAR_LINE)[-1] == ""
    assert "100% kernel" in terminal.getvalue()


def test_colours(terminal: Tty) -> None:
    screen = Screen("auto", terminal, terminal)
    screen.write_prompt("Hello")
    screen.say("\nnote")
    assert terminal.getvalue() == f"{GREEN}Hello{RESET}\n{DIM}\nnote{RESET}\n"


@pytest.mark.parametrize(
    ("verbosity", "shown"), [(0, ""), (1, ""), (2, "warning: b\n"), (3, "a\nwarning: b\n")]
)
def test_verbosity(verbosity: int, shown: str) -> None:
    err = io.StringIO()
    screen = Screen("auto", err, verbosity=verbosity)
    screen.say("a")
    screen.warn("b")
    assert err.getvalue() == shown


def test_quiet_terminals_have_no_progress(terminal: Tty) -> None:
    Screen("off", terminal, terminal, verbosity=2).progress("loading", 0.5)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 31, "6.00 GiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_devices_forget_a_screen_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        progress: Any = None

        def watch_compiling(self, progress: Any) -> None:
            self.progress = progress

    device, screen = Device(), Screen(err=io.StringIO())
    monkeypatch.setattr(registry, "devices", lambda: [device])
    with pytest.raises(KeyboardInterrupt), compiling_shown(screen):
        assert device.progress == screen.compiling
        raise KeyboardInterrupt
    assert device.progress is None
