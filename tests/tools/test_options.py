"""Flags: the table, how the command line and the environment are read, help and documentation."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pyggml.llama.context_params import ContextParams
from pyggml.llama.cpu_params import CpuParams
from pyggml.llama.loader import ModelParams
from pyggml.llama.placement_params import PlacementParams
from pyggml.llama.sampling import SamplingParams
from pyggml.llama.session import GenerateParams
from pyggml.tools import options_doc
from pyggml.tools.flag import Flag
from pyggml.tools.flags import ABSENT, rows
from pyggml.tools.main import TOOLS
from pyggml.tools.options import ToolCommand, section

ROOT = Path(__file__).parent.parent.parent
CLI_FLAGS = [flag for _, flag in rows("cli")]
PARAMS = {
    "context": ContextParams(),
    "cpu": CpuParams(),
    "generate": GenerateParams(),
    "model": ModelParams(),
    "placement": PlacementParams(),
    "sampling": SamplingParams(),
}


def parsed(*args: str, tool: str = "cli") -> dict[str, Any]:
    """What a tool is given for a command line."""
    found: dict[str, Any] = {}
    ToolCommand(tool, found.update).main(args=list(args), standalone_mode=False)
    return found


def refused(*args: str) -> str:
    with pytest.raises(click.UsageError) as error:
        parsed(*args)
    return error.value.format_message()


# ---------------------------------------------------------------- command line
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("-m x.gguf -p hi", {"model": "x.gguf", "prompt": "hi"}),
        ("-n -1 -c 512 -b 8 -ub 4", {
            "generate.n_predict": -1,
            "context.n_ctx": 512,
            "context.n_batch": 8,
            "context.n_ubatch": 4,
        }),
        ("--ctx_size 7 --n_predict=9", {"context.n_ctx": 7, "generate.n_predict": 9}),
        ("--prompt=a=b", {"prompt": "a=b"}),
        ("-p -n", {"prompt": "-n"}),
        ("-p --temp", {"prompt": "--temp"}),
        ("-p a_b --chat-template my_own", {"prompt": "a_b", "chat_template": "my_own"}),
        ("-cnv", {"conversation": True}),
        ("-no-cnv", {"conversation": False}),
        ("--no-conversation", {"conversation": False}),
        ("-e --no-escape", {"escape": False}),
        ("-nr", {"model.repack": False}),
        ("--no-warmup", {"context.warmup": False}),
        ("--no-show-timings", {"perf": False}),
        ("-r a -r b", {"stop": ("a", "b")}),
        ("-l 1+2 -l 3-4", {"logit_bias": ("1+2", "3-4")}),
        ("-ngl all -ctk f32 -fa on", {
            "placement.n_gpu_layers": "all",
            "context.type_k": "f32",
            "context.flash_attn": "on",
        }),
        ("--no-mmap --mlock", {"no_mmap": True, "mlock": True}),
        ("--temp 0.5 -s 3", {"sampling.temp": 0.5, "sampling.seed": 3}),
        ("-lv 4 -v", {"verbosity": 4, "verbose": True}),
    ],
)  # fmt: skip
def test_llama_cpps_spellings(line: str, expected: dict[str, Any]) -> None:
    assert parsed(*line.split()) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-nglx 3", "No such option: -nglx (did you mean -ngl?)"),
        ("--ctxsize 3", "No such option: --ctxsize (did you mean --ctx-size?)"),
        ("--temprature=3", "No such option: --temprature (did you mean --temperature?)"),
        ("-Q", "No such option: -Q"),
        ("-hf me/model", "-hf is not available: download the GGUF file and give it with -m"),
        ("--grammar-file x", "--grammar-file is not available: there are no grammars"),
        ("--mmap", "--mmap is not available: use --load-mode"),
        ("-n", "Option '-n' requires an argument."),
        ("-n x", "'-n' / '--predict' / '--n-predict': 'x' is not a valid integer."),
        ("--temp warm", "'--temp' / '--temperature': 'warm' is not a valid float."),
        ("-fa maybe", "'maybe' is not one of 'on', 'off', 'auto'."),
        ("-ctk q6_K", "'q6_K' is not one of 'f32', 'f16', 'bf16', 'q8_0', 'q4_0', "),
        ("x.gguf", "unexpected argument 'x.gguf': did you mean -m x.gguf?"),
        ("-p some words", "unexpected argument 'words'"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(line: str, said: str) -> None:
    assert said in refused(*line.split())


def test_a_repeated_flag_is_reported_and_the_last_one_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = parsed("-c", "1", "--temp", "2", "--ctx-size", "3", "-r", "x", "-r", "y", "-v", "-v")
    assert (values["context.n_ctx"], values["stop"]) == (3, ("x", "y"))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "warning: --ctx-size is given 2 times: the last one counts\n")


def test_a_section_holds_the_fields_of_one_class() -> None:
    values = parsed("-c", "5", "--temp", "1", "-t", "2", "-p", "x")
    assert section(values, "context") == {"n_ctx": 5, "n_threads": 2}


# ---------------------------------------------------------------- the table
def names_of(flag: Flag) -> list[str]:
    return flag.names.replace("/", " ").split()


@pytest.mark.parametrize("tool", [tool.name for tool in TOOLS])
def test_every_name_and_target_is_there_once(tool: str) -> None:
    flags = [flag for _, flag in rows(tool)]
    names = [name for flag in flags for name in names_of(flag)]
    targets = [flag.target for flag in flags if not flag.ordered]
    assert sorted(set(names)) == sorted(names)
    assert sorted(set(targets)) == sorted(targets)


def test_flags_say_what_they_do() -> None:
    assert [flag.names for flag in CLI_FLAGS if not flag.help] == []


def test_a_flag_is_here_or_absent() -> None:
    absent = {name for names in ABSENT for name in names.split()}
    assert absent & {name for flag in CLI_FLAGS for name in names_of(flag)} == set()


def test_targets_are_fields_and_defaults_are_theirs() -> None:
    checked = 0
    for flag in CLI_FLAGS:
        group, dot, name = flag.target.partition(".")
        if not dot or group not in PARAMS:
            continue
        field = getattr(PARAMS[group], name)
        if isinstance(field, int | float) and re.fullmatch(r"-?\d+(\.\d+)?", flag.default):
            assert float(flag.default) == field, flag.names
            checked += 1
        elif isinstance(flag.kind, tuple):
            shown = {True: "on", False: "off"}.get(field, field)
            assert flag.default == shown, flag.names
            checked += 1
    assert checked > 30


def test_every_sampling_parameter_has_a_flag() -> None:
    by_flags = {f.target.removeprefix("sampling.") for f in CLI_FLAGS}
    other = {"min_keep": "no flag in llama.cpp", "dry_sequence_breakers": "dry_sequence_breaker"}
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert fields - by_flags == set(other)


# ---------------------------------------------------------------- environment
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLAMA_ARG_CTX_SIZE": "512"}, {"context.n_ctx": 512}),
        ({"PYGGML_ARG_CTX_SIZE": "512"}, {"context.n_ctx": 512}),
        ({"LLAMA_ARG_CTX_SIZE": "1", "PYGGML_ARG_CTX_SIZE": "2"}, {"context.n_ctx": 2}),
        ({"LLAMA_ARG_CTX_SIZE": ""}, {}),
        ({"LLAMA_ARG_MODEL": "a b"}, {"model": "a b"}),
        ({"LLAMA_ARG_FLASH_ATTN": "off"}, {"context.flash_attn": "off"}),
        ({"LLAMA_ARG_PERF": "off"}, {"perf": False}),
        ({"LLAMA_ARG_PERF": "Enabled"}, {"perf": True}),
        ({"LLAMA_ARG_NO_PERF": "0"}, {"perf": False}),
        ({"LLAMA_ARG_SWA_FULL": "1"}, {"context.swa_full": True}),
        ({"LLAMA_ARG_SWA_FULL": "false"}, {}),
        ({"LLAMA_ARG_NO_SWA_FULL": "1"}, {}),
        ({"LLAMA_ARG_NO_SUCH_THING": "1"}, {}),
    ],
)
def test_the_environment_sets_flags(
    variables: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parsed() == expected


def test_the_command_line_is_stronger_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "512")
    monkeypatch.setenv("LLAMA_ARG_NO_PERF", "1")
    assert parsed("-c", "7", "--perf") == {"context.n_ctx": 7, "perf": True}
    shown = "environment variable is set, but will be overwritten by command line argument"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: LLAMA_ARG_CTX_SIZE {shown} --ctx-size",
        f"warning: LLAMA_ARG_NO_PERF {shown} --perf",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LLAMA_ARG_CTX_SIZE", "big", "'big' is not a valid integer"),
        ("PYGGML_ARG_FLASH_ATTN", "1", "'1' is not one of 'on', 'off', 'auto'"),
        ("LLAMA_ARG_PERF", "maybe", "it must be one of true, 1, on"),
        ("LLAMA_ARG_SWA_FULL", "2", "it must be one of true, 1, on"),
    ],
)
def test_a_bad_variable_is_named(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    message = refused()
    assert message.startswith(f"{variable}={value}: ") and said in message


# ---------------------------------------------------------------- help and documentation
def test_help_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    with ToolCommand("cli", lambda values: None).make_context("x", [], resilient_parsing=True) as c:
        text = c.get_help()
    words = set(re.split(r"[\s,/]+", text))
    assert {name for flag in CLI_FLAGS for name in names_of(flag)} <= words
    assert {"--help", "--usage", "--version"} <= words
    assert max(map(len, text.splitlines())) <= 100


def test_help_needs_neither_numba_nor_numpy() -> None:
    code = """if True:
        import sys
        from pyggml.tools.main import run_tool
        try:
            run_tool("cli", ["--help"])
        except SystemExit as left:
            assert not left.code
        heavy = {"numba", "llvmlite", "numpy", "jinja2", "regex", "prompt_toolkit"}
        print(sorted(heavy & sys.modules.keys()))
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: pyllama-cli [OPTIONS]")
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr == ""


def test_the_documentation_is_up_to_date() -> None:
    wanted = "\n".join(options_doc.document()) + "\n"
    assert (ROOT / "docs/cli.md").read_text() == wanted, (
        "run: python -m pyggml.tools.options_doc docs/cli.md"
    )
