"""The flags that put cards into a machine that has none."""

from collections.abc import Sequence

from pyggml.tools.flag import ALL, Flag

SIMULATED: Sequence[Flag] = (
    Flag(
        "--sim-device",
        "sim_device",
        help="a simulated card, as rtx3060:12GiB,pcie=16; its times are modelled (repeat for more)",
        env="SIM_DEVICE",
        metavar="NAME[:MEM][,OPTION=VALUE...]",
        repeat=True,
        tools=ALL,
    ),
    Flag(
        "--sim-trace",
        "sim_trace",
        help="write what the simulated cards did as a Chrome trace (for ui.perfetto.dev)",
        metavar="FILE",
    ),
)
