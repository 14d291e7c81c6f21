"""From flag rows to a click command, and from parsed values to parameter keywords."""

import difflib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import click

from pyggml.tools.flag import Flag
from pyggml.tools.flags import rows
from pyggml.version import __version__

Values = Mapping[str, Any]


class ToolCommand(click.Command):
    """A command whose options accept _ for -, and whose help is grouped."""

    def __init__(self, tool: str, run: Callable[[Values], None], **extra: Any) -> None:
        self._rows = list(rows(tool))
        params: list[click.Parameter] = [_option(i, flag) for i, (_, flag) in enumerate(self._rows)]
        context = {"help_option_names": ["-h", "--help", "--usage"], "max_content_width": 100}
        super().__init__(f"pyllama-{tool}", params=params, context_settings=context, **extra)
        click.version_option(__version__, message="pyggml %(version)s")(self)
        self._run = run

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._checked(args))

    def _checked(self, args: list[str]) -> list[str]:
        """Arguments with - for _ in long names; an unknown name is refused with its neighbour.

        Click alone would read an unknown -ngl as -n with the value "gl".
        """
        takes_value = {
            name: isinstance(p, click.Option) and not p.is_flag
            for p in self.params
            for name in (*p.opts, *p.secondary_opts)
        }
        takes_value |= dict.fromkeys(("-h", "--help", "--usage"), False)
        optional = {name for _, flag in self._rows if flag.optional for name in flag.names.split()}
        checked: list[str] = []
        rest = deque(args)
        while rest:
            argument = rest.popleft()
            name = _dashed(argument)
            if argument.startswith("-"):
                option = name.partition("=")[0] if name.startswith("--") else name
                if option not in takes_value:
                    near = difflib.get_close_matches(option, takes_value, 1, 0.5)
                    raise click.NoSuchOption(option, possibilities=near)
                checked.append(name)
                left_out = option in optional and rest and rest[0].startswith("-")
                if takes_value[option] and option == name and rest and not left_out:
                    checked.append(rest.popleft())
            else:
                checked.append(argument)
        return checked

    def invoke(self, ctx: click.Context) -> None:
        self._run(_values([flag for _, flag in self._rows], ctx.params))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        by_group: dict[str, list[tuple[str, str]]] = {}
        for (group, _), param in zip(self._rows, self.params, strict=False):
            record = param.get_help_record(ctx)
            if record:
                by_group.setdefault(group, []).append(record)
        by_group["Logs and information"] += [
            ("-h, --help, --usage", "Show this help and leave."),
            ("--version", "Show the version and leave."),
        ]
        for group, records in by_group.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _option(index: int, flag: Flag) -> click.Option:
    """The option of a row; its parameter name is `o<index>`, since several rows may share a target.

    Options that were not given are None, so that parameters keep their own defaults.
    """
    declared = [f"o{index}", *_declarations(flag)]
    text = flag.help + (f" (default: {flag.default})" if flag.default else "")
    env = [f"{prefix}_ARG_{flag.env}" for prefix in ("PYGGML", "LLAMA")] if flag.env else None
    common: dict[str, Any] = {"help": text.strip(), "default": None, "envvar": env}
    if flag.kind is bool:
        return click.Option(declared, is_flag=True, type=bool, **common)
    if flag.value is not None:
        return click.Option(declared, is_flag=True, flag_value=flag.value, **common)
    if flag.optional:
        common |= {"is_flag": False, "flag_value": flag.optional}
    kind = click.Choice(flag.kind) if isinstance(flag.kind, tuple) else flag.kind
    metavar = flag.metavar or None
    return click.Option(declared, type=kind, multiple=flag.repeat, metavar=metavar, **common)


def _declarations(flag: Flag) -> list[str]:
    """Names as click wants them; of a boolean pair "-e --escape/--no-escape" each on its own."""
    positive, slash, negative = flag.names.partition("/")
    if not slash:
        return positive.split()
    yes, no = positive.split(), negative.split()
    pairs = [f"{a}/{b}" for a, b in zip(yes, no, strict=False)]
    return [*yes[len(no) :], *pairs, *(f" /{b}" for b in no[len(yes) :])]


def _values(flags: list[Flag], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by target."""
    found: dict[str, Any] = {}
    for i, flag in enumerate(flags):
        value = parsed[f"o{i}"]
        if value is not None and value != ():
            found[flag.target] = value
    return found


def section(values: Values, name: str) -> dict[str, Any]:
    """The keywords of one parameter class: section(values, "context") -> {"n_ctx": ...}."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
