"""Every flag of every tool: one row each, from which options, help, environment and docs come.

Spelling and defaults are llama.cpp's. `target` says which parameter a flag sets: `context.n_ctx`
is the field n_ctx of ContextParams; a bare name is the tool's own. A default of None means "not
given": the parameter's own default holds.
"""

from collections.abc import Iterator, Mapping, Sequence

from pyggml.tools import flags_bench, flags_plan
from pyggml.tools.flag import ALL, CACHE_TYPES, CLI, ON_OFF_AUTO, PLAN, Flag
from pyggml.tools.flags_devices import DEVICES
from pyggml.tools.flags_sampling import SAMPLING
from pyggml.tools.flags_simulated import SIMULATED
from pyggml.tools.flags_threads import THREADS

GROUPS: Mapping[str, Sequence[Flag]] = {
    "Model": (
        Flag(
            "-m --model",
            "model",
            help="GGUF file (of a split model the first part)",
            env="MODEL",
            metavar="FILE",
        ),
        Flag(
            "-lm --load-mode",
            "model.load_mode",
            ("auto", "none", "mmap", "mlock", "mmap+mlock"),
            "how weights get into memory",
            "auto",
            "LOAD_MODE",
        ),
        Flag("--no-mmap", "no_mmap", value=True, help="read the file: --load-mode none"),
        Flag("--mlock", "mlock", value=True, help="keep weights in memory: mmap+mlock"),
        Flag(
            "--repack/-nr --no-repack",
            "model.repack",
            bool,
            "re-lay weights into panels while loading",
            "on",
            "REPACK",
        ),
        Flag("--check-tensors", "model.check_tensors", value=True, help="look for invalid data"),
        Flag(
            "--override-kv",
            "override_kv",
            help="change metadata: KEY=TYPE:VALUE,... (int, float, bool, str)",
            repeat=True,
        ),
    ),
    "Context": (
        Flag(
            "-c --ctx-size", "context.n_ctx", int, "tokens of context", "0: the model's", "CTX_SIZE"
        ),
        Flag("-b --batch-size", "context.n_batch", int, "logical batch", "2048", "BATCH"),
        Flag("-ub --ubatch-size", "context.n_ubatch", int, "physical batch", "512", "UBATCH"),
        Flag(
            "-t --threads",
            "context.n_threads",
            int,
            "threads that generate",
            "-1: all cores, or those of -C",
            "THREADS",
        ),
        Flag("-tb --threads-batch", "context.n_threads_batch", int, "threads for prompts", "as -t"),
        Flag(
            "-fa --flash-attn",
            "context.flash_attn",
            ON_OFF_AUTO,
            "attention without a matrix of scores",
            "auto",
            "FLASH_ATTN",
        ),
        Flag(
            "-ctk --cache-type-k",
            "context.type_k",
            CACHE_TYPES,
            "type of cached keys",
            "f16",
            "CACHE_TYPE_K",
        ),
        Flag(
            "-ctv --cache-type-v",
            "context.type_v",
            CACHE_TYPES,
            "type of cached values; a quantized one needs flash attention",
            "f16",
            "CACHE_TYPE_V",
        ),
        Flag(
            "--swa-full",
            "context.swa_full",
            value=True,
            help="full-size cache for sliding-window layers",
            env="SWA_FULL",
        ),
        Flag("--warmup/--no-warmup", "context.warmup", bool, "one empty run before use", "on"),
        Flag(
            "--rope-scaling",
            "rope.scaling",
            ("none", "linear", "yarn"),
            "how positions beyond the trained context are treated",
            "the model's",
            "ROPE_SCALING_TYPE",
        ),
        Flag(
            "--rope-scale",
            "rope_scale",
            float,
            "times the trained context (1 / --rope-freq-scale)",
            "",
            "ROPE_SCALE",
        ),
        Flag(
            "--rope-freq-base",
            "rope.freq_base",
            float,
            "base of the rotary frequencies",
            "the model's",
            "ROPE_FREQ_BASE",
        ),
        Flag(
            "--rope-freq-scale",
            "rope.freq_scale",
            float,
            "factor of the rotary frequencies",
            "the model's",
            "ROPE_FREQ_SCALE",
        ),
        Flag(
            "--yarn-orig-ctx",
            "rope.yarn_orig_ctx",
            int,
            "YaRN: context the model was first trained with",
            "the model's",
            "YARN_ORIG_CTX",
        ),
        Flag(
            "--yarn-ext-factor",
            "rope.yarn_ext_factor",
            float,
            "YaRN: share of extrapolation; below 0 the model's",
            "-1",
            "YARN_EXT_FACTOR",
        ),
        Flag(
            "--yarn-attn-factor",
            "rope.yarn_attn_factor",
            float,
            "YaRN: factor of attention; below 0 the model's",
            "-1",
            "YARN_ATTN_FACTOR",
        ),
        Flag(
            "--yarn-beta-slow",
            "rope.yarn_beta_slow",
            float,
            "YaRN: high correction; below 0 the model's",
            "-1",
            "YARN_BETA_SLOW",
        ),
        Flag(
            "--yarn-beta-fast",
            "rope.yarn_beta_fast",
            float,
            "YaRN: low correction; below 0 the model's",
            "-1",
            "YARN_BETA_FAST",
        ),
    ),
    "Devices and placement": DEVICES,
    "Simulated devices": SIMULATED,
    "Threads": THREADS,
    "Prompt and output": (
        Flag(
            "-p --prompt",
            "prompt",
            help="text to continue, in a chat the first message; else it is read from stdin",
        ),
        Flag(
            "-f --file",
            "file",
            help="prompt from a UTF-8 file (one final newline is dropped)",
            metavar="FILE",
        ),
        Flag(
            "-n --predict --n-predict",
            "generate.n_predict",
            int,
            "tokens to generate; -1 no limit, -2 until the context is full",
            "-1",
            "N_PREDICT",
        ),
        Flag(
            "-e --escape/--no-escape",
            "escape",
            bool,
            r"process \n \t \' \" \\ \xHH in -p, -f, -sys and -r",
            "on",
        ),
        Flag(
            "-r --reverse-prompt",
            "stop",
            help="stop (in a chat: your turn) at this text",
            repeat=True,
        ),
        Flag("-sp --special", "generate.special", value=True, help="show special tokens"),
        Flag("--keep", "generate.keep", int, "tokens that a context shift keeps; -1 all", "0"),
        Flag(
            "--context-shift/--no-context-shift",
            "generate.context_shift",
            bool,
            "go on when the context is full, forgetting the middle",
            "off",
            "CONTEXT_SHIFT",
        ),
        Flag(
            "--display-prompt/--no-display-prompt",
            "display_prompt",
            bool,
            "repeat the prompt before its continuation",
            "on",
        ),
        Flag("--verbose-prompt", "verbose_prompt", value=True, help="list the prompt's tokens"),
        Flag("-co --color", "color", ON_OFF_AUTO, "colours", "auto: on a terminal"),
        Flag(
            "--perf --show-timings/--no-perf --no-show-timings",
            "perf",
            bool,
            "a line of timings after each answer",
            "on",
            "PERF",
        ),
    ),
    "Chat": (
        Flag(
            "-cnv --conversation/-no-cnv --no-conversation",
            "conversation",
            bool,
            "chat",
            "on a terminal, if the model has a chat template",
        ),
        Flag("-sys --system-prompt", "system", help="system message"),
        Flag(
            "-sysf --system-prompt-file",
            "system_file",
            help="system message from a file",
            metavar="FILE",
        ),
        Flag("-st --single-turn", "single_turn", value=True, help="leave after one answer"),
        Flag(
            "-mli --multiline-input",
            "multiline",
            value=True,
            help=r"a message goes on until a line that ends in \; else only such a line goes on",
        ),
        Flag("--simple-io", "simple_io", value=True, help="read lines without editing them"),
        Flag(
            "--chat-template",
            "chat_template",
            help="a built-in name or a Jinja text",
            default="the model's",
            env="CHAT_TEMPLATE",
        ),
        Flag(
            "--chat-template-file",
            "chat_template_file",
            help="Jinja text from a file",
            metavar="FILE",
        ),
        Flag("--jinja/--no-jinja", "jinja", bool, "render templates with Jinja", "on", "JINJA"),
    ),
    "Sampling": SAMPLING,
    "Logs and information": (
        Flag(
            "-v --verbose",
            "verbose",
            value=True,
            help="show everything, and tracebacks",
            tools=ALL,
        ),
        Flag(
            "-lv --verbosity",
            "verbosity",
            int,
            "0 none, 1 errors, 2 warnings, 3 progress, 4 details, 5 everything",
            "3",
            "LOG_VERBOSITY",
        ),
        Flag(
            "--log-file",
            "log_file",
            help="also write the log (with details) to a file",
            metavar="FILE",
        ),
        Flag("--log-disable", "log_disable", value=True, help="no log"),
        Flag(
            "--list-devices", "list_devices", value=True, help="list devices and leave", tools=ALL
        ),
        Flag(
            "--warmup-kernels",
            "warmup_kernels",
            value=True,
            help="compile all kernels for this CPU and leave",
        ),
    ),
}

# Flags of llama.cpp that are not here, and what to do instead.
ABSENT: Mapping[str, str] = {
    "-hf -hfr --hf-repo -hff --hf-file -hft --hf-token -mu --model-url -dr --docker-repo --offline "
    "-cl --cache-list": "download the GGUF file and give it with -m",
    "-i --interactive -if --interactive-first": "chat with -cnv",
    "--rpc": "there are no remote devices",
    "--grammar --grammar-file -j --json-schema -jf --json-schema-file": "there are no grammars",
    "--lora --lora-scaled --control-vector --control-vector-scaled": "there are no adapters",
    "-md --model-draft --spec-draft-model --spec-type --draft": "there is no speculative decoding",
    "--in-prefix --in-suffix --in-prefix-bos": "--chat-template says what surrounds a message",
    "-bf --binary-file": "a prompt is UTF-8 text: use -f",
    "--log-colors --log-prefix --log-timestamps --log-jsonl": "--log-file has levels and times",
    "-dt --defrag-thold": "the cache needs no defragmentation",
    "--prompt-cache --prompt-cache-all --prompt-cache-ro": "sessions are not saved",
    "--mmap -dio --direct-io -ndio --no-direct-io": "use --load-mode",
    "-gan --grp-attn-n -gaw --grp-attn-w": "there is no self-extend; try --rope-scaling yarn",
}


def rows(tool: str) -> Iterator[tuple[str, Flag]]:
    """(group, flag) of a tool, in the order of the help."""
    groups = (flags_bench.GROUPS, flags_plan.GROUPS, GROUPS)
    for group, flags in (pair for table in groups for pair in table.items()):
        for flag in flags:
            shared = tool == PLAN and CLI in flag.tools and flag.target in flags_plan.SHARED
            if tool in flag.tools or shared:
                yield group, flag
