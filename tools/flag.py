"""One row of the flag tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLI, BENCH = "cli", "bench"


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `names` are separated by blanks; "--x/--no-x" is a pair of booleans."""

    names: str
    target: str
    kind: type | Sequence[str] = str  # a tuple lists the choices
    help: str = ""
    default: str = ""  # shown in the help
    env: str = ""  # LLAMA_ARG_<env> and PYGGML_ARG_<env>
    metavar: str = ""
    value: Any = None  # a flag that takes no argument sets this
    optional: str = ""  # what the flag means when its argument is left out
    repeat: bool = False
    tools: tuple[str, ...] = (CLI,)


ON_OFF_AUTO = ("on", "off", "auto")
ALL = (CLI, BENCH)
