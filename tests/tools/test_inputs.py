"""Prompts from flags, files and stdin, and their escapes."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import UserError
from pyggml.tools.inputs import find_prompt, find_system, unescape


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes, perhaps typed on a terminal."""

    def __init__(self, raw: bytes, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(raw: bytes, *, terminal: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", Stdin(raw, terminal=terminal))

    put(b"", terminal=True)
    return put


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\rd", "a\nb\tc\rd"),
        (r"\'\"\\", "'\"\\"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"\x41\x42", "AB"),
        (r"\xe4\xbd\xa0!", "你!"),
        (r"\x4", r"\x4"),
        (r"\q \0 \x", r"\q \0 \x"),
        ("ends in \\", "ends in \\"),
    ],
)
def test_escapes(text: str, expected: str) -> None:
    assert unescape(text) == expected


def test_escaped_bytes_must_be_utf8() -> None:
    with pytest.raises(UserError, match=r"--prompt: \\xe4\\xbd is not UTF-8; use --no-escape"):
        unescape(r"a\xe4\xbd", "--prompt")


# ---------------------------------------------------------------- where a prompt comes from
def test_a_prompt_from_the_command_line(stdin: Any) -> None:
    stdin(b"not this")
    assert find_prompt({"prompt": r"a\nb"}) == "a\nb"
    assert find_prompt({"prompt": r"a\nb", "escape": False}) == r"a\nb"
    assert find_prompt({"prompt": ""}) == ""


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"one\n", "one"),
        (b"one\n\n", "one\n"),
        (b"one\r\ntwo\r\n", "one\ntwo"),
        (b"\xef\xbb\xbfone", "one"),
        (b"a\\nb", "a\nb"),
        ("äöü 你 😀".encode(), "äöü 你 😀"),
        (b"", ""),
        (b"a\rb\n", "a\rb"),
    ],
)
def test_a_prompt_from_a_file(raw: bytes, expected: str, tmp_path: Path, stdin: Any) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(raw)
    assert find_prompt({"file": str(path)}) == expected


def test_a_prompt_from_stdin(stdin: Any) -> None:
    stdin(b"line 1\r\nprint('\\n')\n")
    assert find_prompt({}) == "line 1\nprint('\\n')\n"
    stdin(b"line")
    assert find_prompt({}, use_stdin=False) is None


def test_no_prompt(stdin: Any) -> None:
    assert find_prompt({}) is None
    stdin(b"")
    assert find_prompt({}) is None


def test_a_system_message(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_bytes(b"Be\\nkind\r\n")
    assert find_system({}) is None
    assert find_system({"system": r"Be\nkind"}) == "Be\nkind"
    assert find_system({"system": r"Be\nkind", "escape": False}) == r"Be\nkind"
    assert find_system({"system_file": str(path)}) == "Be\\nkind"


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": "a", "file": "b"}, "--prompt and --file contradict each other"),
        ({"file": "{tmp}/none"}, "--file {tmp}/none: no such file or directory"),
        ({"file": "{tmp}"}, "--file {tmp}: is a directory"),
        ({"file": "{tmp}/bad"}, "--file {tmp}/bad: not UTF-8: byte 2 is 0xff; convert"),
        ({"prompt": "a\udcff"}, "--prompt: not UTF-8 at character 1"),
        ({}, "stdin: not UTF-8: byte 3 is 0xfe"),
    ],
)
def test_mistakes_name_their_source(
    values: dict[str, str], said: str, tmp_path: Path, stdin: Any
) -> None:
    (tmp_path / "bad").write_bytes(b"ab\xff")
    stdin(b"abc\xfe")
    with pytest.raises(UserError) as error:
        find_prompt({key: text.replace("{tmp}", str(tmp_path)) for key, text in values.items()})
    assert said.replace("{tmp}", str(tmp_path)) in str(error.value)


def test_two_system_messages_contradict() -> None:
    with pytest.raises(UserError, match="--system-prompt and --system-prompt-file contradict"):
        find_system({"system": "a", "system_file": "b"})
