"""-fit on models made of numbers: what it chooses fits, and nothing larger would."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.errors import ConfigError
from pyggml.llama.fit import Facts, Fitted, fit
from pyggml.llama.memory_table import DeviceUse, Use
from pyggml.llama.placement_params import ALL_LAYERS, AUTO, PlacementParams
from pyggml.llama.placement_rules import Rule, cpu_moe

MIB = 1 << 20
N_CTX = 32768


@dataclass
class Machine:
    """Cards and a model; everything in MiB. Layers are all alike."""

    free: tuple[int, ...]
    n_layer: int = 10
    dense: int = 20  # attention and norms of a layer
    experts: tuple[int, int, int] = (40, 40, 60)  # gate, up, down of a layer; none: zeros
    output: int = 50
    cache: int = 8  # of a layer, for 1024 tokens
    compute: int = 100
    tried: list[tuple[PlacementParams, int]] = field(default_factory=list)

    @property
    def facts(self) -> Facts:
        return Facts(
            n_layer=self.n_layer,
            has_gpu=True,
            n_dense=0,
            has_experts=any(self.experts),
            n_ctx_train=N_CTX,
        )

    def home(self, params: PlacementParams, il: int) -> int | None:
        """The card of a layer (n_layer: the output), None: the CPU."""
        n_all = self.n_layer + 1
        n_gpu = n_all if params.n_gpu_layers < 0 else min(params.n_gpu_layers, n_all)
        shares = params.tensor_split or tuple(map(float, self.free))
        place = (il - (n_all - n_gpu)) / n_gpu if n_gpu else -1.0
        if place < 0:
            return None
        ends = [sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
        return next(i for i, end in enumerate(ends) if place < end - 1e-9)

    def weights(self, params: PlacementParams) -> Mapping[int | None, int]:
        """MiB per card."""
        found = dict.fromkeys([*range(len(self.free)), None], 0)
        for il in range(self.n_layer):
            home = self.home(params, il)
            found[home] += self.dense
            for part, size in zip(("gate", "up", "down"), self.experts, strict=True):
                name = f"blk.{il}.ffn_{part}_exps.weight"
                rule = next((r for r in params.rules if r.matches(name)), None)
                target = home
                if rule is not None:
                    target = None if rule.buft == "CPU" else int(rule.buft.removeprefix("CUDA"))
                found[target] += size
        found[self.home(params, self.n_layer)] += self.output
        return found

    def measure(self, params: PlacementParams, n_ctx: int) -> Sequence[DeviceUse]:
        self.tried.append((params, n_ctx))
        weights = self.weights(params)
        rows = []
        for i, free in enumerate(self.free):
            layers = sum(self.home(params, il) == i for il in range(self.n_layer))
            use = Use(
                model=weights[i] * MIB,
                context=layers * self.cache * n_ctx * (MIB // 1024),
                compute=(self.compute * MIB if weights[i] else 0) + n_ctx * 64,
            )
            rows.append(DeviceUse(f"CUDA{i}", "", free * MIB, free * MIB - use.own, use, False))
        return rows

    def fit(self, n_ctx: int = 0, **params: object) -> Fitted:
        return fit(PlacementParams(**params), n_ctx, self.facts, self.measure)  # type: ignore[arg-type]


def rooms(found: Fitted, margin: int = 1024) -> list[int]:
    return [d.free // MIB - margin for d in found.devices]


# ---------------------------------------------------------------- steps
def test_what_fits_is_left_alone() -> None:
    machine = Machine((9000,))
    found = machine.fit()
    assert (found.changed, found.problem, found.n_ctx) == (False, "", N_CTX)
    assert found.placement == PlacementParams() and len(machine.tried) == 1


def test_a_context_that_nobody_chose_shrinks_first() -> None:
    found = Machine((4000,)).fit()
    assert found.changed and not found.problem
    assert found.placement.n_gpu_layers == AUTO and not found.placement.rules
    assert 4096 <= found.n_ctx < N_CTX and found.n_ctx % 256 == 0
    larger = Machine((4000,)).measure(found.placement, found.n_ctx + 256)
    assert rooms(found)[0] >= 0 > larger[0].free // MIB - 1024


@pytest.mark.parametrize("n_ctx", [1024, 8192])
def test_a_chosen_context_stays(n_ctx: int) -> None:
    found = Machine((1900,)).fit(n_ctx)
    assert found.n_ctx == n_ctx and not found.problem and rooms(found)[0] >= 0


def test_dense_layers_go_to_the_card_from_the_last_on() -> None:
    machine = Machine((1900,), experts=(0, 0, 0), dense=100)
    found = machine.fit(1024)
    p = found.placement
    assert not p.rules and 0 < p.n_gpu_layers < 11 and rooms(found)[0] >= 0
    more = machine.measure(replace(p, n_gpu_layers=p.n_gpu_layers + 1), 1024)
    assert more[0].free < 1024 * MIB


def test_experts_are_the_first_to_leave() -> None:
    machine = Machine((2200,))
    found = machine.fit(1024)
    p = found.placement
    # the dense parts take 430 of the 1,176 MiB: 1,400 of experts may take the rest
    assert p.n_gpu_layers == 11 and rooms(found)[0] >= 0
    assert machine.weights(p)[None] < 1400 - 600
    # 746 MiB are room for 5 layers of 140; what is left takes more than up (40) of a sixth
    whole = [
        il
        for il in range(10)
        if not any(r.matches(f"blk.{il}.ffn_{x}_exps.w") for r in p.rules for x in ("up", "down"))
    ]
    assert len(whole) == 5 and len(p.rules) == 2
    assert p.rules[0].pattern == r"blk\.5\.ffn_(gate|gate_up|down).*"
    assert p.rules[1].pattern == r"blk\.([6-9])\.ffn_(up|down|gate_up|gate)_(ch|)exps"
    assert {r.buft for r in p.rules} == {"CPU"}


def test_without_room_for_experts_layers_stay_behind() -> None:
    machine = Machine((1300,))
    found = machine.fit(1024)
    p = found.placement
    assert 0 < p.n_gpu_layers < 11 and len(p.rules) == 1 and rooms(found)[0] >= 0
    first = 11 - p.n_gpu_layers
    without = {il for il in range(10) if p.rules[0].matches(f"blk.{il}.ffn_up_exps.weight")}
    assert without == set(range(first, 10))


def test_what_overflows_goes_to_the_next_card() -> None:
    machine = Machine((2400, 2200), n_layer=20)
    found = machine.fit(1024)
    p = found.placement
    assert min(rooms(found)) >= 0 and not found.problem
    assert p.n_gpu_layers == 21 and sum(p.tensor_split) == 21
    assert any(r.buft == "CUDA1" for r in p.rules)


# ---------------------------------------------------------------- what is given
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"n_gpu_layers": ALL_LAYERS}, "--gpu-layers"),
        ({"rules": cpu_moe()}, "--cpu-moe"),
        ({"rules": (Rule("exps", "CPU"),)}, "-ot exps=CPU"),
        ({"tensor_split": (1.0, 2.0)}, "--tensor-split"),
    ],
)
def test_layers_that_were_given_stay_but_the_context_shrinks(
    given: Mapping[str, object], name: str
) -> None:
    roomy = Machine((4000, 4000), n_layer=20).fit(**given)
    assert roomy.problem == "" and roomy.n_ctx < N_CTX and min(rooms(roomy)) >= 0
    tight = Machine((1200, 1100), n_layer=20).fit(**given)
    assert tight.n_ctx == 4096 and name in tight.problem
    for found in (roomy, tight):
        assert found.placement == PlacementParams(**given)  # type: ignore[arg-type]


def test_a_problem_without_a_way_out_is_told() -> None:
    found = Machine((900,)).fit(1024)
    assert found.problem == "no placement leaves as much free as --fit-target asks for"
    assert found.fits  # there is no margin left, but nothing is missing
    assert not Machine((50,)).fit(1024, n_gpu_layers=ALL_LAYERS).fits


def test_targets_of_devices() -> None:
    machine = Machine((1800, 1700))
    found = machine.fit(1024, fit_target=(100, 1200))
    first, second = (d.free // MIB for d in found.devices)
    assert first >= 100 and second >= 1200
    with pytest.raises(ConfigError, match=r"--fit-target 1,2,3: .*CUDA0, CUDA1"):
        machine.fit(1024, fit_target=(1, 2, 3))


def test_the_choice_in_a_line() -> None:
    line = Machine((2200,)).fit(1024).line
    choice = (
        r'-c 1024 -ngl 11 -ot "blk\\\.5\\\.ffn_.*=CPU,blk.*exps=CPU" leaves [\d,]+ MiB of CUDA0'
    )
    assert re.fullmatch(choice + " free", line), line


def test_what_is_lacking_in_a_line() -> None:
    one = Machine((50,)).fit(1024, n_gpu_layers=ALL_LAYERS).line
    assert re.fullmatch(r"-c 1024 -ngl all lacks [\d,]+ MiB of CUDA0", one), one
    two = Machine((50, 5000)).fit(1024, n_gpu_layers=ALL_LAYERS, tensor_split=(1.0, 1.0)).line
    assert re.search(r" leaves [\d,]+ MiB of CUDA1 free and lacks [\d,]+ MiB of CUDA0$", two), two


# ---------------------------------------------------------------- any machine
sizes = st.integers(0, 200)


@given(
    free=st.lists(st.integers(1100, 6000), min_size=1, max_size=3),
    n_layer=st.integers(6, 30),
    dense=st.integers(1, 100),
    experts=st.one_of(st.just((0, 0, 0)), st.tuples(sizes, sizes, sizes)),
    output=sizes,
    cache=st.integers(0, 10),
    n_ctx=st.sampled_from([0, 512, 16384]),
)
def test_no_device_is_above_its_limit(
    free: list[int],
    n_layer: int,
    dense: int,
    experts: tuple[int, int, int],
    output: int,
    cache: int,
    n_ctx: int,
) -> None:
    machine = Machine(tuple(free), n_layer, dense, experts, output, cache)
    found = machine.fit(n_ctx)
    assert found.devices == tuple(machine.measure(found.placement, found.n_ctx))
    assert n_ctx in (0, found.n_ctx)
    assert bool(found.problem) == (min(rooms(found)) < 0)
    assert len(machine.tried) < 80


@given(
    free=st.integers(1300, 6000),
    n_layer=st.integers(2, 30),
    dense=st.integers(1, 40),
    experts=st.tuples(*[st.integers(1, 200)] * 3),
    output=sizes,
)
def test_no_other_choice_has_more_whole_layers(
    free: int, n_layer: int, dense: int, experts: tuple[int, int, int], output: int
) -> None:
    machine = Machine((free,), n_layer, dense, experts, output)
    found = machine.fit(1024)
    if found.problem:
        return

    def first_layers(n: int) -> PlacementParams:
        """All layers on the card, only the first n with their experts."""
        names = "|".join(map(str, range(n, n_layer)))
        rules = (Rule(rf"blk\.({names})\.ffn_\w+_exps", "CPU"),) if n < n_layer else ()
        return PlacementParams(n_gpu_layers=n_layer + 1, rules=rules)

    def fits(params: PlacementParams) -> bool:
        return machine.measure(params, 1024)[0].free >= 1024 * MIB

    def dense_layers(n: int) -> PlacementParams:
        return replace(first_layers(0), n_gpu_layers=n)

    p = found.placement
    if p.n_gpu_layers == AUTO:
        assert fits(first_layers(n_layer))
        return
    assert p.n_gpu_layers == max(n for n in range(n_layer + 2) if fits(dense_layers(n)))
    # whatever a layer lacks, it lacks ffn_down
    down = {il: f"blk.{il}.ffn_down_exps.weight" for il in range(n_layer)}
    whole = [il for il, name in down.items() if not any(r.matches(name) for r in p.rules)]
    if p.n_gpu_layers == n_layer + 1:
        assert len(whole) == max(n for n in range(n_layer + 1) if fits(first_layers(n)))
