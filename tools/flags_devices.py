"""The flags that say which devices work, and what of a model lies where."""

from collections.abc import Sequence

from pyggml.tools.flag import Flag

RULES = "rules"

DEVICES: Sequence[Flag] = (
    Flag(
        "-dev --device",
        "placement.devices",
        help="GPUs to use, in this order, or none",
        default="all",
        env="DEVICE",
        metavar="NAME,...",
    ),
    Flag(
        "-ngl --gpu-layers --n-gpu-layers",
        "placement.n_gpu_layers",
        help="layers to keep on GPUs, the last ones first: a number, auto or all",
        default="auto",
        env="N_GPU_LAYERS",
        metavar="N",
    ),
    Flag(
        "-sm --split-mode",
        "placement.split_mode",
        help="how several GPUs share a model: layer, or none (only --main-gpu)",
        default="layer",
        env="SPLIT_MODE",
        metavar="layer|none",
    ),
    Flag(
        "-ts --tensor-split",
        "placement.tensor_split",
        help="shares of the layers for each GPU, as 3,1 or 3/1",
        default="by free memory",
        env="TENSOR_SPLIT",
        metavar="N,...",
    ),
    Flag(
        "-mg --main-gpu",
        "placement.main_gpu",
        int,
        "the GPU of --split-mode none; below 0 no GPU",
        "0",
        "MAIN_GPU",
    ),
    Flag(
        "-ot --override-tensor",
        RULES,
        help="tensors whose names match a regular expression to a buffer type; of several rules "
        "the first that matches counts",
        env="OVERRIDE_TENSOR",
        metavar="REGEX=TYPE,...",
        repeat=True,
        ordered=True,
    ),
    Flag(
        "-cmoe --cpu-moe",
        RULES,
        value=True,
        help="all experts on the CPU: a rule like those of -ot",
        env="CPU_MOE",
        ordered=True,
    ),
    Flag(
        "-ncmoe --n-cpu-moe",
        RULES,
        int,
        "the experts of the first N layers on the CPU: a rule like those of -ot",
        env="N_CPU_MOE",
        repeat=True,
        ordered=True,
    ),
    Flag(
        "-ncffn --n-cpu-ffn",
        RULES,
        int,
        "the feed-forward (not the experts) of the first N layers on the CPU: a rule as well",
        env="N_CPU_FFN",
        repeat=True,
        ordered=True,
    ),
    Flag(
        "-kvo --kv-offload/-nkvo --no-kv-offload",
        "context.kv_offload",
        bool,
        "keys and values with their layers; else they, and attention, on the CPU",
        "on",
        "KV_OFFLOAD",
    ),
    Flag(
        "--op-offload/--no-op-offload",
        "context.op_offload",
        bool,
        "send products of long prompts to a GPU when their weights are on the CPU",
        "on",
    ),
    Flag(
        "--no-host",
        "placement.no_host",
        value=True,
        help="no pinned memory for weights of the CPU, so that they can be repacked",
        env="NO_HOST",
    ),
    Flag(
        "--dry-run",
        "dry_run",
        value=True,
        help="only tell what would lie and run where, and leave; a file's header is enough",
    ),
    Flag("--json", "json", value=True, help="with --dry-run: as one JSON object"),
    Flag(
        "--sched-graph",
        "sched_graph",
        help="write which node runs where, and why, to a file: .html, .svg, .dot or .json",
        metavar="FILE",
    ),
)
