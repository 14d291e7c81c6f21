"""-fit: chooses context, layers and experts so that everything fits (llama.cpp's algorithm).

Sizes are measured with planned models, never guessed. First the context shrinks, if the user has
not chosen it. Then layers go to devices from the last one on, of mixtures without their experts;
then the experts of as many layers as there is room for, and at last a part of one more layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pyggml.errors import ConfigError
from pyggml.llama.memory_table import DeviceUse
from pyggml.llama.placement_params import ALL_LAYERS, AUTO, PlacementParams
from pyggml.llama.placement_rules import CPU, Rule
from pyggml.llama.planner_rules import numbers

log = logging.getLogger("pyggml.fit")

MIB = 1 << 20
CTX_STEP = 256

# the devices (without the CPU, if there are others) with a placement and a size of context
Measure = Callable[[PlacementParams, int], Sequence[DeviceUse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the algorithm has to know of a model; `n_layer` without the output."""

    n_layer: int
    has_gpu: bool
    n_dense: int  # so many first layers have no experts
    has_experts: bool
    n_ctx_train: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was chosen; `problem` says why it does not leave as much free as was asked for."""

    placement: PlacementParams
    n_ctx: int
    devices: tuple[DeviceUse, ...]
    changed: bool = False
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether no device is asked for more than it has."""
        return all(d.free >= 0 for d in self.devices)

    @property
    def line(self) -> str:
        """The choice, and what it leaves free or lacks."""
        free = [f"{d.free // MIB:,} MiB of {d.name}" for d in self.devices if d.free >= 0]
        lacking = [f"{-d.free // MIB:,} MiB of {d.name}" for d in self.devices if d.free < 0]
        parts = [f"leaves {', '.join(free)} free"] if free else []
        parts += [f"lacks {', '.join(lacking)}"] if lacking else []
        return f"{self.command} {' and '.join(parts)}"

    @property
    def command(self) -> str:
        """The choice in words of the command line."""
        p = self.placement
        words = [f"-c {self.n_ctx}"]
        if p.n_gpu_layers != AUTO:
            words.append(f"-ngl {'all' if p.n_gpu_layers == ALL_LAYERS else p.n_gpu_layers}")
        if p.tensor_split:
            words.append(f"-ts {','.join(f'{share:g}' for share in p.tensor_split)}")
        if p.rules:
            rules = ",".join(f"{rule.pattern}={rule.buft}" for rule in p.rules)
            words.append(f'-ot "{rules}"')
        return " ".join(words)


def fit(params: PlacementParams, n_ctx: int, facts: Facts, measure: Measure) -> Fitted:
    """Parameters that fit; `n_ctx` 0 was not chosen by the user. Raises ConfigError."""
    return _Fit(params, facts, measure).run(n_ctx)


def what_is_given(params: PlacementParams, n_devices: int) -> list[str]:
    """Flags with which the user has decided what lies where."""
    is_split = n_devices > 1 and any(params.tensor_split)
    return [
        *(["--gpu-layers"] if params.n_gpu_layers != AUTO else []),
        *(["--tensor-split"] if is_split else []),
        *dict.fromkeys(str(rule) for rule in params.rules),
    ]


# ---------------------------------------------------------------- layers of a device
class Part(Enum):
    """What a layer that is not whole sends elsewhere: a pattern behind `blk.N.`."""

    EXPERTS = r"ffn_(up|down|gate_up|gate)_(ch|)exps"
    DOWN = r"ffn_down.*"
    GATE = r"ffn_(gate|gate_up|down).*"
    FEED_FORWARD = r"ffn_(up|gate_up|gate|down).*"


@dataclass(frozen=True, slots=True)
class Share:
    """The layers of one device: whole ones, then `n_part` without something.

    All but the first of these lack their experts, the first lacks `part`, which is on `spill`.
    """

    n_layer: int = 0
    n_part: int = 0
    part: Part = Part.EXPERTS
    spill: str = CPU

    def without(self, n: int) -> Share:
        """n layers less, of those that are not whole."""
        return replace(self, n_layer=self.n_layer - n, n_part=self.n_part - n)


Shares = tuple[Share, ...]


def _with(shares: Shares, i: int, share: Share) -> Shares:
    return (*shares[:i], share, *shares[i + 1 :])


def _convert(shares: Shares, to: int, n: int) -> Shares:
    """Make n layers whole, the first that `to` or later ones have in part, and give them to it."""
    left = n
    for i in range(to, len(shares)):
        some = min(left, shares[i].n_part)
        shares = _with(shares, i, shares[i].without(some))
        left -= some
    return _with(shares, to, replace(shares[to], n_layer=shares[to].n_layer + n))


def _false_position(
    low: int, high: int, room_low: int, room_high: int, room: Callable[[int], int]
) -> int:
    """The largest number whose room is not negative; that of `low` is not, that of `high` is."""
    while high - low > 1:
        step = (high - low) * max(0, room_low) // max(1, room_low - room_high)
        middle = low + min(max(step, 1), high - low - 1)
        found = room(middle)
        if found >= 0:
            low, room_low = middle, found
        else:
            high, room_high = middle, found
    return low


# ---------------------------------------------------------------- the algorithm
class _Fit:
    """One search; `n_ctx` is settled before layers move."""

    def __init__(self, params: PlacementParams, facts: Facts, measure: Measure) -> None:
        self.params = params
        self.facts = facts
        self._measure = measure
        self._known: dict[tuple[PlacementParams, int], tuple[DeviceUse, ...]] = {}
        self.n_ctx = self.n_ctx_wanted = 0
        self.margins: tuple[int, ...] = ()

    def run(self, n_ctx: int) -> Fitted:
        self.n_ctx = self.n_ctx_wanted = n_ctx or self.facts.n_ctx_train
        devices = self.measure(self.params)
        self.margins = _margins(self.params.fit_target, devices)
        if self._is_enough(devices):
            free = min(d.free for d in devices) // MIB
            log.info("will leave at least %d MiB free, no changes needed", free)
            return Fitted(self.params, self.n_ctx, devices)
        if n_ctx == 0:
            devices = self._shrink_context(devices)
        if self._is_enough(devices):
            return self._result(self.params)
        if problem := self._hands_tied(len(devices)):
            return self._result(self.params, problem)
        return self._result(self._distribute(devices))

    def measure(self, params: PlacementParams) -> tuple[DeviceUse, ...]:
        """The devices with a placement and the present context; each is tried once."""
        key = params, self.n_ctx
        if key not in self._known:
            self._known[key] = tuple(self._measure(params, self.n_ctx))
        return self._known[key]

    def _room(self, devices: Sequence[DeviceUse]) -> list[int]:
        """Bytes of each device beyond its margin; negative: too few."""
        return [d.free - margin for d, margin in zip(devices, self.margins, strict=True)]

    def _is_enough(self, devices: Sequence[DeviceUse]) -> bool:
        return min(self._room(devices)) >= 0

    def _result(self, params: PlacementParams, problem: str = "") -> Fitted:
        devices = self.measure(params)
        if not problem and not self._is_enough(devices):
            problem = "no placement leaves as much free as --fit-target asks for"
        changed = params != self.params or self.n_ctx != self.n_ctx_wanted
        return Fitted(params, self.n_ctx, devices, changed, problem)

    # ------------------------------------------------------------ context
    def _shrink_context(self, devices: tuple[DeviceUse, ...]) -> tuple[DeviceUse, ...]:
        """The largest context that all devices together have room for."""
        most = self.n_ctx
        least = min(most, max(CTX_STEP, self.params.fit_ctx))
        is_tied = bool(self._hands_tied(len(devices)))
        if least == most or (sum(self._room(devices)) >= 0 and not is_tied):
            return devices
        room = self._room_in_all(devices)
        room_of_least = self._room_of_context(least)
        if room_of_least >= 0:
            # the largest that was tried may be no multiple, and does not fit anyway
            low, high = -(-least // CTX_STEP), -(-most // CTX_STEP)
            steps = _false_position(
                low, high, room_of_least, room, lambda n: self._room_of_context(n * CTX_STEP)
            )
            self.n_ctx = steps * CTX_STEP
        log.info("context size reduced from %d to %d", most, self.n_ctx)
        return self.measure(self.params)

    def _room_of_context(self, n_ctx: int) -> int:
        self.n_ctx = n_ctx
        return self._room_in_all(self.measure(self.params))

    def _room_in_all(self, devices: Sequence[DeviceUse]) -> int:
        """What all devices together have room for; if layers cannot move, the fullest one."""
        rooms = self._room(devices)
        if self._hands_tied(len(devices)):
            return min(rooms)
        return sum(rooms) - self._rounding(devices)

    def _rounding(self, devices: Sequence[DeviceUse]) -> int:
        """What several devices are expected to waste, since layers are given as a whole."""
        if len(devices) == 1:
            return 0
        layer = sum(d.use.model for d in devices) // max(1, self.facts.n_layer)
        return (len(devices) + 1) * layer // (6 if self.facts.has_experts else 2)

    def _hands_tied(self, n_devices: int) -> str:
        """Why layers must stay where they are; empty: they need not."""
        if not self.facts.has_gpu:
            return "there is no GPU, and the host has too little memory"
        given = what_is_given(self.params, n_devices)
        if not given:
            return ""
        some = f"{', '.join(given[:3])}{' ...' * (len(given) > 3)}"
        return f"less is free than --fit-target asks for, but what was given stays: {some}"

    # ------------------------------------------------------------ layers
    def _distribute(self, devices: tuple[DeviceUse, ...]) -> PlacementParams:
        shares = (Share(),) * len(devices)
        for i in range(len(devices) - 1, -1, -1):
            shares = self._fill(shares, i)
        if self.facts.has_experts and self._has_surplus():
            last = len(devices) - 1
            first_used = next((i for i, s in enumerate(shares) if s.n_layer), last)
            for i in range(first_used + 1):
                shares = self._fill_whole(shares, i)
        return self._placement(shares)

    def _has_surplus(self) -> bool:
        """Whether there is room for some experts beside everything else."""
        everywhere = Rule(rf"blk\.\d+\.{Part.EXPERTS.value}", CPU)
        room = sum(self._room(self.measure(replace(self.params, rules=(everywhere,)))))
        log.info("with only dense weights %d MiB are left in total", room // MIB)
        return room > 0

    def _fill(self, shares: Shares, i: int) -> Shares:
        """As many of the layers that nobody has for device i; of mixtures without experts."""
        is_last = i == len(shares) - 1

        def given(n: int) -> Shares:
            # the output layer is the last one, and never a part
            n_part = max(0, n - is_last) if self.facts.has_experts else 0
            return _with(shares, i, Share(n, n_part))

        left = self.facts.n_layer + 1 - sum(s.n_layer for s in shares)
        return given(self._most(left, given, i))

    def _fill_whole(self, shares: Shares, i: int) -> Shares:
        """As many whole layers as fit for device i, and a part of one more."""
        convertible = sum(s.n_part for s in shares[i:])
        n = self._most(convertible, lambda n: _convert(shares, i, n), i)
        shares = _convert(shares, i, n)
        if n == convertible:
            return shares
        return self._with_part(shares, i)

    def _with_part(self, shares: Shares, i: int) -> Shares:
        """One more layer, of which as much as fits; the rest overflows to the next device."""
        spill = self._buffer_type(i + 1)
        grown = _convert(shares, i, 1)
        more = replace(grown[i], n_part=grown[i].n_part + 1, spill=spill)
        best = shares
        for part, then in (
            (Part.GATE, (Part.DOWN,)),
            (Part.FEED_FORWARD, ()),
        ):
            tried = _with(grown, i, replace(more, part=part))
            if not self._fits_from(tried, i):
                continue
            best = tried
            for better in then:
                tried = _with(grown, i, replace(more, part=better))
                best = tried if self._fits_from(tried, i) else best
            break
        return best

    def _buffer_type(self, i: int) -> str:
        devices = self.measure(self.params)
        return devices[i].name if i < len(devices) else CPU

    def _most(self, n: int, given: Callable[[int], Shares], i: int) -> int:
        """The largest number up to n that device i and the later ones have room for."""

        def room(n: int) -> int:
            return min(self._room(self.measure(self._placement(given(n))))[i:])

        room_all = room(n)
        if room_all >= 0:
            return n
        return _false_position(0, n, room(0), room_all, room) if n > 1 else 0

    def _fits_from(self, shares: Shares, i: int) -> bool:
        return min(self._room(self.measure(self._placement(shares)))[i:]) >= 0

    # ------------------------------------------------------------ as parameters
    def _placement(self, shares: Shares) -> PlacementParams:
        n_gpu_layers = sum(s.n_layer for s in shares)
        split = tuple(float(s.n_layer) for s in shares) if len(shares) > 1 else ()
        return replace(
            self.params,
            n_gpu_layers=n_gpu_layers,
            tensor_split=split,
            rules=tuple(self._rules(shares, self.facts.n_layer + 1 - n_gpu_layers)),
        )

    def _rules(self, shares: Shares, first: int) -> Iterator[Rule]:
        """What layers send elsewhere; `first` is the first layer that a device has."""
        without_experts: list[int] = []
        for share in shares:
            first += share.n_layer
            end = min(first, self.facts.n_layer)  # the output has nothing to send
            layers = list(range(end - share.n_part, end))
            if layers and share.part is not Part.EXPERTS:
                yield Rule(rf"blk\.{layers.pop(0)}\.{share.part.value}", share.spill)
            without_experts += [il for il in layers if il >= self.facts.n_dense]
        if without_experts:
            yield Rule(rf"blk\.({numbers(without_experts)})\.{Part.EXPERTS.value}", CPU)


def _margins(targets: Sequence[int], devices: Sequence[DeviceUse]) -> tuple[int, ...]:
    """Bytes to leave free on each device. Raises ConfigError."""
    if len(targets) == 1:
        targets = (targets[0],) * len(devices)
    if len(targets) != len(devices):
        names = ", ".join(d.name for d in devices)
        raise ConfigError(
            f"--fit-target {','.join(map(str, targets))}: give one number, or one for each of "
            f"{names}"
        )
    return tuple(target * MIB for target in targets)
