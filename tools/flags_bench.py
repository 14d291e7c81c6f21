"""The flags of pyllama-bench: as llama-bench spells them, each test parameter a list of values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyggml.tools.flag import BENCH, Flag
from pyggml.tools.flags_threads import NUMA

ONLY = (BENCH,)
FORMATS = ("csv", "json", "jsonl", "md", "sql")


def _list(names: str, target: str, text: str, default: str = "", metavar: str = "N,...") -> Flag:
    """A test parameter: values, ranges and repetitions of the flag add up."""
    return Flag(names, target, str, text, default, metavar=metavar, repeat=True, tools=ONLY)


GROUPS: Mapping[str, Sequence[Flag]] = {
    "Tests: lists of values; numbers also as FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR": (
        _list("-m --model", "model", "GGUF files", metavar="FILE,..."),
        _list("-p --n-prompt", "n_prompt", "prompts of so many tokens (pp)", "512"),
        _list("-n --n-gen", "n_gen", "generations of so many tokens (tg)", "128"),
        _list("-pg", "n_pg", "a prompt and a generation after it", metavar="PP,TG"),
        _list("-d --n-depth", "n_depth", "tokens that are in the context before", "0"),
        _list("-b --batch-size", "n_batch", "logical batch", "2048"),
        _list("-ub --ubatch-size", "n_ubatch", "physical batch", "512"),
        _list("-ctk --cache-type-k", "type_k", "type of cached keys", "f16", "TYPE,..."),
        _list("-ctv --cache-type-v", "type_v", "type of cached values", "f16", "TYPE,..."),
        _list("-t --threads", "n_threads", "threads", "all cores"),
        _list("-fa --flash-attn", "flash_attn", "", "auto", "on|off|auto,..."),
        _list("-lm --load-mode", "load_mode", "how weights get into memory", "auto", "MODE,..."),
        _list("-mmp --mmap", "mmap", "older spelling: 0 is -lm none, 1 is -lm mmap", "", "0|1,..."),
        _list(
            "-rpk --repack",
            "repack",
            "re-lay weights into panels while loading",
            "1",
            "0|1,...",
        ),
        Flag(
            "-nr --no-repack",
            "no_repack",
            value=True,
            help="pyllama-cli's spelling of --repack 0",
            tools=ONLY,
        ),
    ),
    "Devices and placement: lists of values as well": (
        _list("-ngl --n-gpu-layers", "n_gpu_layers", "layers on GPUs: numbers, auto, all", "auto"),
        _list("-ncmoe --n-cpu-moe", "n_cpu_moe", "experts of so many layers on the CPU", "0"),
        _list("-sm --split-mode", "split_mode", "", "layer", "layer|none,..."),
        _list("-mg --main-gpu", "main_gpu", "the GPU of -sm none", "0"),
        _list(
            "-dev --device",
            "devices",
            "GPUs; those of one test joined by /",
            "auto",
            "NAME/NAME,...",
        ),
        _list(
            "-ts --tensor-split",
            "tensor_split",
            "shares of the layers for each GPU; those of one test joined by /",
            "by free memory",
            "N/N,...",
        ),
        _list(
            "-ot --override-tensor",
            "overrides",
            "rules as in pyllama-cli, those of one test joined by ; (none: a test without rules)",
            "none",
            "REGEX=TYPE;...,...",
        ),
        _list("-nkvo --no-kv-offload", "no_kv_offload", "caches on the CPU", "0", "0|1,..."),
        _list("-nopo --no-op-offload", "no_op_offload", "", "0", "0|1,..."),
        _list("--no-host", "no_host", "no pinned memory for weights", "0", "0|1,..."),
    ),
    "Threads: lists of values as well; llama.cpp's side runs with the same": (
        _list(
            "-C --cpu-mask",
            "cpu_mask",
            "CPUs that threads may use, in hexadecimal: bit i is CPU i; 0x0 is all",
            "all",
            "HEX,...",
        ),
        _list(
            "-Cr --cpu-range",
            "cpu_range",
            "CPUs that threads may use, in addition to the mask's",
            "all",
            "LO-HI,...",
        ),
        _list(
            "--cpu-strict",
            "cpu_strict",
            "1: every thread has one of these CPUs to itself",
            "0",
            "0|1,...",
        ),
        _list(
            "--poll",
            "poll",
            "how long threads wait awake for work: 0 not at all, 100 longest",
            "50",
        ),
        Flag(
            "--prio",
            "prio",
            ("-1", "0", "1", "2", "3"),
            "priority of the process and of llama.cpp's: low, normal, medium, high, realtime",
            "0",
            tools=ONLY,
        ),
        replace(NUMA, target="numa", env="", tools=ONLY),
    ),
    "One operation instead of a model, beside what the machine can do at most": (
        Flag(
            "--op",
            "op",
            ("mul_mat", "mul_mat_id"),
            "time this operation with -t, --repack and -r; weights are random",
            tools=ONLY,
        ),
        _list("--types", "op_types", "types of weights", "q4_0,q8_0,q4_K,q6_K,f16", "TYPE,..."),
        _list(
            "--shapes",
            "op_shapes",
            "rows of weights, values per row, columns of activations; up to 8 columns use copies"
            " of a small matrix in turn, so that weights come from memory",
            "4096x4096x1,4096x4096x512",
            "MxKxN,...",
        ),
        Flag(
            "--experts",
            "op_experts",
            help="of mul_mat_id: how many there are, and how many a column uses",
            default="8,2",
            metavar="ALL,USED",
            tools=ONLY,
        ),
    ),
    "How it is measured": (
        Flag("-r --repetitions", "repetitions", int, "of each test", "5", tools=ONLY),
        Flag("--delay", "delay", int, "seconds of rest before each test", "0", tools=ONLY),
        Flag(
            "--no-warmup",
            "no_warmup",
            value=True,
            help="no untimed run before (kernels are compiled before all the same)",
            tools=ONLY,
        ),
        Flag("--progress", "progress", value=True, help="say what is running", tools=ONLY),
    ),
    "Output": (
        Flag("-o --output", "output", FORMATS, "on stdout", "md", tools=ONLY),
        Flag("-oe --output-err", "output_err", ("none", *FORMATS), "on stderr", "none", tools=ONLY),
    ),
    "Comparison": (
        Flag(
            "--vs-llama-cpp",
            "reference",
            help="run every test with llama.cpp as well, in turns: `llama_cpp` or `xllamacpp` (the"
            " Python packages; without a value the first that is installed), or the path of a"
            " llama-bench binary",
            metavar="[WHICH]",
            optional="auto",
            tools=ONLY,
        ),
        Flag(
            "--memory",
            "memory",
            value=True,
            help="also the peak resident memory of a process that runs the test once",
            tools=ONLY,
        ),
        Flag(
            "--startup --first-token",
            "startup",
            value=True,
            help="instead of the tests: seconds from starting the command with -m and -t to its"
            " first token",
            tools=ONLY,
        ),
    ),
}
