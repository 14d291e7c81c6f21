"""Prompts: from the command line, a file or stdin; escapes processed as llama.cpp does."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyggml.errors import UserError

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(r"((?:\\x[0-9A-Fa-f]{2})+)|\\([nrt'\"\\])")
BOM = "\ufeff"


def unescape(text: str, flag: str = "text") -> str:
    r"""Process \n \r \t \' \" \\ and \xHH, whose bytes are UTF-8; `flag` is named in errors."""

    def replace(match: re.Match[str]) -> str:
        if match[2]:
            return ESCAPES[match[2]]
        try:
            return bytes.fromhex(match[1].replace("\\x", "")).decode()
        except UnicodeDecodeError:
            raise UserError(f"{flag}: {match[1]} is not UTF-8; use --no-escape") from None

    return _ESCAPE.sub(replace, text)


def decode(raw: bytes, source: str) -> str:
    """UTF-8 text as every system writes it: no byte order mark, lines that end in \\n."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source}: not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}; "
            "convert the text, e.g. with iconv"
        ) from None
    return text.removeprefix(BOM).replace("\r\n", "\n")


def read_text(path: str, flag: str) -> str:
    """A UTF-8 file; `flag` is named if it cannot be read."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None
    return decode(raw, f"{flag} {path}")


def argument(values: Mapping[str, Any], target: str, flag: str) -> str:
    """The text of a flag."""
    text: str = values[target]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{flag}: not UTF-8 at character {error.start}; put the text into a file for -f"
        ) from None
    return unescape(text, flag) if values.get("escape", True) else text


def find_prompt(values: Mapping[str, Any], *, use_stdin: bool = True) -> str | None:
    """The prompt that was given; None if there is none."""
    if "prompt" in values and "file" in values:
        raise UserError("--prompt and --file contradict each other: give one of them")
    if "file" in values:
        text = read_text(values["file"], "--file").removesuffix("\n")
        return unescape(text, "--file") if values.get("escape", True) else text
    if "prompt" in values:
        return argument(values, "prompt", "--prompt")
    if use_stdin and not sys.stdin.isatty():
        return decode(sys.stdin.buffer.read(), "stdin") or None
    return None


def find_system(values: Mapping[str, Any]) -> str | None:
    """The system message that was given."""
    if "system" in values and "system_file" in values:
        raise UserError("--system-prompt and --system-prompt-file contradict each other")
    if "system_file" in values:
        return read_text(values["system_file"], "--system-prompt-file").removesuffix("\n")
    return argument(values, "system", "--system-prompt") if "system" in values else None
