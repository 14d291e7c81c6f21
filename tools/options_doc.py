"""Writes docs/cli.md from the flag tables: `python -m pyggml.tools.options_doc docs/cli.md`."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pyggml.tools import environment
from pyggml.tools.flag import Flag
from pyggml.tools.flags import rows
from pyggml.tools.main import TOOLS, Tool
from pyggml.tools.options import ALWAYS

INTRODUCTION = """\
# Command line

Made by `python -m pyggml.tools.options_doc docs/cli.md` from the flag tables: do not edit.

Names, defaults and meanings are llama.cpp's. In long names `_` and `-` are the same. A flag that
is given twice counts once, the last time, unless it is marked "repeatable". The answer goes to
stdout, everything else to stderr. Exit codes: 0, 1 for a mistake in a value or a file, 2 for a
mistake in the usage, 130 after Ctrl-C.

The environment variables of the last column can also be spelled `PYGGML_ARG_...`, which is
stronger; the command line is stronger than both. Switches understand `1`, `on`, `true`, `enabled`
and `0`, `off`, `false`, `disabled`; a switch with a `--no-` spelling can also be turned off by
`LLAMA_ARG_NO_...` with any value. `NO_COLOR` turns colours off, `PYGGML_CACHE` names the folder
of compiled kernels.
"""


def document() -> Iterator[str]:
    """The lines of docs/cli.md."""
    yield from INTRODUCTION.splitlines()
    for tool in TOOLS:
        yield from ("", f"## pyllama-{tool.name}", "", tool.help)
        if tool.is_group:
            yield from _commands(tool)
            continue
        group = ""
        for name, flag in rows(tool.name):
            if name != group:
                group = name
                yield from ("", f"### {name}", "", "| flag | meaning | default | variable |")
                yield "| --- | --- | --- | --- |"
            yield _row(_names(flag), _meaning(flag), flag.default, _variable(flag))
        for names, text in ALWAYS:
            yield _row(f"`{names}`", text, "", "")


def _commands(tool: Tool) -> Iterator[str]:
    """The commands of a tool, with the help that each prints."""
    group: click.Group = importlib.import_module(tool.module).command
    path = f"pyllama-{tool.name}"
    for name, command in group.commands.items():
        settings = {**group.context_settings, "terminal_width": 100}
        context = click.Context(command, info_name=f"{path} {name}", **settings)
        yield from ("", f"### {path} {name}", "", "```")
        yield from command.get_help(context).splitlines()
        yield "```"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _names(flag: Flag) -> str:
    positive, slash, negative = flag.names.partition("/")
    names = ", ".join(f"`{name}`" for name in positive.split())
    if slash:
        names += " / " + ", ".join(f"`{name}`" for name in negative.split())
    if flag.metavar and flag.takes_value:
        names += f" {flag.metavar}"
    return names


def _meaning(flag: Flag) -> str:
    choices = "" if isinstance(flag.kind, type) else ", ".join(f"`{c}`" for c in flag.kind)
    parts = (flag.help, choices, "repeatable" if flag.repeat else "")
    return "; ".join(part for part in parts if part)


def _variable(flag: Flag) -> str:
    return f"`{environment.PREFIXES[-1]}{flag.env}`" if flag.env else ""


def main() -> None:
    """Write the file that is named, or to stdout."""
    text = "\n".join(document()) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
