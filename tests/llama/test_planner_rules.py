"""Regular expressions of plans: short, and exact."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.llama.planner_rules import Moved, is_exact, numbers, rules_of, shortest_flags

UP, GATE, DOWN = "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"
EXPERTS = (UP, GATE, DOWN)
OTHERS = ("attn_q", "attn_output", "ffn_gate_inp", "ffn_norm", "ffn_up_shexp", "ffn_down_shexp")


@given(st.sets(st.integers(0, 130), min_size=1))
def test_numbers_match_themselves_and_nothing_else(values):
    pattern = re.compile(f"blk.({numbers(values)}).ffn")
    assert {n for n in range(400) if pattern.search(f"blk.{n}.ffn")} == values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({7}, "7"),
        (range(10), r"\d"),
        (range(30), r"[12]?\d"),
        (range(3, 10), "[3-9]"),
        (range(20, 60), r"[2-5]\d"),
        ({1, 3, 5}, "[135]"),
        (range(11), r"1?0|[1-9]"),
        (range(18), "[02-9]|1[0-7]?"),
    ],
)
def test_numbers_are_short(values, expected):
    assert len(numbers(values)) <= len(expected)
    assert {n for n in range(200) if re.fullmatch(numbers(values), str(n))} == set(values)


def moved(on_cpu, n_layer=24, n_cpu=0, n_dense=0, devices=("CUDA0",)):
    per = -(-(n_layer - n_cpu) // len(devices))
    layers = ["CPU"] * n_cpu + [devices[i // per] for i in range(n_layer - n_cpu)]
    known = frozenset((il, e) for il in range(n_dense, n_layer) for e in EXPERTS)
    names = [f"blk.{il}.{n}.weight" for il, n in known]
    names += [f"blk.{il}.{n}.weight" for il in range(n_layer) for n in OTHERS]
    names += ["token_embd.weight", "output.weight", "output_norm.weight"]
    return Moved(known, frozenset(on_cpu) & known, layers, names)


def test_the_usual_choices_have_the_usual_names():
    everything = {(il, e) for il in range(24) for e in EXPERTS}
    assert shortest_flags(moved(())) == ""
    assert shortest_flags(moved(everything)) == "-cmoe"
    first = {(il, e) for il in range(7) for e in EXPERTS}
    assert shortest_flags(moved(first)) == "-ncmoe 7"
    assert shortest_flags(moved({p for p in everything if p[1] == UP})) == '-ot "ffn_up_exps=CPU"'
    kept = {p for p in everything if p[0] not in (3, 9, 14)}
    assert shortest_flags(moved(kept)) == '-ot "blk.(14|[39]).ffn.*exps=CUDA0,exps=CPU"'
    last = {p for p in everything if p[0] > 3}
    assert shortest_flags(moved(last)) == '-ot "blk.[0-3].ffn.*exps=CUDA0,exps=CPU"'
    both = {p for p in everything if p[1] != DOWN}
    assert shortest_flags(moved(both)) == '-ot "ffn_(gate|up)_exps=CPU"'


def test_layers_that_are_on_the_cpu_anyway_need_no_rule():
    on_cpu = {(il, e) for il in range(12) for e in EXPERTS}
    assert shortest_flags(moved(on_cpu, n_cpu=12)) == ""
    assert shortest_flags(moved({*on_cpu, (15, UP)}, n_cpu=12)) == '-ot "blk.15.ffn_up_exps=CPU"'


def test_the_output_goes_first():
    experts = {(il, e) for il in range(24) for e in EXPERTS}
    for on_cpu, expected in (
        ((), '-ot "^output.w=CPU"'),
        (experts, '-cmoe -ot "^output.w=CPU"'),
        ({p for p in experts if p[1] == UP}, '-ot "^output.w=CPU,ffn_up_exps=CPU"'),
    ):
        case = replace(moved(on_cpu), output=True)
        flags = shortest_flags(case)
        assert flags == expected
        placed = apply(flags, case)
        assert placed["output.weight"] == "CPU" and placed["output_norm.weight"] == ""
        assert placed["blk.3.attn_output.weight"] == "CUDA0"


def test_dense_layers_by_their_weights():
    names = [f"blk.{il}.{n}.weight" for il in range(4) for n in ("ffn_up", "ffn_gate", "ffn_norm")]
    known = frozenset((il, n) for il in range(4) for n in ("ffn_up", "ffn_gate"))
    dense = Moved(known, frozenset({(0, "ffn_up"), (1, "ffn_up")}), ["CUDA0"] * 4, names)
    assert shortest_flags(dense) == '-ot "blk.[01].ffn_up.weight=CPU"'


def apply(flags, case):
    """Where a command line puts each tensor, read by the rules of the loader."""
    rules = rules_of(flags)
    found = {}
    for name in case.names:
        rule = next((r for r in rules if r.matches(name)), None)
        layer = re.match(r"blk\.(\d+)\.", name)
        home = case.layers[int(layer[1])] if layer else ""
        found[name] = rule.buft if rule else home
    return found


@given(st.data())
def test_flags_move_exactly_what_is_meant(data):
    n_dense, n_cpu = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 8))
    devices = data.draw(st.sampled_from([("CUDA0",), ("CUDA0", "CUDA1")]))
    parts = st.sampled_from([(), (UP,), (UP, GATE), (DOWN,), (GATE, DOWN), EXPERTS])
    cuts = sorted(data.draw(st.lists(st.integers(0, 24), min_size=2, max_size=2)))
    runs = [data.draw(parts) for _ in range(3)]
    on_cpu = {(il, name) for il in range(24) for name in runs[sum(il >= cut for cut in cuts)]}
    case = moved(on_cpu, n_dense=n_dense, n_cpu=n_cpu, devices=devices)
    flags = shortest_flags(case)
    # only what means the same in C++'s regular expressions and in a shell's double quotes
    assert "(?" not in flags
    assert re.fullmatch(r'([-\w ".,=^*?()|\[\]]|\\d)*', flags)
    placed = apply(flags, case)
    for name, buft in placed.items():
        layer = re.match(r"blk\.(\d+)\.(\w+)\.", name)
        if layer is None:
            assert buft == ""
            continue
        key = int(layer[1]), layer[2]
        home = case.layers[key[0]]
        assert buft == ("CPU" if key in case.on_cpu else home), (name, shortest_flags(case))


def test_rules_that_say_too_much_are_not_exact():
    case = moved({(1, UP)})
    assert is_exact(((r"blk.(1).ffn_up_exps", "CPU"),), case)
    assert not is_exact(((r"blk.1.*ffn_up_exps", "CPU"),), case)  # also 10 to 19
    assert not is_exact(((r"blk.(1).ffn_up", "CPU"),), case)  # also the shared expert
    assert not is_exact((), case)
