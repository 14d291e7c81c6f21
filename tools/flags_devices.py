"""The flags that say which devices work, and what of a model lies where."""

from collections.abc import Sequence

from pyggml.tools.flag import Flag

DEVICES: Sequence[Flag] = (
    Flag(
        "-ngl --gpu-layers --n-gpu-layers",
        "n_gpu_layers",
        help="layers to keep on a GPU: a number, auto or all",
        default="auto",
        env="N_GPU_LAYERS",
        metavar="N",
    ),
    Flag(
        "--dry-run",
        "dry_run",
        value=True,
        help="only tell what would lie and run where, and leave; a file's header is enough",
    ),
    Flag("--json", "json", value=True, help="with --dry-run: as one JSON object"),
)
