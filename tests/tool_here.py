"""Runs a tool in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cli_process import Result

from pyggml.tools.main import run_tool

Tool = Callable[..., Result]  # arguments, any that str() understands


def tool_with(capsys: pytest.CaptureFixture[str], name: str = "gguf") -> Tool:
    """What pyllama-NAME prints, and its exit code."""

    def start(*args: object) -> Result:
        code = 0
        try:
            run_tool(name, [str(arg) for arg in args])
        except SystemExit as left:
            code = int(left.code or 0)
        return Result(code, *capsys.readouterr())

    return start
