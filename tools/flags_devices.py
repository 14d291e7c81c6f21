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
)
