"""Short regular expressions for sets of tensors, which C++'s and Python's `regex` read alike.

Rules are searched for in names as `blk.12.ffn_up_exps.weight`; a dot stands for itself well enough
where it follows `blk` and a number.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_moe, parse_rules

Placed = tuple[int, str]  # a layer, and the short name of one of its matrices (ffn_up_exps)
Pairs = tuple[tuple[str, str], ...]  # patterns and buffer types


@dataclass(frozen=True, slots=True)
class Moved:
    """What does not lie where its layer does.

    `all` are the layers' matrices that could be moved, `on_cpu` those that are; `layers` names the
    device of each layer, "CPU" included. `names` are those of all tensors in the file; with
    `output` the matrix after the last layer is on the CPU too.
    """

    all: frozenset[Placed]
    on_cpu: frozenset[Placed]
    layers: Sequence[str]
    names: Collection[str]
    output: bool = False


OUTPUT, OUTPUT_RULE = "output.weight", ("^output.w", "CPU")


def shortest_flags(moved: Moved) -> str:
    """What to write after -ngl: -cmoe, -ncmoe N, or -ot with rules that are exact; may be ""."""
    wanted = frozenset(p for p in moved.on_cpu if moved.layers[p[0]] != "CPU")
    first = (OUTPUT_RULE,) if moved.output else ()
    if not wanted:
        return _override(first) if first else ""
    rest = [_override(first)] if first else []
    found = [" ".join((flag, *rest)) for flag in _moe_flags(moved, wanted)]
    for rules in (_by_projection(moved, wanted), _by_layer(moved, wanted), *_except(moved, wanted)):
        if is_exact((*first, *rules), moved):
            found.append(_override((*first, *rules)))
    return min(found, key=len)


def _override(rules: Pairs) -> str:
    return '-ot "' + ",".join(f"{pattern}={buft}" for pattern, buft in rules) + '"'


def rules_of(flags: str) -> tuple[Rule, ...]:
    """The loader's rules for what `shortest_flags` has written."""
    words, found = iter(shlex.split(flags)), list[Rule]()
    for word in words:
        if word == "-cmoe":
            found += cpu_moe()
        else:
            found += n_cpu_moe(int(next(words))) if word == "-ncmoe" else parse_rules(next(words))
    return tuple(found)


def is_exact(rules: Pairs, moved: Moved) -> bool:
    """Whether rules, the first that matches counts, put everything where it is to be."""
    patterns = [(re.compile(pattern, re.ASCII), buft) for pattern, buft in rules]
    known = {f"blk.{il}.{name}": (il, name) for il, name in moved.all}
    for name in moved.names:
        buft = next((b for pattern, b in patterns if pattern.search(name)), "")
        if name == OUTPUT and moved.output:
            if buft != "CPU":
                return False
            continue
        placed = known.get(name.removesuffix(".weight").removesuffix(".bias"))
        if placed is None:
            if buft:
                return False
            continue
        home = moved.layers[placed[0]]
        if (buft or home) != ("CPU" if placed in moved.on_cpu else home):
            return False
    return True


# ---------------------------------------------------------------- the whole rule
def _moe_flags(moved: Moved, wanted: frozenset[Placed]) -> Iterable[str]:
    """-cmoe and -ncmoe: all experts of all layers, or of the first ones."""
    experts = frozenset(p for p in moved.all if p[1].endswith("_exps"))
    if not experts or not wanted <= experts:
        return
    on_device = frozenset(p for p in experts if moved.layers[p[0]] != "CPU")
    if wanted == on_device:
        yield "-cmoe"
    n = 1 + max(il for il, _ in wanted)
    if wanted == frozenset(p for p in on_device if p[0] < n):
        yield f"-ncmoe {n}"


def _by_projection(moved: Moved, wanted: frozenset[Placed]) -> Pairs:
    """One rule for each set of layers that projections have in common."""
    layers_of: dict[str, frozenset[int]] = {}
    for name in sorted({name for _, name in wanted}):
        layers_of[name] = frozenset(il for il, n in wanted if n == name)
    groups: dict[frozenset[int], list[str]] = {}
    for name, layers in layers_of.items():
        groups.setdefault(layers, []).append(name)
    return tuple((_pattern(moved, layers, names), "CPU") for layers, names in groups.items())


def _by_layer(moved: Moved, wanted: frozenset[Placed]) -> Pairs:
    """One rule for each set of projections that layers have in common."""
    groups: dict[frozenset[str], set[int]] = {}
    for il in sorted({il for il, _ in wanted}):
        groups.setdefault(frozenset(n for i, n in wanted if i == il), set()).add(il)
    return tuple(
        (_pattern(moved, frozenset(layers), sorted(names)), "CPU")
        for names, layers in groups.items()
    )


def _except(moved: Moved, wanted: frozenset[Placed]) -> Iterable[Pairs]:
    """First what stays on its device, then everything else of the kind to the CPU."""
    names = sorted({name for _, name in wanted})
    kept = frozenset(p for p in moved.all if p[1] in names and p not in moved.on_cpu)
    kept = frozenset(p for p in kept if moved.layers[p[0]] != "CPU")
    devices = dict.fromkeys(moved.layers[il] for il, _ in sorted(kept))
    for split in (_by_projection, _by_layer):
        rules: Pairs = ()
        for device in devices:
            mine = frozenset(p for p in kept if moved.layers[p[0]] == device)
            rules += tuple((pattern, device) for pattern, _ in split(moved, mine))
        yield (*rules, (_pattern(moved, frozenset(range(len(moved.layers))), names), "CPU"))


def _pattern(moved: Moved, layers: frozenset[int], names: Sequence[str]) -> str:
    """Matrices of some layers; without the layers if these are all that have such matrices."""
    mine = frozenset(p for p in moved.all if p[1] in names)
    others = frozenset(il for il, _ in mine) - layers
    on_cpu = frozenset(il for il in others if moved.layers[il] == "CPU")
    what = _matrices(names, frozenset(name for _, name in moved.all))
    if others == on_cpu:  # a rule that keeps them on the CPU changes nothing
        return what.removeprefix("ffn.*")
    these = numbers(layers)
    return f"blk.({these}).{what}" if "|" in these else f"blk.{these}.{what}"


def _matrices(names: Sequence[str], known: frozenset[str]) -> str:
    """ffn_(down|up)_exps of such names; all experts together are ffn.*exps."""
    experts = sorted(n for n in known if n.endswith("_exps"))
    if sorted(names) == experts:
        return "ffn.*exps"
    suffix = "_exps" if names[0].endswith("_exps") else ".weight"
    middle = [n.removeprefix("ffn_").removesuffix("_exps") for n in names]
    return f"ffn_{_either(middle)}{suffix}"


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"


# ---------------------------------------------------------------- numbers
def numbers(values: Iterable[int]) -> str:
    """A short expression for some numbers, to stand in parentheses: 0 to 17 is `[02-9]|1[0-7]?`."""
    return _strings(frozenset(map(str, values)))


@cache
def _strings(texts: frozenset[str]) -> str:
    """The shorter of two ways: by the first digit or by the last."""
    if len(texts) == 1:
        return next(iter(texts))
    optional = "" in texts
    rest = texts - {""}
    ways = (_grouped(rest, first=True), _grouped(rest, first=False))
    best = min(ways, key=len)
    if not optional:
        return best
    return f"{best}?" if _is_atom(best) else f"({best})?"


def _is_atom(pattern: str) -> bool:
    return len(pattern) == 1 or pattern == r"\d" or re.fullmatch(r"\[[^\]]*\]", pattern) is not None


def _grouped(texts: frozenset[str], *, first: bool) -> str:
    rests: dict[str, set[str]] = {}
    for text in texts:
        digit, rest = (text[0], text[1:]) if first else (text[-1], text[:-1])
        rests.setdefault(digit, set()).add(rest)
    digits_of: dict[frozenset[str], list[str]] = {}
    for digit in sorted(rests):
        digits_of.setdefault(frozenset(rests[digit]), []).append(digit)
    parts = []
    for rest_set, digits in digits_of.items():
        inner = _strings(rest_set)
        inner = f"({inner})" if "|" in inner and not inner.startswith("(") else inner
        parts.append(_digits(digits) + inner if first else inner + _digits(digits))
    return "|".join(parts)


def _digits(digits: Sequence[str]) -> str:
    """One of some digits: 3, [357], [2-9], \\d."""
    if len(digits) == 1:
        return digits[0]
    if len(digits) == 10:
        return r"\d"
    text, run = "", [digits[0]]
    for digit in [*digits[1:], ""]:
        if digit and ord(digit) == ord(run[-1]) + 1:
            run.append(digit)
            continue
        text += f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(run)
        run = [digit]
    return f"[{text}]"
