"""Flags from the environment: LLAMA_ARG_<X> and PYGGML_ARG_<X>, the latter first."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from pyggml.tools.flag import Flag

PREFIXES = ("PYGGML_ARG_", "LLAMA_ARG_")
WORDS = {"true": True, "1": True, "on": True, "enabled": True}
WORDS |= {"false": False, "0": False, "off": False, "disabled": False}


def variables(flag: Flag) -> list[str]:
    """Names that set a flag, strongest first. NO_ names say no to a pair, whatever their value."""
    names = [prefix + flag.env for prefix in PREFIXES if flag.env]
    return names + ([prefix + "NO_" + flag.env for prefix in PREFIXES] if flag.is_pair else [])


def find(flag: Flag, environ: Mapping[str, str] = os.environ) -> str | None:
    """The variable that sets a flag here; None: there is none."""
    return next((name for name in variables(flag) if flag.env and environ.get(name)), None)


def fill(
    ctx: click.Context, flags: Sequence[Flag], options: Sequence[click.Parameter]
) -> Iterator[str]:
    """Give flags that are not on the command line their values; yields warnings.

    ctx.meta tells which variable a flag comes from.
    """
    for flag, option in zip(flags, options, strict=True):
        variable = find(flag)
        if variable is None:
            continue
        assert option.name is not None
        if ctx.params[option.name] in (None, ()):
            ctx.params[option.name] = _value(variable, flag, option, ctx)
            ctx.meta[flag.long_name] = variable
        else:
            yield (
                f"{variable} environment variable is set, but will be overwritten by "
                f"command line argument {flag.long_name}"
            )


def _value(variable: str, flag: Flag, option: click.Parameter, ctx: click.Context) -> Any:
    text = os.environ[variable]
    if flag.kind is bool or flag.value is not None:
        if "_ARG_NO_" in variable and flag.is_pair:
            return False
        if text.strip().lower() not in WORDS:
            raise click.UsageError(f"{variable}={text}: it must be one of {', '.join(WORDS)}")
        is_on = WORDS[text.strip().lower()]
        if flag.kind is bool:
            return is_on
        return flag.value if is_on else None
    try:
        value = option.type.convert(text, option, ctx)
    except click.BadParameter as error:
        raise click.UsageError(f"{variable}={text}: {error.message}") from None
    return (value,) if flag.repeat else value
