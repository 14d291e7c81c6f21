"""The flags that say which CPUs work, how urgently, and how threads wait."""

from collections.abc import Iterator, Sequence

from pyggml.tools.flag import Flag


def _flags(batch: bool) -> Iterator[Flag]:
    """The flags of generation, or their twins for prompts."""
    short, end = ("b", "-batch") if batch else ("", "")
    target = "_batch" if batch else ""
    who = "for prompts: " if batch else ""

    def default(text: str, like: str) -> str:
        return f"as {like}" if batch else text

    yield Flag(
        f"-C{short} --cpu-mask{end}",
        f"cpu.cpu_mask{target}",
        help=f"{who}CPUs that threads may use, in hexadecimal: bit i is CPU i",
        default=default("all", "-C and -Cr"),
        metavar="HEX",
    )
    yield Flag(
        f"-Cr{short} --cpu-range{end}",
        f"cpu.cpu_range{target}",
        help=f"{who}CPUs that threads may use, in addition to the mask's",
        default=default("all", "-C and -Cr"),
        metavar="LO-HI",
    )
    yield Flag(
        f"--cpu-strict{end}",
        f"cpu.cpu_strict{target}",
        int,
        f"{who}1: every thread has one of these CPUs to itself",
        default("0", "--cpu-strict"),
        metavar="0|1",
    )
    yield Flag(
        f"--prio{end}",
        f"cpu.prio{target}",
        int,
        f"{who}priority of threads: -1 low, 0 normal, 1 medium, 2 high, 3 realtime",
        default("0", "--prio"),
    )
    yield Flag(
        f"--poll{end}",
        f"cpu.poll{target}",
        int,
        f"{who}how long threads wait awake for work: 0 not at all, 100 longest",
        default("50", "--poll"),
    )


NUMA = Flag(
    "--numa",
    "model.numa",
    ("distribute", "isolate", "numactl"),
    "on machines with several memory nodes: use all in turn, only the one pyggml runs on,"
    " or those that numactl chose",
    env="NUMA",
)
THREADS: Sequence[Flag] = (*_flags(batch=False), *_flags(batch=True), NUMA)
