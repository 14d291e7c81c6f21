"""The commands: `pyllama <tool>`, and each tool under a name of its own."""

import difflib
import gc
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pyggml.errors import UserError
from pyggml.tools.options import ToolCommand, Values
from pyggml.version import __version__

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Tool:
    """One command; its module offers `run(values)`, or a click group `command`."""

    name: str
    module: str
    help: str
    is_group: bool = False


TOOLS = (
    Tool("cli", "pyggml.tools.cli", "Continue a text, or chat."),
    Tool("bench", "pyggml.tools.bench", "Measure speed, alone or beside llama.cpp."),
    Tool("plan", "pyggml.tools.plan", "Find the placement that is fastest on some devices."),
    Tool("gguf", "pyggml.tools.gguf", "Look into GGUF files and make new ones.", is_group=True),
)


def cli() -> None:
    """Entry point of pyllama-cli."""
    # what starting makes stays: looking for garbage in it takes a tenth of the time
    gc.disable()
    run_tool("cli", sys.argv[1:])


def bench() -> None:
    """Entry point of pyllama-bench."""
    run_tool("bench", sys.argv[1:])


def plan() -> None:
    """Entry point of pyllama-plan."""
    run_tool("plan", sys.argv[1:])


def gguf() -> None:
    """Entry point of pyllama-gguf."""
    run_tool("gguf", sys.argv[1:])


def main() -> None:
    """Entry point of pyllama."""
    names = [tool.name for tool in TOOLS]
    name, *args = sys.argv[1:] or ["--help"]
    if name in names:
        run_tool(name, args)
    elif name == "--version":
        print(f"pyggml {__version__}")
    elif name in ("-h", "--help", "help"):
        print("Usage: pyllama TOOL [OPTIONS]\n\nTools:")
        for tool in TOOLS:
            print(f"  {tool.name:<12} {tool.help}")
        print("\nEach is also a command: pyllama-cli, pyllama-bench, ...")
    else:
        near = difflib.get_close_matches(name, names, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        print(f"error: there is no tool {name!r}{hint}", file=sys.stderr)
        print(f"there are: {', '.join(names)}", file=sys.stderr)
        sys.exit(USAGE)


def run_tool(name: str, args: Sequence[str]) -> None:
    """Parse and run; mistakes become sentences and exit codes (1, usage 2, interrupted 130)."""
    _repair_streams()
    verbose = "-v" in args or "--verbose" in args
    origins: dict[str, str] = {}
    try:
        _run(name, args, origins)
    except click.exceptions.Exit as request:
        sys.exit(request.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else f"pyllama-{name}"
        _fail(f"{error.format_message()}\n{path} --help lists the options", USAGE)
    except BrokenPipeError:
        # the reader of our output went away: nothing is wrong with us
        _forget_output()
    except KeyboardInterrupt:
        # whoever presses Ctrl-C again does not want to wait for a tidy end
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if verbose:
            raise
        _fail("\n".join([_sentence(error), *_from_environment(error, origins)]), FAILED)


def _run(name: str, args: Sequence[str], origins: dict[str, str]) -> None:
    """Run a tool; `origins` receives the flags whose values the environment gave."""
    tool = next(tool for tool in TOOLS if tool.name == name)
    if tool.is_group:
        group: click.Group = importlib.import_module(tool.module).command
        with group.make_context(f"pyllama-{name}", list(args)) as context:
            group.invoke(context)
        return

    def run(values: Values) -> None:
        importlib.import_module(tool.module).run(values)

    command = ToolCommand(name, run, help=tool.help)
    with command.make_context(f"pyllama-{name}", list(args)) as context:
        origins |= context.meta
        command.invoke(context)


def _from_environment(error: Exception, origins: Mapping[str, str]) -> Iterator[str]:
    """Where a flag comes from that an error speaks of, if not from the command line."""
    for flag, variable in origins.items():
        if isinstance(error, UserError) and f"{flag} " in str(error):
            yield f"{flag} was set by {variable}={os.environ[variable]}"


def _sentence(error: Exception) -> str:
    """What to tell a person."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --ctx-size or --ubatch-size, or a smaller model"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{(error.strerror or str(error)).lower()}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    what = f"{type(error).__name__} {error}".strip()
    return f"a bug in pyggml: {what} ({where})\nplease report it with what -v adds to this"


def _fail(text: str, code: int) -> None:
    log = logging.getLogger("pyggml")
    if log.handlers:
        log.error(text, extra={"shown": True})
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


# ---------------------------------------------------------------- standard streams
def _repair_streams() -> None:
    """Make output work that Python would stumble over: closed streams, narrow encodings."""
    # a file opened later must not get the number of a closed stream
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _forget_output() -> None:
    """Let Python's last flush of a closed pipe go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
