"""Prompts: from the command line, a file or stdin; escapes processed as llama.cpp does."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyggml.errors import UserError

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])")


def unescape(text: str) -> str:
    r"""Process \n \r \t \' \" \\ and \xHH."""

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if code[0] == "x" else ESCAPES[code]

    return _ESCAPE.sub(replace, text)


def read_text(path: str, flag: str) -> str:
    """A UTF-8 file; `flag` is named if it cannot be read."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None


def read_stdin() -> str:
    """All of stdin."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"stdin is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; "
            "convert the text, e.g. with iconv"
        ) from None


def find_prompt(values: Mapping[str, Any]) -> str | None:
    """The prompt that was given; None if there is none."""
    if "prompt" in values and "file" in values:
        raise UserError("--prompt and --file contradict each other: give one of them")
    if "file" in values:
        text = read_text(values["file"], "--file").removesuffix("\n")
    elif "prompt" in values:
        text = values["prompt"]
    elif not sys.stdin.isatty():
        return read_stdin() or None
    else:
        return None
    return unescape(text) if values.get("escape", True) else text


def find_system(values: Mapping[str, Any]) -> str | None:
    """The system message that was given."""
    if "system" in values and "system_file" in values:
        raise UserError("--system-prompt and --system-prompt-file contradict each other")
    if "system_file" in values:
        return read_text(values["system_file"], "--system-prompt-file").removesuffix("\n")
    text = values.get("system")
    return unescape(text) if text and values.get("escape", True) else text
