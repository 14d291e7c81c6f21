"""Which flags each way to use pyllama-bench heeds; the others are refused, not ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.errors import ConfigError
from pyggml.tools.flag import Flag
from pyggml.tools.flags_bench import GROUPS
from pyggml.tools.flags_simulated import SIMULATED

# those of logs and help are heeded always
FLAGS: Mapping[str, Flag] = {
    flag.target: flag for rows in (*GROUPS.values(), SIMULATED) for flag in rows
}


@dataclass(frozen=True, slots=True)
class Mode:
    """What is measured, in words that say why it takes no other flags."""

    text: str
    targets: frozenset[str]

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError: a flag was given that would change nothing."""
        for target in values:
            if target in FLAGS and target not in self.targets:
                name, *_ = FLAGS[target].names.split()
                raise ConfigError(f"{self.text}: leave {name} away")


COMMON = frozenset(("repetitions", "prio", "output", "output_err"))
OF_OP = frozenset(("op_types", "op_shapes", "op_experts"))
STARTUP = Mode(
    "--startup starts commands with -m and -t alone",
    COMMON | {"startup", "model", "n_threads", "reference"},
)
OP = Mode(
    "--op measures one operation without a model",
    COMMON
    | OF_OP
    | {"op", "n_threads", "cpu_mask", "cpu_range", "cpu_strict", "poll", "numa"}
    | {"repack", "no_repack", "no_warmup"},
)
MODELS = Mode("only with --op there are operations to choose", frozenset(FLAGS) - OF_OP)
