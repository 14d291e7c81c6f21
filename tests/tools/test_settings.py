"""From flag values to parameters: what is refused before a model is read, and how."""

from typing import Any

import pytest

from pyggml.errors import ConfigError, UserError
from pyggml.tools.settings import Options, check, generation, sampling

MODEL = {"model": "x.gguf"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": None}, "--model is required: pyllama-cli -m MODEL.gguf"),
        ({"placement.n_gpu_layers": "1.5"}, "--gpu-layers 1.5: a number of layers, auto or all"),
        ({"placement.n_gpu_layers": "-7"}, "--gpu-layers -7: "),
        ({"placement.n_gpu_layers": "many"}, "--gpu-layers many: "),
        ({"context.n_ctx": -1}, "--ctx-size -1 is too small"),
        ({"context.n_batch": 0}, "--batch-size 0 is too small: it must be at least 1"),
        ({"context.n_ubatch": -2}, "--ubatch-size -2 is too small"),
        ({"generate.n_predict": -3}, "--predict -3: a number of tokens, -1 or -2"),
        (
            {"generate.n_predict": -2, "generate.context_shift": True},
            "--context-shift and --predict -2 (until full) contradict each other",
        ),
        ({"samplers": "top_k;bogus"}, "unknown sampler 'bogus'; known: penalties, dry"),
        ({"sampling_seq": "kz"}, "unknown sampler letter 'z'"),
        ({"samplers": "top_k", "sampling_seq": "k"}, "--samplers and --sampling-seq contradict"),
        ({"logit_bias": ("15",)}, "--logit-bias '15' is not ID+BIAS or ID-BIAS"),
        ({"sampling.temp": float("nan")}, "--temp nan is out of range"),
        ({"sampling.top_p": -1.0}, "--top-p -1.0 is out of range: it must be 0 or more"),
        ({"sampling.seed": -7}, "--seed -7 is out of range: allowed are -1 to 4294967295"),
        ({"sampling.mirostat": 7}, "--mirostat 7 is out of range: allowed are 0 to 2"),
        ({"sampling.repeat_penalty": 0.0}, "--repeat-penalty 0.0 is out of range"),
        ({"sampling.typ_p": -1.0}, "--typical -1.0 is out of range"),
        ({"no_mmap": True, "model.load_mode": "mmap"}, "--load-mode and --no-mmap contradict"),
        ({"mlock": True, "model.load_mode": "none"}, "--load-mode and --mlock contradict"),
        ({"rope_scale": 0.0}, "--rope-scale 0.0: it must be positive"),
        ({"rope.scaling": "x"}, "--rope-scaling x: one of none, linear, yarn"),
        ({"cpu.cpu_mask": "xyz"}, "--cpu-mask 'xyz' is not a hexadecimal number such as 0xf"),
        ({"cpu.cpu_range_batch": "3-x"}, "--cpu-range-batch '3-x' is not a range of CPUs"),
        ({"cpu.poll": 101}, "--poll 101 is out of range: allowed are 0 to 100"),
        ({"model.numa": "near"}, "--numa near: one of distribute, isolate, numactl"),
        ({"stop": (r"\xff",)}, r"--reverse-prompt: \xff is not UTF-8"),
    ],
)
def test_mistakes_are_seen_before_the_model_is_read(values: dict[str, Any], said: str) -> None:
    given = {key: value for key, value in {**MODEL, **values}.items() if value is not None}
    with pytest.raises(UserError) as error:
        check(given)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize("layers", ["0", "1", "999", "-1", "-2", "auto", "all"])
def test_gpu_layers(layers: str) -> None:
    check({**MODEL, "placement.n_gpu_layers": layers})


@pytest.mark.parametrize("n", [-5, -1, 0, 1, 64])
def test_threads_below_one_are_all_cores(n: int) -> None:
    check({**MODEL, "context.n_threads": n, "context.n_threads_batch": n})


# ---------------------------------------------------------------- sampling
def test_given_parameters_are_stronger_than_the_models() -> None:
    model = {"general.sampling.temp": 0.3, "general.sampling.top_k": 7}
    params = sampling({"sampling.top_k": 9, "sampling.seed": 4}, model)
    assert (params.temp, params.top_k, params.seed, params.top_p) == (0.3, 9, 4, 0.95)


def test_the_models_own_mistake_is_not_blamed_on_a_flag() -> None:
    with pytest.raises(ConfigError, match=r"^temp nan"):
        sampling({}, {"general.sampling.temp": float("nan")})


def test_the_order_of_samplers() -> None:
    assert sampling({"samplers": "top-k;temp"}, {}).samplers == ("top_k", "temperature")
    assert sampling({"sampling_seq": "mt"}, {}).samplers == ("min_p", "temperature")


def test_biases_and_breakers() -> None:
    given = {"logit_bias": ("3+1.5", "4-inf"), "dry_sequence_breaker": ("none",)}
    params = sampling(given, {})
    assert params.logit_bias == {3: 1.5, 4: -float("inf")}
    assert params.dry_sequence_breakers == ()
    assert sampling({"dry_sequence_breaker": (r"\n", ";")}, {}).dry_sequence_breakers == ("\n", ";")


def test_stop_strings_are_unescaped() -> None:
    assert generation({"stop": (r"a\n", "b")}).stop == ("a\n", "b")
    assert generation({"stop": (r"a\n",), "escape": False}).stop == (r"a\n",)
    assert generation({}).stop == ()


# ---------------------------------------------------------------- chat or completion
@pytest.mark.parametrize(
    ("values", "has_template", "on_terminal", "chat"),
    [
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({"conversation": True}, False, False, True),
        ({"conversation": False}, True, True, False),
        ({"single_turn": True}, True, False, True),
        ({"system": "x"}, True, False, True),
        ({"system": "x"}, False, False, False),
        ({"system": "x", "conversation": False}, True, True, False),
    ],
)
def test_when_it_is_a_chat(
    values: dict[str, Any], has_template: bool, on_terminal: bool, chat: bool
) -> None:
    options = Options.of(values)
    assert options.is_chat(has_template=has_template, on_terminal=on_terminal) is chat
