"""The commands: `pyllama <tool>`, and each tool under a name of its own."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from pyggml.errors import UserError
from pyggml.tools.options import ToolCommand, Values
from pyggml.version import __version__

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Tool:
    """One command; its module offers `run(values)`."""

    name: str
    module: str
    help: str


TOOLS = (
    Tool("cli", "pyggml.tools.cli", "Continue a text, or chat."),
    Tool("bench", "pyggml.tools.bench", "Measure speed, alone or beside llama.cpp."),
)


def cli() -> None:
    """Entry point of pyllama-cli."""
    run_tool("cli", sys.argv[1:])


def bench() -> None:
    """Entry point of pyllama-bench."""
    run_tool("bench", sys.argv[1:])


def main() -> None:
    """Entry point of pyllama."""
    names = [tool.name for tool in TOOLS]
    args = sys.argv[1:]
    if args and args[0] in names:
        run_tool(args[0], args[1:])
    elif args and args[0] == "--version":
        print(f"pyggml {__version__}")
    elif not args or args[0] in ("-h", "--help"):
        print("Usage: pyllama TOOL [OPTIONS]\n\nTools:")
        for tool in TOOLS:
            print(f"  {tool.name:<12} {tool.help}")
        print("\nEach is also a command: pyllama-cli, pyllama-bench, ...")
    else:
        print(f"error: no tool is called {args[0]!r}: {', '.join(names)}", file=sys.stderr)
        sys.exit(2)


def run_tool(name: str, args: Sequence[str]) -> None:
    """Parse and run; mistakes become sentences and exit codes (1, usage 2, interrupted 130)."""
    tool = next(tool for tool in TOOLS if tool.name == name)

    def run(values: Values) -> None:
        importlib.import_module(tool.module).run(values)

    command = ToolCommand(name, run, help=tool.help)
    verbose = "-v" in args or "--verbose" in args
    try:
        command.main(args=list(args), prog_name=f"pyllama-{name}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        if verbose:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # the reader of our output went away: nothing is wrong with us
        sys.stderr.close()
        sys.exit(0)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
