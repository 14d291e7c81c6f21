"""Every flag of every tool: one row each, from which options, help, environment and docs come.

Spelling and defaults are llama.cpp's. `target` says which parameter a flag sets: `context.n_ctx`
is the field n_ctx of ContextParams; a bare name is the tool's own. A default of None means "not
given": the parameter's own default holds.
"""

from collections.abc import Iterator, Mapping, Sequence

from pyggml.tools import flags_bench
from pyggml.tools.flag import ALL, ON_OFF_AUTO, Flag

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
            "-ngl --gpu-layers --n-gpu-layers",
            "n_gpu_layers",
            help="layers to keep on a GPU: a number, auto or all",
            default="auto",
            env="N_GPU_LAYERS",
            metavar="N",
        ),
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
            "-1: all cores",
            "THREADS",
        ),
        Flag("-tb --threads-batch", "context.n_threads_batch", int, "threads for prompts", "as -t"),
        Flag("-fa --flash-attn", "context.flash_attn", ON_OFF_AUTO, "", "auto", "FLASH_ATTN"),
        Flag(
            "-ctk --cache-type-k",
            "context.type_k",
            ("f16", "f32"),
            "type of cached keys",
            "f16",
            "CACHE_TYPE_K",
        ),
        Flag(
            "-ctv --cache-type-v",
            "context.type_v",
            ("f16", "f32"),
            "type of cached values",
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
            "",
            "the model's",
            "ROPE_SCALING_TYPE",
        ),
        Flag("--rope-scale", "rope_scale", float, "context factor", "", "ROPE_SCALE"),
        Flag("--rope-freq-base", "rope.freq_base", float, "", "the model's", "ROPE_FREQ_BASE"),
        Flag("--rope-freq-scale", "rope.freq_scale", float, "", "the model's", "ROPE_FREQ_SCALE"),
        Flag("--yarn-orig-ctx", "rope.yarn_orig_ctx", int, "", "the model's", "YARN_ORIG_CTX"),
        Flag("--yarn-ext-factor", "rope.yarn_ext_factor", float, "", "-1", "YARN_EXT_FACTOR"),
        Flag("--yarn-attn-factor", "rope.yarn_attn_factor", float, "", "-1", "YARN_ATTN_FACTOR"),
        Flag("--yarn-beta-slow", "rope.yarn_beta_slow", float, "", "-1", "YARN_BETA_SLOW"),
        Flag("--yarn-beta-fast", "rope.yarn_beta_fast", float, "", "-1", "YARN_BETA_FAST"),
    ),
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
        Flag("-e --escape/--no-escape", "escape", bool, r"process \n \t \' \" \\ in prompts", "on"),
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
        Flag("--display-prompt/--no-display-prompt", "display_prompt", bool, "", "on"),
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
        Flag("-sysf --system-prompt-file", "system_file", help="system message from a file"),
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
        Flag("--chat-template-file", "chat_template_file", help="Jinja text from a file"),
        Flag("--jinja/--no-jinja", "jinja", bool, "render templates with Jinja", "on", "JINJA"),
    ),
    "Sampling": (
        Flag("-s --seed", "sampling.seed", int, "", "-1: random"),
        Flag("--samplers", "samplers", help="order, separated by ;"),
        Flag("--sampling-seq --sampler-seq", "sampling_seq", help="order in letters: edskypmxt"),
        Flag("--temp --temperature", "sampling.temp", float, "", "0.8", "TEMPERATURE"),
        Flag("--top-k", "sampling.top_k", int, "", "40", "TOP_K"),
        Flag("--top-p", "sampling.top_p", float, "", "0.95", "TOP_P"),
        Flag("--min-p", "sampling.min_p", float, "", "0.05", "MIN_P"),
        Flag("--typical --typical-p", "sampling.typ_p", float, "", "1.0"),
        Flag("--top-nsigma --top-n-sigma", "sampling.top_n_sigma", float, "", "-1"),
        Flag("--xtc-probability", "sampling.xtc_probability", float, "", "0"),
        Flag("--xtc-threshold", "sampling.xtc_threshold", float, "", "0.1"),
        Flag("--repeat-last-n", "sampling.repeat_last_n", int, "", "64"),
        Flag("--repeat-penalty", "sampling.repeat_penalty", float, "", "1.0", "REPEAT_PENALTY"),
        Flag("--presence-penalty", "sampling.presence_penalty", float, "", "0", "PRESENCE_PENALTY"),
        Flag(
            "--frequency-penalty", "sampling.frequency_penalty", float, "", "0", "FREQUENCY_PENALTY"
        ),
        Flag("--dry-multiplier", "sampling.dry_multiplier", float, "", "0"),
        Flag("--dry-base", "sampling.dry_base", float, "", "1.75"),
        Flag("--dry-allowed-length", "sampling.dry_allowed_length", int, "", "2"),
        Flag("--dry-penalty-last-n", "sampling.dry_penalty_last_n", int, "", "64"),
        Flag(
            "--dry-sequence-breaker",
            "dry_sequence_breaker",
            help="replaces the defaults; `none`: no breakers",
            repeat=True,
        ),
        Flag("--adaptive-target", "sampling.adaptive_target", float, "", "-1"),
        Flag("--adaptive-decay", "sampling.adaptive_decay", float, "", "0.9"),
        Flag("--dynatemp-range", "sampling.dynatemp_range", float, "", "0"),
        Flag("--dynatemp-exp", "sampling.dynatemp_exponent", float, "", "1"),
        Flag("--mirostat", "sampling.mirostat", int, "0 off, 1 or 2", "0"),
        Flag("--mirostat-lr", "sampling.mirostat_eta", float, "", "0.1"),
        Flag("--mirostat-ent", "sampling.mirostat_tau", float, "", "5.0"),
        Flag("-l --logit-bias", "logit_bias", help="ID+BIAS or ID-BIAS", repeat=True),
        Flag("--ignore-eos", "sampling.ignore_eos", value=True, help="never end by itself"),
    ),
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
        Flag("--log-file", "log_file", help="also write the log (with details) to a file"),
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
    "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -sm --split-mode -ts --tensor-split "
    "-mg --main-gpu -dev --device -kvo --kv-offload -nkvo --no-kv-offload --op-offload "
    "--no-op-offload --no-host -fit --fit -fitt --fit-target -fitc --fit-ctx "
    "--rpc": "everything runs on the CPU",
    "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio "
    "--poll": "the system places the threads; -t says how many there are",
    "--grammar --grammar-file -j --json-schema -jf --json-schema-file": "there are no grammars",
    "--lora --lora-scaled --control-vector --control-vector-scaled": "there are no adapters",
    "-md --model-draft --spec-draft-model --spec-type --draft": "there is no speculative decoding",
    "--prompt-cache --prompt-cache-all --prompt-cache-ro": "sessions are not saved",
    "--mmap -dio --direct-io -ndio --no-direct-io": "use --load-mode",
    "-gan --grp-attn-n -gaw --grp-attn-w": "there is no self-extend; try --rope-scaling yarn",
}


def rows(tool: str) -> Iterator[tuple[str, Flag]]:
    """(group, flag) of a tool, in the order of the help."""
    for group, flags in (*flags_bench.GROUPS.items(), *GROUPS.items()):
        for flag in flags:
            if tool in flag.tools:
                yield group, flag
