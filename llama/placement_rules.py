"""Rules that send tensors to buffer types by their names: -ot, -cmoe, -ncmoe, -ncffn."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from pyggml.errors import ConfigError

CPU = "CPU"  # the host's plain memory, whatever its device is called
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE = r"\.ffn_(up|down|gate)\."
CACHE = "cache_"  # how the names of keys, values and states begin

POSIX_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
    "space": r"\s",
    "punct": "!-/:-@\\[-`{-~",
    "w": r"\w",
    "d": r"\d",
    "s": r"\s",
}
CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors in whose names the pattern is found go to the buffer type.

    `origin` is what the user gave, if that was a shorter word. Raises ConfigError.
    """

    pattern: str
    buft: str
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigError(f"{self}: the pattern is empty (.* stands for every tensor)")
        if not self.buft:
            raise ConfigError(f"{self}: there is no buffer type after the =")
        try:
            compiled(self.pattern)
        except re.error as e:
            place = f" at position {e.pos}" if e.pos is not None else ""
            raise ConfigError(
                f"{self}: {self.pattern!r} is no regular expression: {e.msg}{place}"
            ) from None

    def __str__(self) -> str:
        return self.origin or f"-ot {self.pattern}={self.buft}"

    def matches(self, name: str) -> bool:
        """Whether the pattern occurs anywhere in the name."""
        return compiled(self.pattern).search(name) is not None

    @property
    def names_caches(self) -> bool:
        """Whether keys, values and states are meant too: only by rules that name them."""
        return CACHE in self.pattern


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as C++ reads it; [:digit:] and its kin would mean something else in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "[[" is two plain brackets here
        return re.compile(_without_posix(pattern), re.ASCII)


def _without_posix(pattern: str) -> str:
    def members(match: re.Match[str]) -> str:
        if match[1] not in POSIX_CLASSES:
            known = ", ".join(f"[:{name}:]" for name in POSIX_CLASSES)
            raise re.error(f"there is no class [:{match[1]}:] (there are {known})")
        return POSIX_CLASSES[match[1]]

    parts = []
    for is_class, text in _pieces(pattern):
        parts.append(re.sub(r"\[:(\w*):\]", members, text) if is_class else text)
    return "".join(parts)


def _pieces(pattern: str) -> Iterator[tuple[bool, str]]:
    """The pattern cut into bracket expressions and what is between them."""
    start = 0
    for match in re.finditer(r"\\.|\[\^?\]?(?:\[:\w*:\]|\\.|[^\]\\])*\]", pattern, re.DOTALL):
        yield False, pattern[start : match.start()]
        yield match[0].startswith("["), match[0]
        start = match.end()
    yield False, pattern[start:]


# ---------------------------------------------------------------- from text
def parse_rules(text: str, separator: str = ",") -> tuple[Rule, ...]:
    """PATTERN=TYPE,PATTERN=TYPE: commas inside brackets, and all = but the last, are the pattern's.

    Raises ConfigError.
    """
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'":
        bare = bare[1:-1]  # of a shell that passed its quotes on
    pieces = [piece.strip() for piece in split_list(bare, separator)]
    rules = tuple(_rule(piece, text) for piece in pieces if piece)
    if not rules:
        raise ConfigError(f"--override-tensor {text!r}: there is no rule; give PATTERN=TYPE,...")
    return rules


def _rule(piece: str, text: str) -> Rule:
    pattern, equals, buft = piece.rpartition("=")
    if not equals:
        raise ConfigError(
            f"--override-tensor {text!r}: {piece!r} is no PATTERN=TYPE\n"
            r"a comma ends a rule; one that belongs to a pattern is written \, or [,]"
        )
    return Rule(pattern.strip(), buft.strip())


def split_list(text: str, separator: str = ",") -> list[str]:
    """At commas outside of brackets; at every comma if the brackets do not close."""
    pieces, start, closers, in_class, i = [], 0, list[str](), False, 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
            i += text.startswith(("[]", "[^"), i)
        elif c in CLOSING:
            closers.append(CLOSING[c])
        elif closers and c == closers[-1]:
            closers.pop()
        elif c == separator and not closers:
            pieces.append(text[start:i])
            start = i + 1
        i += 1
    return text.split(separator) if in_class or closers else [*pieces, text[start:]]


# ---------------------------------------------------------------- shorter words
def cpu_moe() -> tuple[Rule, ...]:
    """-cmoe: the experts of all layers on the CPU."""
    return (Rule(EXPERTS, CPU, "--cpu-moe"),)


def n_cpu_moe(n: int, flag: str = "--n-cpu-moe") -> tuple[Rule, ...]:
    """-ncmoe: the experts of the first n layers on the CPU. Raises ConfigError."""
    return _first_layers(n, EXPERTS, flag)


def n_cpu_ffn(n: int, flag: str = "--n-cpu-ffn") -> tuple[Rule, ...]:
    """-ncffn: the dense feed-forward of the first n layers on the CPU. Raises ConfigError."""
    return _first_layers(n, DENSE, flag)


def _first_layers(n: int, what: str, flag: str) -> tuple[Rule, ...]:
    if n < 0:
        raise ConfigError(f"{flag} {n}: a number of layers, 0 or more")
    if n == 0:
        return ()
    layers = "|".join(map(str, range(n)))
    return (Rule(rf"blk\.({layers}){what}", CPU, f"{flag} {n}"),)
