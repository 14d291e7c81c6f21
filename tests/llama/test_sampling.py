"""Sampler chains: parameters, order, seeds, history and the errors people meet."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from pyggml.errors import ConfigError, ModelError
from pyggml.llama.sampling import (
    Sampler,
    SamplingParams,
    VocabInfo,
    make_chain,
    model_defaults,
    parse_logit_bias,
    parse_samplers,
    parse_sampling_seq,
)
from pyggml.llama.sampling_params import SAMPLERS

VOCAB = VocabInfo(n_vocab=50, eog_ids=frozenset({49}))


def chain(**fields: object) -> Sampler:
    return make_chain(dataclasses.replace(SamplingParams(), **fields), VOCAB)


def logits(seed: int = 0, n: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 2


def draws(sampler: Sampler, n: int, row: np.ndarray | None = None) -> list[int]:
    return [sampler.sample(logits() if row is None else row) for _ in range(n)]


# --- order and names -----------------------------------------------------------------------


def test_default_chain_reads_as_in_llama_cpp() -> None:
    assert chain().description == (
        "logits -> ?penalties -> ?dry -> ?top-n-sigma -> top-k -> ?typical -> top-p -> min-p"
        " -> ?xtc -> temp-ext -> dist"
    )


def test_every_stage_switched_on() -> None:
    sampler = chain(
        repeat_penalty=1.1,
        dry_multiplier=0.8,
        dry_sequence_breakers=(),
        top_n_sigma=1.0,
        typ_p=0.9,
        xtc_probability=0.5,
        ignore_eos=True,
        samplers=parse_sampling_seq("edskypmxta"),
        adaptive_target=0.3,
    )
    assert sampler.description == (
        "logits -> logit-bias -> penalties -> dry -> top-n-sigma -> top-k -> typical -> top-p"
        " -> min-p -> xtc -> temp-ext -> adaptive-p"
    )
    assert 0 <= sampler.sample(logits()) < 49


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"mirostat": 1}, "logits -> temp -> mirostat"),
        ({"mirostat": 2, "temp": 1.0}, "logits -> ?temp -> mirostat-v2"),
        ({"samplers": ()}, "logits -> dist"),
        ({"samplers": ("adaptive_p", "top_k")}, "logits -> top-k -> dist"),
        ({"samplers": ("min_p", "top_k")}, "logits -> min-p -> top-k -> dist"),
    ],
)
def test_chain_ends(fields: dict[str, object], end: str) -> None:
    assert chain(**fields).description == end


def test_order_of_stages_decides() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    vocab = VocabInfo(n_vocab=4)
    kept = []
    for order in ("top_p;temperature", "temperature;top_p"):
        params = SamplingParams(samplers=parse_samplers(order), temp=0.2, top_p=0.65)
        sampler = make_chain(params, vocab)
        sampler.sample(row)
        assert sampler.last is not None
        kept.append(len(sampler.last))
    assert kept == [2, 1]  # cold first, the best token alone reaches 0.65


def test_names_letters_and_aliases() -> None:
    assert parse_samplers("top_k;min_p;temperature") == ("top_k", "min_p", "temperature")
    assert parse_samplers("Top-K; nucleus;typical-p;typ;temp;adaptive-p") == (
        "top_k",
        "top_p",
        "typ_p",
        "typ_p",
        "temperature",
        "adaptive_p",
    )
    assert parse_samplers(["top-n-sigma"]) == ("top_n_sigma",)
    assert parse_samplers("") == ()
    assert parse_sampling_seq("edskypmxt") == SamplingParams().samplers
    assert parse_sampling_seq("".join(SAMPLERS.values())) == tuple(SAMPLERS)


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_samplers, "top_k;bogus"), (parse_sampling_seq, "kz")]
)
def test_unknown_names_are_refused_with_the_known_ones(
    parse: Callable[[str], object], text: str
) -> None:
    with pytest.raises(ConfigError, match=r"unknown sampler .*(bogus|z).*known: .*min_p.*xtc"):
        parse(text)


# --- parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temp", math.nan, "finite"),
        ("temp", math.inf, "finite"),
        ("temp", "0.7", "not a number"),
        ("top_k", 1.5, "not a whole number"),
        ("top_k", True, "not a whole number"),
        ("top_p", -1.0, "0 or more"),
        ("repeat_penalty", 0.0, "above 0"),
        ("repeat_last_n", -2, "-1 or more"),
        ("mirostat", 7, "0 to 2"),
        ("seed", 1.5, "whole"),
        ("seed", 2**32, "out of range"),
        ("xtc_probability", 50.0, "0 to 1"),
        ("min_keep", -1, "0 or more"),
        ("samplers", ("top-k",), "parse_samplers"),
        ("logit_bias", {3: math.nan}, "token 3"),
        ("logit_bias", {3: math.inf}, "token 3"),
    ],
)
def test_bad_parameters_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){field}.*{message}"):
        dataclasses.replace(SamplingParams(), **{field: value})


def test_described_in_four_lines() -> None:
    text = SamplingParams().describe()
    assert text.splitlines() == [
        "\trepeat_last_n = 64, repeat_penalty = 1.000, frequency_penalty = 0.000,"
        " presence_penalty = 0.000",
        "\tdry_multiplier = 0.000, dry_base = 1.750, dry_allowed_length = 2,"
        " dry_penalty_last_n = 64",
        "\ttop_k = 40, top_p = 0.950, min_p = 0.050, xtc_probability = 0.000,"
        " xtc_threshold = 0.100, typical_p = 1.000, top_n_sigma = -1.000, temp = 0.800",
        "\tmirostat = 0, mirostat_lr = 0.100, mirostat_ent = 5.000, adaptive_target = -1.000,"
        " adaptive_decay = 0.900",
    ]


def test_a_model_file_sets_defaults() -> None:
    metadata = {
        "general.sampling.temp": np.float32(0.5),
        "general.sampling.top_k": np.int32(7),
        "general.sampling.penalty_repeat": 1.2,
        "general.sampling.sequence": "top-k;from_the_future;temp",
        "general.name": "x",
    }
    params = SamplingParams(**model_defaults(metadata))
    assert (params.temp, params.top_k, params.repeat_penalty) == (0.5, 7, 1.2)
    assert params.samplers == ("top_k", "temperature")
    assert model_defaults({}) == {}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("15043-1.5", (15043, -1.5)),
        ("7+5", (7, 5.0)),
        ("7-inf", (7, -math.inf)),
        ("1+1e2", (1, 100)),
    ],
)
def test_logit_bias_option(text: str, parsed: tuple[int, float]) -> None:
    assert parse_logit_bias(text) == parsed


@pytest.mark.parametrize("text", ["", "7", "-1+2", "AI+1", "7*2", "7+", "7+x"])
def test_malformed_logit_bias_option(text: str) -> None:
    with pytest.raises(ConfigError, match="ID"):
        parse_logit_bias(text)


# --- drawing -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("fields", [{"temp": 0.0}, {"temp": -1.0}, {"temp": 1e-9}, {"top_k": 1}])
def test_greedy_whatever_the_seed(seed: int, fields: dict[str, object]) -> None:
    row = np.zeros(50, dtype=np.float32)
    row[[17, 30]] = 3.0
    if fields.get("temp") != 1e-9:  # a positive temperature draws between equals
        assert draws(chain(seed=seed, **fields), 5, row) == [17] * 5
    row[17] = 3.5
    assert draws(chain(seed=seed, **fields), 5, row) == [17] * 5


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}, {"typ_p": 1.0}],
    ids=str,
)
def test_off_is_off(fields: dict[str, object]) -> None:
    everything = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typ_p": 1.0, "seed": 3}
    sampler = chain(**{**everything, **fields})
    counts = Counter(draws(sampler, 2000, np.zeros(50, dtype=np.float32)))
    assert len(counts) == 50
    chi_square = sum((count - 40) ** 2 / 40 for count in counts.values())
    assert chi_square < 94.6  # 49 degrees of freedom, one in 10,000


def test_a_seed_gives_the_same_tokens() -> None:
    first = draws(chain(seed=7, temp=2.0), 40)
    assert draws(chain(seed=7, temp=2.0), 40) == first
    assert draws(chain(seed=8, temp=2.0), 40) != first
    assert len(set(first)) > 3


def test_a_random_seed_is_told() -> None:
    for marker in (-1, 0xFFFFFFFF):
        one, other = chain(seed=marker, temp=2.0), chain(seed=marker, temp=2.0)
        assert one.seed != other.seed
        assert draws(chain(seed=one.seed, temp=2.0), 30) == draws(one, 30)


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "temp": 1.5},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": (), "temp": 1.5},
        {"xtc_probability": 0.5, "temp": 1.5},
        {"mirostat": 1},
        {"mirostat": 2},
        {"samplers": ("adaptive_p",), "adaptive_target": 0.2},
    ],
    ids=str,
)
def test_reset_and_clone(fields: dict[str, object]) -> None:
    def continued(sampler: Sampler, n: int) -> list[int]:
        tokens = []
        for _ in range(n):
            tokens.append(sampler.sample(logits()))
            sampler.accept(tokens[-1])
        return tokens

    sampler = chain(seed=5, **fields)
    start = continued(sampler, 12)
    twin = sampler.clone()
    rest = continued(sampler, 12)
    assert continued(twin, 12) == rest  # the twin was not disturbed
    sampler.reset()
    assert sampler.last is None
    assert continued(sampler, 24) == start + rest


def test_what_is_left_can_be_read() -> None:
    sampler = chain(top_k=3, top_p=1.0, min_p=0.0, seed=1)
    token = sampler.sample(logits())
    left = sampler.last
    assert left is not None and left.probs is not None
    assert len(left) == 3
    assert left.ids[left.selected] == token
    assert left.probs.sum() == pytest.approx(1.0)


# --- bans, windows, errors -----------------------------------------------------------------


def test_banned_tokens_never_appear() -> None:
    row = logits()
    best = int(row.argmax())
    for fields in ({"temp": 0.0}, {"temp": 5.0, "top_k": 0}):
        sampler = chain(logit_bias={best: -math.inf}, **fields)
        assert best not in draws(sampler, 200, row)
    row[49] = 99.0
    assert 49 not in draws(chain(ignore_eos=True), 50, row)
    vocab = dataclasses.replace(VOCAB, suppress_ids=frozenset({49, 1000}))
    assert make_chain(SamplingParams(), vocab).sample(row) != 49


def test_a_negative_bias_is_no_ban() -> None:
    row = np.zeros(50, dtype=np.float32)
    row[7] = 200.0
    assert chain(logit_bias={7: -100.0}).sample(row) == 7


@pytest.mark.parametrize("token", [-1, 50])
def test_bias_of_a_token_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ConfigError, match=f"token {token} is not in the vocabulary"):
        chain(logit_bias={token: 1.0})


def test_minus_one_looks_back_over_the_context() -> None:
    vocab = VocabInfo(n_vocab=4, n_ctx=3)
    params = SamplingParams(repeat_last_n=-1, presence_penalty=9.0, temp=0.0)
    sampler = make_chain(params, vocab)
    row = np.array([4, 3, 2, 1], dtype=np.float32)
    for token in (0, 1, 2, 1):  # 0 has left the context of three
        sampler.accept(token)
    assert sampler.sample(row) == 0
    sampler.accept(0)
    assert sampler.sample(row) == 3


def test_dry_breakers_come_from_the_vocabulary() -> None:
    pieces = [b"a", b"b", b"\n", b"c"]
    vocab = VocabInfo(
        n_vocab=4, token_to_piece=pieces.__getitem__, tokenize=lambda text: [pieces.index(b"c")]
    )
    row = np.array([1, 1.5, 0, 0], dtype=np.float32)
    for breakers, expected in ((("\n",), 1), ((), 0)):
        params = SamplingParams(
            dry_multiplier=2.0,
            dry_base=2.0,
            dry_allowed_length=2,
            dry_sequence_breakers=breakers,
            temp=0.0,
        )
        sampler = make_chain(params, vocab)
        for token in (0, 2, 0, 1, 0, 2, 0):  # a \n a b a \n a: b would prolong it
            sampler.accept(token)
        assert sampler.sample(row) == expected


def test_breakers_without_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="dry_sequence_breakers"):
        chain(dry_multiplier=1.0)
    with pytest.raises(ConfigError, match="infill"):
        chain(samplers=("infill",))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_reported(bad: float) -> None:
    row = logits()
    row[3] = bad
    with pytest.raises(ModelError, match="not numbers"):
        chain().sample(row)


def test_a_row_of_the_wrong_length_is_reported() -> None:
    with pytest.raises(ConfigError, match="51 logits for a vocabulary of 50"):
        chain().sample(logits(n=51))


def test_sampling_leaves_the_logits_alone() -> None:
    row = logits()
    before = row.copy()
    chain(temp=0.3, repeat_penalty=2.0, logit_bias={1: 3.0}, mirostat=0).sample(row)
    np.testing.assert_array_equal(row, before)
