"""Rules of -ot and its shorter words: how they are read, and what they find."""

import pytest

from pyggml.errors import ConfigError
from pyggml.llama.placement_rules import Rule, cpu_moe, n_cpu_ffn, n_cpu_moe, parse_rules


def pairs(text: str) -> list[tuple[str, str]]:
    return [(rule.pattern, rule.buft) for rule in parse_rules(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exps=CPU", [("exps", "CPU")]),
        ("a=CPU,b=CUDA0", [("a", "CPU"), ("b", "CUDA0")]),
        (" a = CPU , b=CUDA0 ", [("a", "CPU"), ("b", "CUDA0")]),
        ('"exps=CPU"', [("exps", "CPU")]),
        ("'a=CPU,b=CUDA0'", [("a", "CPU"), ("b", "CUDA0")]),
        ("a=CPU,", [("a", "CPU")]),
        # commas of the pattern
        (r"blk\.\d{1,2}\.ffn=CPU,b=CPU", [(r"blk\.\d{1,2}\.ffn", "CPU"), ("b", "CPU")]),
        (r"[a,b]x=CPU", [("[a,b]x", "CPU")]),
        (r"[^,]x=CPU,b=CPU", [("[^,]x", "CPU"), ("b", "CPU")]),
        (r"[],]x=CPU", [("[],]x", "CPU")]),
        (r"(a,b)=CPU", [("(a,b)", "CPU")]),
        (r"a\,b=CPU", [(r"a\,b", "CPU")]),
        (r"\(=CPU,\[=CPU", [(r"\(", "CPU"), (r"\[", "CPU")]),
        (r"[(]=CPU,a=CPU", [("[(]", "CPU"), ("a", "CPU")]),
        # equals signs of the pattern
        (r"blk\.(?=1)=CPU", [(r"blk\.(?=1)", "CPU")]),
        ("a=b=CPU", [("a=b", "CPU")]),
        # the spelling of llama.cpp's users
        (r"[0-9]\.ffn_.*_exps\.=CPU", [(r"[0-9]\.ffn_.*_exps\.", "CPU")]),
    ],
)
def test_rules_as_people_write_them(text: str, expected: list[tuple[str, str]]) -> None:
    assert pairs(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no rule"),
        (" , ", "there is no rule"),
        ("attn", r"'attn' is no PATTERN=TYPE"),
        ("a,b=CPU", r"'a' is no PATTERN=TYPE\na comma ends a rule; .* \\, or \[,\]"),
        ("attn=", "-ot attn=: there is no buffer type after the ="),
        ("=CPU", r"-ot =CPU: the pattern is empty \(\.\* stands"),
        ("blk.(0|1=CPU", r"'blk\.\(0\|1' is no regular expression: missing \).* at position 4"),
        ("blk.(0|1=CPU,b=CPU", r"'blk\.\(0\|1' is no regular expression"),
        ("*exps=CPU", r"'\*exps' is no regular expression: nothing to repeat at position 0"),
        ("blk.[=CPU", r"'blk\.\[' is no regular expression: unterminated character set"),
        ("[[:vowel:]]=CPU", r"there is no class \[:vowel:\] \(there are .*\[:digit:\]"),
    ],
)
def test_what_is_no_rule_is_refused_with_its_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_rules(text)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("exps", "blk.3.ffn_up_exps.weight", True),  # anywhere
        ("^exps", "blk.3.ffn_up_exps.weight", False),
        ("blk.3.ffn", "blk.3.ffn_up.weight", True),
        ("weight$", "blk.3.ffn_up.weight", True),
        ("EXPS", "blk.3.ffn_up_exps.weight", False),
        # classes of C++: Python would look for one of "[:digt" and then "]"
        (r"blk\.[[:digit:]]+\.ffn_up", "blk.31.ffn_up.weight", True),
        (r"blk\.[[:digit:]]+\.ffn_up", "blk.d].ffn_up.weight", False),
        (r"blk\.[^[:digit:]]", "blk.3", False),
        (r"[[:alpha:]_]+_exps", "ffn_up_exps", True),
        (r"[[:digit:]b]l", "blk", True),
        (r"\[:digit:\]", "[:digit:]", True),
        (r"[[]x", "[x", True),
        (r"\.(1[01])\.*", "blk.10.attn_q.weight", True),
        (r"\.([23])\.*", "blk.12.attn_q.weight", False),
    ],
)
def test_patterns_are_searched_as_in_cpp(pattern: str, name: str, found: bool) -> None:
    assert Rule(pattern, "CPU").matches(name) is found


EXPERTS = [f"blk.{{}}.ffn_{part}_exps.weight" for part in ("up", "down", "gate", "gate_up")] + [
    "blk.{}.ffn_up_chexps.weight",
    "blk.{}.ffn_down_exps.bias",
]
OTHERS = ["blk.{}.ffn_up_shexp.weight", "blk.{}.ffn_gate_inp.weight", "blk.{}.attn_q.weight"]


def matched(rules: tuple[Rule, ...], names: list[str], il: int) -> list[str]:
    wanted = [name.format(il) for name in names]
    return [name for name in wanted if any(rule.matches(name) for rule in rules)]


def test_cpu_moe_means_experts_and_their_biases() -> None:
    assert len(matched(cpu_moe(), EXPERTS, 7)) == len(EXPERTS)
    assert matched(cpu_moe(), [*OTHERS, "blk.{}.ffn_up.weight"], 7) == []


@pytest.mark.parametrize("il", [0, 2, 3, 10, 12, 22])
def test_n_cpu_moe_means_the_first_layers(il: int) -> None:
    assert bool(matched(n_cpu_moe(3), EXPERTS, il)) == (il < 3)
    assert bool(matched(n_cpu_moe(11), EXPERTS, il)) == (il < 11)
    dense = ["blk.{}.ffn_up.weight", "blk.{}.ffn_down.weight"]
    assert len(matched(n_cpu_ffn(3), dense, il)) == (2 if il < 3 else 0)
    assert matched(n_cpu_ffn(30), [*EXPERTS, *OTHERS], il) == []


def test_no_layers_need_no_rule() -> None:
    assert n_cpu_moe(0) == () == n_cpu_ffn(0)
    with pytest.raises(ConfigError, match="--n-cpu-moe -1: a number of layers"):
        n_cpu_moe(-1)


def test_a_rule_is_called_as_it_was_given() -> None:
    assert str(parse_rules("a=CPU")[0]) == "-ot a=CPU"
    assert [str(rule) for rule in (*cpu_moe(), *n_cpu_moe(2))] == ["--cpu-moe", "--n-cpu-moe 2"]
