"""One row of the flag tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLI, BENCH, PLAN = "cli", "bench", "plan"


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
    ordered: bool = False  # all flags of the target make one list of (long name, value), in order
    tools: tuple[str, ...] = (CLI,)

    @property
    def is_pair(self) -> bool:
        """Whether there are spellings that say no."""
        return "/" in self.names

    @property
    def takes_value(self) -> bool:
        """Whether the next argument belongs to it."""
        return self.kind is not bool and self.value is None

    @property
    def long_name(self) -> str:
        """The first name that is spelled out: what messages call the flag."""
        names = self.names.partition("/")[0].split()
        return next((name for name in names if name.startswith("--")), names[0])


ON_OFF_AUTO = ("on", "off", "auto")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
ALL = (CLI, BENCH)
