"""What is measured: lists of parameters, and their product in llama-bench's order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml.errors import ConfigError, UserError
from pyggml.llama.context_params import CACHE_TYPES, FLASH_ATTN
from pyggml.llama.cpu_params import CpuParams
from pyggml.llama.loader import LOAD_MODES
from pyggml.llama.placement_params import PlacementParams
from pyggml.threads import POLL, POLLS, ThreadParams, parse_mask, parse_range, usable_cpus
from pyggml.tools import bench_placement

Parse = Callable[[str, str], list[Any]]  # flag, text -> values; raises ConfigError
Grid = Mapping[str, tuple[Any, ...]]

RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
MAX_VALUES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of the table: n_prompt tokens at once, then n_gen one by one, after n_depth."""

    model: str
    n_threads: int
    cpu_mask: str = ""  # of CpuParams, as the next three
    cpu_range: str = ""
    cpu_strict: int = 0
    poll: int = POLL
    numa: str = ""
    load_mode: str = "auto"
    repack: bool = True
    n_gpu_layers: int = -1  # as the next seven: see bench_placement
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    devices: str = bench_placement.AUTO
    tensor_split: str = bench_placement.NO_SPLIT
    overrides: str = bench_placement.NONE
    no_host: bool = False
    no_kv_offload: bool = False
    no_op_offload: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    n_depth: int = 0
    n_prompt: int = 0
    n_gen: int = 0

    @property
    def model_key(self) -> tuple[object, ...]:
        """The model is loaded anew where this changes."""
        return self.model, self.load_mode, self.repack, self.numa, self.placement

    @property
    def placement(self) -> PlacementParams:
        """What lies where."""
        fields = {name: getattr(self, name) for name in bench_placement.DEFAULTS}
        return bench_placement.placement(fields)

    @property
    def cpu(self) -> CpuParams:
        """Where threads run and how they wait; all tests together have one priority."""
        return CpuParams(**{name: getattr(self, name) for name in CPU_FIELDS})

    @property
    def mask(self) -> str:
        """The CPUs of mask and range as llama-bench takes them; 0x0: all."""
        return hex(sum(1 << cpu for cpu in self.cpu.cpus or ()))

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        return self.n_prompt + self.n_gen + self.n_depth

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, pp512 @ d4096."""
        parts = (("pp", self.n_prompt), ("tg", self.n_gen))
        name = "+".join(f"{kind}{n}" for kind, n in parts if n)
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


# ---------------------------------------------------------------- lists of values
def numbers(flag: str, text: str) -> list[int]:
    """Values and ranges: "1,2", "1-4", "128-512+128", "1-64*2"."""
    found: list[int] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{flag} {text}: {part!r} is neither a number nor a range\n"
                "ranges are FIRST-LAST, FIRST-LAST+STEP and FIRST-LAST*FACTOR"
            )
        first, last, sign, step = match.groups()
        found += _range(f"{flag} {text}", int(first), int(last or first), sign, int(step or 1))
    return found


def _range(what: str, first: int, last: int, sign: str | None, step: int) -> Iterator[int]:
    if last < first:
        raise ConfigError(f"{what}: the range ends before it begins")
    value = first
    for _ in range(MAX_VALUES):
        yield value
        following = value * step if sign == "*" else value + step
        if following > last or first == last:
            return
        if following <= value:
            raise ConfigError(f"{what}: the range never reaches its end")
        value = following
    raise ConfigError(f"{what}: that is more than {MAX_VALUES} values")


def at_least(low: int) -> Parse:
    """Numbers that are not smaller."""

    def parse(flag: str, text: str) -> list[int]:
        found = numbers(flag, text)
        if min(found) < low:
            raise ConfigError(f"{flag} {text}: it must be at least {low}")
        return found

    return parse


def between(low: int, high: int) -> Parse:
    """Numbers of a range."""

    def parse(flag: str, text: str) -> list[int]:
        found = numbers(flag, text)
        if min(found) < low or max(found) > high:
            raise ConfigError(f"{flag} {text}: allowed are {low} to {high}")
        return found

    return parse


def masks(flag: str, text: str) -> list[str]:
    """Hexadecimal masks of CPUs; of 0, as in llama-bench, nothing is left: all CPUs."""
    found = ["" if re.fullmatch(r"(0[xX])?0+", m.strip()) else m.strip() for m in text.split(",")]
    for mask in filter(None, found):
        parse_mask(mask, flag, usable_cpus())
    return found


def ranges(flag: str, text: str) -> list[str]:
    """Ranges of CPUs: "0-3"."""
    found = [part.strip() for part in text.split(",")]
    for part in found:
        parse_range(part, flag, usable_cpus())
    return found


def one_of(choices: Mapping[str, Any], *, any_case: bool = False) -> Parse:
    """Names, and what each stands for; `any_case`: capitals or not."""
    known = {name.lower(): value for name, value in choices.items()} if any_case else choices

    def parse(flag: str, text: str) -> list[Any]:
        found = []
        for given in map(str.strip, text.split(",")):
            name = given.lower() if any_case else given
            if name not in known:
                raise ConfigError(f"{flag} {given}: one of {', '.join(choices)}")
            found.append(known[name])
        return found

    return parse


def _names(names: Sequence[str]) -> Parse:
    return one_of({name: name for name in names})


def files(flag: str, text: str) -> list[str]:
    """Paths of files that exist."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if not Path(name).is_file():
            raise UserError(f"{flag} {name}: there is no such file")
    return found


def pair(flag: str, text: str) -> list[tuple[int, int]]:
    """One prompt and generation: "512,128"."""
    found = two_numbers(text)
    if found is None:
        raise ConfigError(f"{flag} {text}: it takes two numbers, as in {flag} 512,128")
    return [found]


def two_numbers(text: str) -> tuple[int, int] | None:
    """Those of "512,128"; None: it is something else."""
    match = re.fullmatch(r"(\d+),(\d+)", text.replace(" ", ""))
    return (int(match[1]), int(match[2])) if match else None


def n_cores() -> int:
    """Cores that this process may use."""
    return len(usable_cpus())


# ---------------------------------------------------------------- the parameters
@dataclass(frozen=True, slots=True)
class Parameter:
    """A list that flags give; `default` holds when they do not."""

    field: str
    flag: str
    parse: Parse
    default: tuple[Any, ...] = ()


ZERO_ONE = {"0": False, "1": True}
# llama.cpp's numbers
FLASH_ATTN_NUMBERS = {"on": 1, "off": 0, "auto": -1}
FLASH_ATTN_NAMES = {
    **{name: name for name in FLASH_ATTN},
    **{str(number): name for name, number in FLASH_ATTN_NUMBERS.items()},
}

# a field of CpuParams each
CPU = (
    Parameter("cpu_mask", "-C", masks, ("",)),
    Parameter("cpu_range", "-Cr", ranges, ("",)),
    Parameter("cpu_strict", "--cpu-strict", between(0, 1), (0,)),
    Parameter("poll", "--poll", between(*POLLS), (POLL,)),
)
CPU_FIELDS = tuple(parameter.field for parameter in CPU)
LOAD_MODE = Parameter("load_mode", "-lm", _names(LOAD_MODES), ("auto",))
REPACK = Parameter("repack", "--repack", one_of(ZERO_ONE), (True,))
THREADS = Parameter("n_threads", "-t", at_least(1))
PLACEMENT = tuple(
    Parameter(field, flag, parse, (bench_placement.DEFAULTS[field],))
    for field, flag, parse in (
        ("n_gpu_layers", "-ngl", bench_placement.gpu_layers),
        ("n_cpu_moe", "-ncmoe", at_least(0)),
        ("split_mode", "-sm", bench_placement.split_modes),
        ("main_gpu", "-mg", bench_placement.main_gpus),
        ("devices", "-dev", bench_placement.device_lists),
        ("tensor_split", "-ts", bench_placement.splits),
        ("overrides", "-ot", bench_placement.rule_sets),
        ("no_host", "--no-host", one_of(ZERO_ONE)),
    )
)
OFFLOAD = (
    Parameter("no_op_offload", "-nopo", one_of(ZERO_ONE), (False,)),
    Parameter("no_kv_offload", "-nkvo", one_of(ZERO_ONE), (False,)),
)

# from the outermost loop to the innermost
OUTER = (
    Parameter("model", "-m", files),
    *PLACEMENT[:3],
    LOAD_MODE,
    *PLACEMENT[3:],
    REPACK,
    OFFLOAD[0],
    Parameter("n_batch", "-b", at_least(1), (2048,)),
    Parameter("n_ubatch", "-ub", at_least(1), (512,)),
    Parameter("type_k", "-ctk", _names(tuple(CACHE_TYPES)), ("f16",)),
    Parameter("type_v", "-ctv", _names(tuple(CACHE_TYPES)), ("f16",)),
    OFFLOAD[1],
    Parameter("flash_attn", "-fa", one_of(FLASH_ATTN_NAMES), ("auto",)),
    THREADS,
    *CPU[:3],
    Parameter("n_depth", "-d", at_least(0), (0,)),
    CPU[3],
)
TESTS = (
    Parameter("n_prompt", "-p", at_least(0), (512,)),
    Parameter("n_gen", "-n", at_least(0), (128,)),
    Parameter("n_pg", "-pg", pair),
)
MMAP = Parameter("mmap", "-mmp", one_of({"0": "none", "1": "mmap"}))


def parse_grid(values: Mapping[str, Any]) -> Grid:
    """The lists of all parameters, defaults where nothing was given."""
    if not values.get("model"):
        raise UserError("--model is required: pyllama-bench -m MODEL.gguf")
    grid = {p.field: chosen(p, values) for p in (*OUTER, *TESTS)}
    grid["n_threads"] = _n_threads(values)
    grid["numa"] = (values.get("numa", ""),)
    grid["load_mode"] = _given(LOAD_MODE, values) + _given(MMAP, values) or LOAD_MODE.default
    grid["repack"] = layouts(values)
    return grid


def layouts(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether weights are repacked: --repack, and pyllama-cli's --no-repack."""
    refused = (False,) if values.get("no_repack") else ()
    return _given(REPACK, values) + refused or REPACK.default


def thread_params(values: Mapping[str, Any]) -> list[ThreadParams]:
    """The product of -t and the flags of CPUs, without a model."""
    lists = [chosen(p, values) for p in CPU]
    return [
        CpuParams(**dict(zip(CPU_FIELDS, cpu, strict=True))).generation(n)
        for n, *cpu in itertools.product(_n_threads(values), *lists)
    ]


def _n_threads(values: Mapping[str, Any]) -> tuple[int, ...]:
    return chosen(THREADS, values) or (n_cores(),)


def chosen(parameter: Parameter, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """A parameter's list, or its default."""
    return _given(parameter, values) or parameter.default


def _given(parameter: Parameter, values: Mapping[str, Any]) -> tuple[Any, ...]:
    texts = values.get(parameter.field, ())
    return tuple(v for text in texts for v in parameter.parse(parameter.flag, text))


def varied(grid: Grid) -> list[str]:
    """Parameters that are not at their defaults, or have several values: the table shows them."""
    shown = (
        "n_batch",
        "n_ubatch",
        "type_k",
        "type_v",
        "flash_attn",
        "load_mode",
        "repack",
        *(parameter.field for parameter in (*PLACEMENT, *OFFLOAD)),
        *CPU_FIELDS,
        "numa",
    )
    defaults = {"numa": ("",), **{p.field: p.default for p in OUTER}}
    return [field for field in shown if grid[field] != defaults[field]]


def tasks(grid: Grid) -> list[Task]:
    """The product; in each place all prompts, then all generations, then all pairs."""
    works = [{"n_prompt": n} for n in grid["n_prompt"] if n]
    works += [{"n_gen": n} for n in grid["n_gen"] if n]
    works += [{"n_prompt": p, "n_gen": g} for p, g in grid["n_pg"] if p or g]
    names = ["numa", *(parameter.field for parameter in OUTER)]
    places = itertools.product(*(grid[name] for name in names))
    found = [Task(**dict(zip(names, place, strict=True)), **w) for place in places for w in works]
    if not found:
        raise UserError("nothing to measure: -p, -n and -pg are all 0")
    return found
