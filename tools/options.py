"""From flag rows to a click command, and from parsed values to parameter keywords."""

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from pyggml.tools import environment
from pyggml.tools.flag import Flag
from pyggml.tools.flags import ABSENT, rows
from pyggml.version import __version__

Values = Mapping[str, Any]
METAVARS: Mapping[object, str] = {int: "N", float: "X"}
ORDER = "pyggml.order"  # of flags, in a context's meta
HELP_NAMES = ("-h", "--help", "--usage")
ALWAYS = (
    ("-h, --help, --usage", "show this help and leave"),
    ("--version", "show the version and leave"),
)


class ToolCommand(click.Command):
    """A command whose options accept _ for -, and whose help is grouped."""

    def __init__(self, tool: str, run: Callable[[Values], None], **extra: Any) -> None:
        self._rows = list(rows(tool))
        self._flags = [flag for _, flag in self._rows]
        params: list[click.Parameter] = [_option(i, flag) for i, flag in enumerate(self._flags)]
        context = {"help_option_names": HELP_NAMES, "max_content_width": 100}
        super().__init__(f"pyllama-{tool}", params=params, context_settings=context, **extra)
        click.version_option(__version__, message="pyggml %(version)s")(self)
        self._run = run

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        checked, order = self._checked(args)
        ctx.meta[ORDER] = order
        rest = super().parse_args(ctx, checked)
        options = self.params[: len(self._flags)]
        for warning in environment.fill(ctx, self._flags, options):
            click.echo(f"warning: {warning}", err=True)
        return rest

    def _checked(self, args: list[str]) -> tuple[list[str], list[Flag]]:
        """Arguments with - for _ in long names, and their flags in the order in which they come.

        An unknown name is refused with its neighbour.

        Click alone would read an unknown -ngl as -n with the value "gl".
        """
        flag_of = {name: f for f in self._flags for name in f.names.replace("/", " ").split()}
        checked: list[str] = []
        order: list[Flag] = []
        rest = deque(args)
        while rest:
            argument = _dashed(rest.popleft())
            if not argument.startswith("-"):
                raise click.UsageError(f"unexpected argument {argument!r}{_hint(argument)}")
            checked.append(argument)
            option = argument.partition("=")[0] if argument.startswith("--") else argument
            if option in (*HELP_NAMES, "--version"):
                continue
            if option not in flag_of:
                raise click.UsageError(_unknown(option, [*flag_of, *HELP_NAMES, "--version"]))
            flag = flag_of[option]
            order.append(flag)
            left_out = flag.optional and rest and rest[0].startswith("-")
            if flag.takes_value and option == argument and rest and not left_out:
                checked.append(rest.popleft())
        for flag, n in Counter(order).items():
            if n > 1 and not flag.repeat and flag.value is None:
                text = f"warning: {flag.long_name} is given {n} times: the last one counts"
                click.echo(text, err=True)
        return checked, order

    def invoke(self, ctx: click.Context) -> None:
        self._run(_values(self._flags, ctx.params, ctx.meta.get(ORDER, [])))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, records in self.help_groups(ctx):
            with formatter.section(group):
                formatter.write_dl(records)

    def help_groups(self, ctx: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """(group, [(names, text)]) in the order of the table."""
        by_group: dict[str, list[tuple[str, str]]] = {}
        for (group, _), param in zip(self._rows, self.params, strict=False):
            record = param.get_help_record(ctx)
            if record:
                by_group.setdefault(group, []).append(record)
        by_group[next(reversed(by_group))] += ALWAYS
        yield from by_group.items()


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _hint(argument: str) -> str:
    return f": did you mean -m {argument}?" if argument.endswith(".gguf") else ""


def _unknown(option: str, known: list[str]) -> str:
    """What to say of a name that is no flag."""
    for names, reason in ABSENT.items():
        if option in names.split():
            return f"{option} is not available: {reason}"
    near = difflib.get_close_matches(option, known, 1, 0.5)
    return f"No such option: {option}" + (f" (did you mean {near[0]}?)" if near else "")


def _option(index: int, flag: Flag) -> click.Option:
    """The option of a row; its parameter name is `o<index>`, since several rows may share a target.

    Options that were not given are None, so that parameters keep their own defaults.
    """
    declared = [f"o{index}", *_declarations(flag)]
    text = flag.help + (f" (default: {flag.default})" if flag.default else "")
    common: dict[str, Any] = {"help": text.strip(), "default": None}
    if flag.kind is bool:
        return click.Option(declared, is_flag=True, type=bool, **common)
    if flag.value is not None:
        return click.Option(declared, is_flag=True, flag_value=flag.value, **common)
    if flag.optional:
        common |= {"is_flag": False, "flag_value": flag.optional}
    kind = click.Choice(flag.kind) if isinstance(flag.kind, tuple) else flag.kind
    metavar = flag.metavar or METAVARS.get(flag.kind)
    return click.Option(declared, type=kind, multiple=flag.repeat, metavar=metavar, **common)


def _declarations(flag: Flag) -> list[str]:
    """Names as click wants them; of a boolean pair "-e --escape/--no-escape" each on its own."""
    positive, slash, negative = flag.names.partition("/")
    if not slash:
        return positive.split()
    yes, no = positive.split(), negative.split()
    pairs = [f"{a}/{b}" for a, b in zip(yes, no, strict=False)]
    return [*yes[len(no) :], *pairs, *(f" /{b}" for b in no[len(yes) :])]


def _values(flags: list[Flag], parsed: Mapping[str, Any], order: list[Flag]) -> dict[str, Any]:
    """What was given, by target; `order`: the flags of the command line as they came."""
    found: dict[str, Any] = {}
    lists: dict[Flag, deque[Any]] = {}
    for i, flag in enumerate(flags):
        value = parsed[f"o{i}"]
        if value is None or value == ():
            continue
        if flag.ordered:
            lists[flag] = deque(value if flag.repeat else [value])
        else:
            found[flag.target] = value
    # llama.cpp: what the environment says comes first
    for flag in [*(f for f in lists if f not in order), *(f for f in order if f in lists)]:
        while lists[flag]:
            found.setdefault(flag.target, []).append((flag.long_name, lists[flag].popleft()))
            if flag in order:
                break
    return found


def section(values: Values, name: str) -> dict[str, Any]:
    """The keywords of one parameter class: section(values, "context") -> {"n_ctx": ...}."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def flag_named(target: str) -> str:
    """What people call the flag that sets a parameter of the command line."""
    return next((flag.long_name for _, flag in rows("cli") if flag.target == target), target)
