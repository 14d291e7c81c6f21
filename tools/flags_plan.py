"""The flags of pyllama-plan; those it shares with pyllama-cli are named here."""

from collections.abc import Mapping, Sequence

from pyggml.tools.flag import PLAN, Flag

ONLY = (PLAN,)
SHARED = frozenset(
    (
        *("context.n_ctx", "context.n_batch", "context.n_ubatch", "context.n_threads"),
        *("context.flash_attn", "context.type_k", "context.type_v", "context.swa_full"),
        *("sim_device", "verbose", "verbosity", "log_file", "list_devices"),
    )
)

GROUPS: Mapping[str, Sequence[Flag]] = {
    "Planning": (
        Flag(
            "-m --model",
            "model",
            help="GGUF file, whole or only its header, or an https:// address of one",
            env="MODEL",
            metavar="FILE",
            tools=ONLY,
        ),
        Flag(
            "--for",
            "plan.goal",
            ("generation", "prompt", "mix"),
            "what is to be fast; mix: four tokens of prompts for one that is generated",
            "mix",
            tools=ONLY,
        ),
        Flag(
            "-fitt --fit-target",
            "plan_margin",
            int,
            "MiB of each device to leave free",
            "1024",
            "FIT_TARGET",
            metavar="MiB",
            tools=ONLY,
        ),
        Flag("--json", "json", value=True, help="the answer as one JSON object", tools=ONLY),
        Flag(
            "--verify",
            "verify",
            value=True,
            help="run the best placement, and show what was modelled beside what was measured",
            tools=ONLY,
        ),
    ),
}
