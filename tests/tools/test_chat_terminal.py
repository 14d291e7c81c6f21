"""pyllama-cli on a terminal: what a person sees and types."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import MODULE, Terminal

PROMPT = r"(?m)^> $"
STATS = r"context \d+/\d+ \]\n"
GREEN, DIM = "\x1b[32m", "\x1b[2m"
BARS = re.compile(r"loading [█░]* *\d+%")


@pytest.fixture
def command(tiny_models: dict[str, str]) -> list[str]:
    """A chat whose answers have four tokens."""
    return [*MODULE, "cli", "-m", tiny_models["llama"], "-n", "4", "--temp", "0", "--ignore-eos"]


@pytest.fixture
def chat(command: list[str]) -> Iterator[Terminal]:
    with Terminal(command) as terminal:
        terminal.wait_for(PROMPT)
        yield terminal


def answer(terminal: Terminal, message: str) -> str:
    """Send a line; what is shown until the next prompt."""
    terminal.send(f"{message}\r")
    shown = terminal.wait_for(STATS)
    terminal.wait_for(PROMPT)
    return shown


def messages(shown: str) -> list[str]:
    """The texts between the control tokens that --verbose-prompt lists."""
    pieces = re.findall(r"^ *\d+ -> '(.*?)'$", shown, re.MULTILINE | re.DOTALL)
    whole = "".join(pieces)
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", whole, re.DOTALL)


# ---------------------------------------------------------------- what is seen
def test_the_model_with_a_template_chats(chat: Terminal) -> None:
    head, about, blank, prompt = chat.text.splitlines()[-4:]
    assert re.search(r"llama · llama 331K .* · 1\.3 MiB · loaded in \d+\.\d\d s$", head)
    assert about.endswith("context of 4096 tokens · /help lists the commands; Ctrl-D leaves")
    assert (blank, prompt) == ("", "> ")
    assert BARS.search(chat.raw) and "warming up" in chat.raw
    assert not BARS.search(chat.text) and "warming up" not in chat.text
    shown = answer(chat, "Hello")
    assert re.search(
        r"\[ prompt 18, [\d.]+ t/s \| generated 4 tokens, .* \| context 21/4096 \]", shown
    )
    assert "+ 21 reused" in answer(chat, "Hello")
    chat.send("\x04")
    assert chat.rest() == 0


@pytest.mark.parametrize(
    ("env", "flags", "colored"),
    [
        ({"NO_COLOR": "1"}, (), False),
        ({"TERM": "dumb"}, (), False),
        ({}, ("-co", "off"), False),
        ({"NO_COLOR": "1"}, ("--color", "on"), True),
    ],
)
def test_colours_can_be_turned_off(
    env: dict[str, str], flags: tuple[str, ...], colored: bool, command: list[str]
) -> None:
    with Terminal([*command, *flags, "-p", "Hello", "-no-cnv"], env) as terminal:
        assert terminal.rest() == 0
        assert (GREEN in terminal.raw and DIM in terminal.raw) == colored
        if "TERM" in env:
            assert "\x1b" not in terminal.raw


def test_a_completion_on_a_terminal(command: list[str]) -> None:
    with Terminal([*command, "-p", "Hello 日本 👩\u200d👧", "-no-cnv"]) as terminal:
        assert terminal.rest() == 0
        assert f"{GREEN}Hello 日本 👩\u200d👧\x1b[0m" in terminal.raw
        assert re.search(r"^Hello 日本 👩\u200d👧.+\n\[ prompt \d+, ", terminal.text, re.M | re.S)


def test_a_long_prompt_shows_its_progress(command: list[str]) -> None:
    words = "Hello, " * 300
    flags = ["-p", words, "-no-cnv", "-ub", "64", "-n", "1"]
    with Terminal([*command, *flags]) as terminal:
        assert terminal.rest() == 0
        assert re.search(r"reading the prompt [█░]+ *\d+% \d+/\d+ tokens", terminal.raw)
        assert "reading" not in terminal.text and words in terminal.text.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "error: there is no prompt: give one with -p, with -f or on stdin, or chat (-cnv)"),
        (("-cnv",), "warning: the model has no chat template: ChatML is used (--chat-template)"),
    ],
)
def test_a_model_without_a_template(
    flags: tuple[str, ...],
    said: str,
    command: list[str],
    tiny_models: dict[str, str],
    tmp_path: Path,
) -> None:
    raw = Path(tiny_models["llama"]).read_bytes()
    path = tmp_path / "model"
    path.write_bytes(raw.replace(b"tokenizer.chat_template", b"tokenizer.chat_tomplete"))
    with Terminal([*command, "-m", str(path), *flags]) as terminal:
        terminal.wait_for(re.escape(said))
        if flags:
            terminal.wait_for(PROMPT)
            terminal.send("\x04")
        assert terminal.rest() == (0 if flags else 1)


def test_a_narrow_terminal_is_not_overrun(command: list[str]) -> None:
    with Terminal([*command, "-p", "Hello", "-no-cnv"], size=(24, 20)) as terminal:
        assert terminal.rest() == 0
        drawn = re.findall(r"\x1b\[2K\x1b\[2m([^\x1b]*)\x1b\[0m(?!\r\n)", terminal.raw)
        assert drawn and max(map(len, drawn)) < 20


def test_control_characters_of_an_answer_are_shown(command: list[str]) -> None:
    with Terminal([*command, "-p", r"a\x1b[31mb\x07\tc", "-no-cnv", "-n", "0"]) as terminal:
        assert terminal.rest() == 0
        assert "a␛[31mb␇\tc" in terminal.raw


def test_the_answer_goes_to_a_file_and_the_rest_to_the_terminal(
    command: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with path.open("wb") as out, Terminal(command, stdout=out.fileno()) as terminal:
        terminal.wait_for(PROMPT)
        answer(terminal, "Hello")
        terminal.send("\x04")
        assert terminal.rest() == 0
    expected = subprocess.run(
        [*command, "-cnv", "-st", "-p", "Hello"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert path.read_bytes() == expected.stdout


# ---------------------------------------------------------------- what is typed
def test_commands(chat: Terminal) -> None:
    chat.send("/help\r")
    assert {"/clear", "/regen", "/exit"} <= set(chat.wait_for("a second one leaves").split())
    chat.send("/regen\r")
    chat.wait_for("there is no message to answer again")
    first = answer(chat, "Hello")
    assert "prompt 1 + 17 reused" in answer(chat, "/regen")
    chat.send("/clear\r")
    chat.wait_for("forgotten")
    again = answer(chat, "Hello")
    assert ("prompt 18," in again) == ("prompt 18," in first) == True  # noqa: E712
    chat.send("/bye\r")
    chat.wait_for("there is no command /bye: /help, /clear, /regen, /exit")
    chat.send("/exit\r")
    assert chat.rest() == 0


def test_messages_of_several_lines(command: list[str]) -> None:
    with Terminal([*command, "--verbose-prompt"]) as terminal:
        terminal.wait_for(PROMPT)
        # a backslash before Enter, Alt-Enter, pasted lines
        terminal.send("one\\\rtwo\x1b\rthree ")
        terminal.send("\x1b[200~four\r\nfive\x1b[201~\r")
        assert messages(terminal.wait_for(STATS)) == ["one\ntwo\nthree four\nfive"]
        terminal.wait_for(PROMPT)
        assert messages(answer(terminal, "/etc/passwd"))[-1] == "/etc/passwd"
        terminal.send("\x1b[A\x1b[A")  # history
        assert messages(answer(terminal, "!"))[-1] == "one\ntwo\nthree four\nfive!"


def test_multiline_input(command: list[str]) -> None:
    with Terminal([*command, "--verbose-prompt", "-mli"]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("one\rtwo\\\r")
        assert messages(terminal.wait_for(STATS)) == ["one\ntwo"]
        terminal.wait_for(PROMPT)
        terminal.send("three\rfour\x1b\r")
        assert messages(terminal.wait_for(STATS))[-1] == "three\nfour"


@pytest.mark.parametrize(("env", "flags"), [({"TERM": "dumb"}, ()), ({}, ("--simple-io",))])
def test_lines_without_editing(
    env: dict[str, str], flags: tuple[str, ...], command: list[str]
) -> None:
    with Terminal([*command, "--verbose-prompt", *flags], env) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("one\\\ntwo\n")
        assert messages(terminal.wait_for(STATS)) == ["one\ntwo"]
        terminal.wait_for(PROMPT)
        terminal.send("\x03")
        terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves")
        terminal.wait_for(PROMPT)
        terminal.send("\x04")
        assert terminal.rest() == 0


def test_the_first_message_may_come_from_the_command_line(command: list[str]) -> None:
    with Terminal([*command, "-p", "Hello"]) as terminal:
        terminal.wait_for("> Hello\n")
        assert "prompt 18," in terminal.wait_for(STATS)
        terminal.wait_for(PROMPT)
        assert "+ 21 reused" in answer(terminal, "Hello")
    with Terminal([*command, "-p", "Hello", "-st"]) as terminal:
        assert terminal.rest() == 0 and terminal.text.count("[ prompt") == 1


# ---------------------------------------------------------------- Ctrl-C and a full context
def test_ctrl_c_at_the_prompt(chat: Terminal) -> None:
    chat.send("half a message\x03")  # only clears the line
    chat.send("\x03")
    chat.wait_for("Ctrl-C again, or Ctrl-D, leaves")
    chat.wait_for(PROMPT)
    assert "prompt 18," in answer(chat, "Hello")  # which makes the next one the first again
    chat.send("\x03")
    chat.wait_for("Ctrl-C again, or Ctrl-D, leaves")
    chat.wait_for(PROMPT)
    chat.send("\x03")
    assert chat.rest() == 130


def numbers(stats: str) -> tuple[int, int, int, int]:
    """Prompt tokens computed and reused, generated ones, all in the context."""
    found = re.search(r"prompt (\d+)(?: \+ (\d+) reused)?.* generated (\d+) .*context (\d+)", stats)
    assert found, stats
    computed, reused, generated, total = (int(number or 0) for number in found.groups())
    return computed, reused, generated, total


def test_ctrl_c_stops_an_answer_and_keeps_it(smollm2: Path) -> None:
    flags = ["-m", str(smollm2), "--ignore-eos", "--temp", "0", "-c", "1024"]
    with Terminal([*MODULE, "cli", *flags]) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("Tell me a story.\r")
        terminal.wait_for("a story.\n[^█░]{40}")
        terminal.send("\x03")
        _, _, generated, total = numbers(terminal.wait_for(STATS))
        assert generated > 5
        terminal.wait_for("stopped; Ctrl-C again leaves")
        terminal.wait_for(PROMPT)

        terminal.send("Go on.\r")
        terminal.wait_for("Go on.\n[^█░]{40}")
        terminal.send("\x03")
        _, reused, _, _ = numbers(terminal.wait_for(STATS))
        assert reused >= total - 2  # the partial answer is part of the conversation
        terminal.wait_for(PROMPT)

        terminal.send("/regen\r")
        terminal.wait_for("/regen\n[^█░]{40}")
        terminal.send("\x03")
        computed, again, _, _ = numbers(terminal.wait_for(STATS))
        assert computed == 1 and again > reused
        terminal.wait_for(PROMPT)
        terminal.send("\x03")
        assert terminal.rest() == 130


def test_a_full_context(tiny_models: dict[str, str]) -> None:
    flags = ["-m", tiny_models["llama"], "-s", "1", "--ignore-eos", "-c", "256"]
    with Terminal([*MODULE, "cli", *flags]) as terminal:
        terminal.wait_for(PROMPT)
        assert "context 256/256 ]" in answer(terminal, "Hello")
        assert "the context is full: /clear forgets the conversation" in terminal.text
        terminal.send("Hello?\r")
        terminal.wait_for("warning: the prompt is too long: .*\n/clear forgets the conversation")
        terminal.wait_for(PROMPT)
        terminal.send("/clear\r")
        terminal.wait_for("forgotten")
        terminal.wait_for(PROMPT)
        assert "prompt 18," in answer(terminal, "Hello")
