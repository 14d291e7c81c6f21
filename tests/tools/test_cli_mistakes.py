"""What pyllama-cli says of bad models, bad flags and bad text."""

import errno
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import Run
from raw_gguf import RawGguf, text

from pyggml.dtypes import GGMLType

HELLO = ("-p", "Hello", "-n", "4", "--temp", "0")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda raw: None, ": no such file"),
        (lambda raw: b"", ": is empty (0 bytes)"),
        (lambda raw: raw[:1000], "the file is damaged or incomplete"),
        (lambda raw: raw[:-1000], "the file is damaged or incomplete"),
        (lambda raw: b"GGML" + raw[4:], ": not a GGUF file"),
        (lambda raw: b"PK\3\4" + raw[4:], ": not a GGUF file"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], ": GGUF version 1 is no longer"),
        (lambda raw: raw.replace(b"llama", b"lmama"), ": unknown model architecture: 'lmama'"),
        (
            lambda raw: raw.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
            ": tensor 'blk.1.ffn_up.weight' is missing",
        ),
        (
            lambda raw: raw.replace(struct.pack("<2Q", 128, 160), struct.pack("<2Q", 160, 128)),
            ".weight' has wrong shape; expected [128, 160], got [160, 128]",
        ),
        (lambda raw: RawGguf([text("general.architecture", "llama")]).build(), "key not found"),
    ],
)
def test_bad_models(
    make: Callable[[bytes], bytes | None],
    said: str,
    run: Run,
    tiny_models: dict[str, str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    raw = make(Path(tiny_models["llama"]).read_bytes())
    if raw is not None:
        path.write_bytes(raw)
    result = run("-m", str(path), *HELLO)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {path}: ") and said in result.err
    assert result.err.count("\n") <= 3


def test_a_type_that_cannot_be_run(run: Run, tiny_models: dict[str, str], tmp_path: Path) -> None:
    raw = Path(tiny_models["llama"]).read_bytes()
    name = b"blk.1.ffn_down.weight"  # the last one: nothing moves when it gets shorter
    at = raw.index(name) + len(name) + 4 + 16
    assert raw[at : at + 4] == struct.pack("<I", GGMLType.F32)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:at] + struct.pack("<I", GGMLType.I8) + raw[at + 4 :])
    result = run("-m", str(path), *HELLO)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        f"error: {path}: tensor 'blk.1.ffn_down.weight' is i8, which no device can use for "
        "MUL_MAT: convert the model to another type\n"
    )


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("-m {tmp}", 1, "{tmp}: is a directory: name the .gguf file inside it"),
        ("-c 1000000000", 1, "a context of 1000000000 tokens needs 488,281 MiB"),
        ("-c -5", 1, "--ctx-size -5 is too small: it must be at least 0"),
        ("-b 0", 1, "--batch-size 0 is too small: it must be at least 1"),
        ("-n -3", 1, "--predict -3: a number of tokens, -1 or -2"),
        ("-l 999+1", 1, "--logit-bias: token 999 is not in the vocabulary (0 to 299)"),
        ("--override-kv llama.x", 1, "--override-kv llama.x: it must be KEY=TYPE:VALUE"),
        ("--override-kv a=int:x", 1, "--override-kv a=int:x: 'x' is not a whole number"),
        ("--log-file {tmp}/no/log", 1, "--log-file {tmp}/no/log: no such file or directory"),
        ("--chat-template bogus", 1, "--chat-template 'bogus' is neither"),
        ("--chat-template-file {tmp}/no", 1, "--chat-template-file {tmp}/no: no such file"),
        ("--chat-template a --chat-template-file b", 1, "contradict each other"),
        ("-f {tmp}/no", 1, "--prompt and --file contradict each other"),
        ("--context-shift -n -2", 1, "--context-shift and --predict -2"),
        ("-nglx 3", 2, "No such option: -nglx (did you mean -ngl?)"),
        ("-n 1.5", 2, "'1.5' is not a valid integer"),
        ("--temp", 2, "Option '--temp' requires an argument."),
    ],
)
def test_bad_flags(flags: str, code: int, said: str, run: Run, tmp_path: Path) -> None:
    def filled(text: str) -> str:
        return text.replace("{tmp}", str(tmp_path))

    result = run(*HELLO[:2], *filled(flags).split())
    assert (result.code, result.out) == (code, "")
    assert f"error: {filled(said)}" in result.err or filled(said) in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") <= 3


def test_a_prompt_that_does_not_fit(run: Run) -> None:
    result = run("-c", "256", "-n", "1", stdin=b"a" * 252)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "error: the prompt is too long: 253 tokens, but a context of 256 holds at most 252: "
        "use a larger --ctx-size\n"
    )
    assert run("-c", "256", "-n", "1", stdin=b"a" * 251).code == 0


def test_no_prompt(run: Run, tmp_path: Path) -> None:
    for flags in ((), ("-no-cnv",)):
        result = run("-n", "1", *flags)
        assert result.code == 1 and result.err.startswith("error: there is no prompt: give one")
    assert "needs a message" in run("-cnv", "-st").err


def test_broken_text_on_stdin(run: Run) -> None:
    assert run("-n", "1", stdin=b"abc\xff").err.startswith("error: stdin: not UTF-8: byte 3")
    assert "stdin: not UTF-8" in run("-cnv", "-n", "1", stdin=b"abc\xff\n").err


def test_a_value_from_the_environment_is_traced_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "-4")
    result = run(*HELLO)
    assert result.err.splitlines()[1] == "--ctx-size was set by LLAMA_ARG_CTX_SIZE=-4"
    assert run(*HELLO, "-c", "256").code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AssertionError(),
            r"error: a bug in pyggml: AssertionError \(test_cli\w+\.py:\d+\)\n.*-v",
        ),
        (
            RuntimeError("no"),
            r"error: a bug in pyggml: RuntimeError no \(test_cli\w+\.py:\d+\)\n",
        ),
        (MemoryError(), r"error: out of memory: use a smaller --ctx-size"),
        (OSError(errno.ENOSPC, "No space left", "x"), r"error: x: no space left\n"),
    ],
)
def test_other_errors_are_sentences_without_v(
    error: Exception, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("pyggml.tools.cli.load_model", fail)
    result = run(*HELLO)
    assert result.code == 1 and re.match(said, result.err)
    with pytest.raises(type(error)):
        run(*HELLO, "-v")
