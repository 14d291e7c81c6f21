"""pyllama-cli with pipes: what it prints where, exit codes, chats, logs, and as a process."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_process import MODULE, PATIENCE, Run, environment, run_cli

from pyggml import registry
from pyggml.backends.cpu.device import CpuDevice
from pyggml.llama import load
from pyggml.tools import main

HELLO = ("-p", "Hello", "-n", "4", "--temp", "0")
TIMINGS = (
    r"\[ prompt \d+(, [\d.]+ t/s)? \| generated \d+ tokens?(, [\d.]+ t/s)? \| context \d+/\d+ \]"
)


# ---------------------------------------------------------------- completion
def test_answer_on_stdout_and_everything_else_on_stderr(run: Run) -> None:
    run(*HELLO)  # the first run of all would also say that it compiles kernels
    result = run(*HELLO)
    assert result.code == 0
    assert result.out.startswith("Hello") and result.out.count("\n") == 1
    assert re.fullmatch(TIMINGS + "\n", result.err)
    silent = run(*HELLO, "--no-display-prompt", "--no-perf")
    assert ("Hello" + silent.out, silent.err) == (result.out, "")


def test_a_file_and_stdin_are_prompts_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"Hello\r\n")
    expected = run(*HELLO).out
    rest = HELLO[2:]
    assert run("-f", str(path), *rest).out == expected
    assert run(*rest, stdin=b"Hello").out == expected
    assert run("-f", str(path), *rest, stdin=b"not this").out == expected


def test_same_seed_same_text(run: Run) -> None:
    def texts(seed: str) -> set[str]:
        return {run("-p", "Hello", "-n", "16", "-s", seed).out for _ in range(2)}

    assert len(texts("7")) == len(texts("8")) == 1
    assert texts("7") != texts("8") and len(texts("-1")) == 2


@pytest.mark.parametrize("flags", ["-fa off", "-ctk f32 -ctv f32", "--no-mmap", "-lm none", "-nr"])
def test_ways_of_running_give_text(flags: str, run: Run) -> None:
    result = run(*HELLO, *flags.split())
    assert result.code == 0 and result.out.startswith("Hello") and len(result.out) > 6


@pytest.mark.parametrize(
    "flags",
    ["-t 1", "-t 3", "-t 0", "-t -1 -tb 1", "-b 4 -ub 2", "--no-warmup", "-c 0", "-c 1", "-c 300"],
)
def test_ways_of_running_that_change_nothing(flags: str, run: Run) -> None:
    prompt = ("-p", "Hello, the world and you", *HELLO[2:])
    assert run(*prompt, *flags.split()).out == run(*prompt).out


@pytest.mark.parametrize(
    ("n", "generated"), [("0", "0 tokens"), ("1", "1 token"), ("5", "5 tokens")]
)
def test_how_much_is_generated(n: str, generated: str, run: Run) -> None:
    result = run("-p", "Hello", "--ignore-eos", "-n", n)
    assert f"generated {generated}" in result.err
    assert (result.out == "Hello\n") == (n == "0")


def test_a_full_context_ends_the_text_or_is_shifted(run: Run) -> None:
    endless = ("-p", "Hello", "-c", "256", "--ignore-eos", "-s", "1")
    for n in ("-1", "-2", "1000"):
        full = run(*endless, "-n", n)
        assert full.code == 0 and "| context 256/256 ]" in full.err
        assert full.err.splitlines()[-1] == (
            "warning: the context is full: use a larger --ctx-size, or --context-shift"
        )
    shifted = run(*endless, "-n", "600", "--context-shift", "--keep", "1")
    assert "generated 600 tokens" in shifted.err and "warning" not in shifted.err


def test_a_reverse_prompt_ends_the_text(run: Run) -> None:
    whole = run("-p", "Hello", "-n", "40", "-s", "3", "--no-display-prompt").out
    stop = whole[10:12]
    cut = run("-p", "Hello", "-n", "40", "-s", "3", "--no-display-prompt", "-r", stop).out
    assert cut.rstrip("\n") == whole[: whole.index(stop) + len(stop)].rstrip("\n")


def test_escapes(run: Run) -> None:
    assert run("-p", r"a\tb", "-n", "0").out == "a\tb\n"
    assert run("-p", r"a\tb", "-n", "0", "--no-escape").out == "a\\tb\n"
    assert run("-n", "0", stdin=rb"a\tb").out == "a\\tb\n"


def test_the_tokens_of_the_prompt(run: Run) -> None:
    result = run(*HELLO, "--verbose-prompt", "-lv", "1")
    assert result.err == "   296 -> '<|begin_of_text|>'\n   295 -> 'Hello'\n"


def test_layers_for_a_gpu_that_is_not_there(run: Run) -> None:
    for flag, layers in (("-ngl", "99"), ("--gpu-layers", "all"), ("--n-gpu-layers", "auto")):
        result = run(*HELLO, flag, layers)
        assert result.code == 0
        first, second, _ = result.err.splitlines()
        assert first == "warning: no usable GPU found, --gpu-layers option will be ignored"
        assert second.startswith("warning: ") and "--list-devices" in second
    assert run(*HELLO, "-ngl", "0").err.count("\n") == 1


def test_information(run: Run) -> None:
    assert run("--list-devices").out == "Available devices:\n  (none)\n"
    version = run("--version")
    assert re.fullmatch(r"pyggml \d+\.\d+\.\d+\n", version.out) and version.code == 0


# ---------------------------------------------------------------- chat
def test_one_question(run: Run) -> None:
    asked = run("-cnv", "-st", *HELLO)
    assert asked.code == 0 and "Hello" not in asked.out
    # what only makes sense in a chat makes one
    assert run("-st", *HELLO).out == asked.out
    assert run("-st", *HELLO[2:], stdin=b"Hello").out == asked.out
    assert run(*HELLO, "-sys", "Be kind").out != run(*HELLO).out


def test_lines_of_stdin_are_messages_and_commands(run: Run) -> None:
    script = b"Hello\n\na\\\nb\n/regen\n/clear\n/foo\nHello\n/exit\nnot read\n"
    result = run("-cnv", *HELLO[2:], stdin=script)
    assert result.code == 0
    lines = [re.sub(r"[,|].*", "", line).split() for line in result.err.splitlines()]
    first, second, again, cleared, unknown, new = lines
    assert first == new == ["[", "prompt", "18"]
    # nothing of the conversation is computed twice; the last prompt token always is
    assert int(second[4]) >= 18 and again[2] == "1"
    assert int(second[2]) + int(second[4]) == 1 + int(again[4])
    assert (cleared, unknown[:5]) == (["forgotten"], ["there", "is", "no", "command", "/foo:"])


def test_a_message_that_ends_with_the_input(run: Run) -> None:
    expected = run("-cnv", "-st", *HELLO).out
    assert run("-cnv", *HELLO[2:], stdin=b"Hello").out == expected
    assert run("-cnv", *HELLO, stdin=b"").out == expected
    assert run("-cnv", "-mli", *HELLO[2:], stdin=b"Hello\\\n").out == expected


def test_ctrl_c_before_an_answer_begins_leaves_the_question(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = iter([KeyboardInterrupt])

    def interrupt(*_: object) -> None:
        for kind in interrupts:
            raise kind

    monkeypatch.setattr("pyggml.tools.ui.Screen.prompt_progress", interrupt)
    result = run("-cnv", *HELLO[2:], stdin=b"Hello\n/regen\n", typed=True)
    assert result.code == 0 and "stopped; Ctrl-C again leaves" in result.err
    assert result.out == run("-cnv", "-st", *HELLO).out


def test_a_system_prompt_without_a_chat_is_reported(run: Run) -> None:
    result = run(*HELLO, "-no-cnv", "-sys", "Be kind")
    assert result.out == run(*HELLO).out
    assert result.err.startswith("warning: a system prompt is for chats: it is ignored (-cnv)\n")


def test_a_chat_ends_with_an_error_when_the_context_is_too_small(run: Run) -> None:
    result = run("-cnv", "-c", "256", "-n", "4", stdin=b"Hello\n" + 300 * b"a" + b"\n")
    assert result.code == 1 and "error: the prompt is too long: " in result.err


# ---------------------------------------------------------------- logs
def test_verbosity(run: Run) -> None:
    long = (*HELLO, "-c", "8192")
    warning = "warning: the context of 8192 tokens is longer than the 4096 the model was trained"
    shown = {lv: run(*long, "-lv", lv).err for lv in "012345"}
    assert shown["0"] == shown["1"] == run(*long, "--log-disable").err == ""
    assert shown["2"].startswith(warning) and shown["2"].count("\n") == 1
    assert shown["3"].startswith(warning) and shown["3"].count("\n") == 2
    assert len(shown["4"]) > 10 * len(shown["3"]) and len(shown["5"]) >= len(shown["4"])


def test_details(run: Run) -> None:
    err = run(*HELLO, "-v", "-s", "5").err
    for line in (
        r"I pyggml\.tools: loaded meta data with \d+ key-value pairs and \d+ tensors from .*/llama",
        r"I pyggml\.tools: - kv   0: +general\.architecture str +  = llama",
        r"I pyggml\.tools: - type  f32: +\d+ tensors",
        r"I pyggml\.tools: sampler seed: 5",
        r"\trepeat_last_n = 64, repeat_penalty = 1\.000, .*",
        r"I pyggml\.tools: sampler chain: logits -> .* -> dist",
        r"I pyggml\.tools: generate: n_ctx = 4096, n_batch = 2048, n_predict = 4, n_keep = 0",
        r".*prompt eval time = +[\d.]+ ms / +2 tokens \( *[\d.]+ ms per token, .* per second\)",
        r".*       eval time = +[\d.]+ ms / +3 runs   \(.*\)",
        r".*      total time = +[\d.]+ ms / +5 tokens",
        r".*unaccounted time = +-?[\d.]+ ms / +-?[\d.]+ %      \(total - .*\)",
        r".*   graphs reused = +\d+",
        r".*\| memory breakdown \[MiB\] \| total +free +self +model +context +compute .* \|",
        r".*\|   - Host +\| +\d+ = +\d+ \+ +\d+ \+ +\d+ +\|",
    ):
        assert re.search(f"^{line}$", err, re.MULTILINE), line


def test_the_memory_of_a_recurrent_state_is_named(run: Run, tiny_models: dict[str, str]) -> None:
    err = run("-m", tiny_models["qwen35"], *HELLO, "-v").err
    sizes = re.findall(r"(KV|RS) buffer size = +([\d.]+) MiB", err)
    assert [kind for kind, _ in sizes] == ["KV", "RS"] and float(sizes[1][1]) > 0
    cells = r"size = .* \( +1 cells, +3 layers, +1 seqs\), R \(f32\): .* MiB, S \(f32\): .* MiB"
    assert re.search(cells, err)


def test_a_log_file_has_the_details(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("from an earlier run\n")
    result = run(*HELLO, "--log-file", str(path))
    assert re.fullmatch(TIMINGS + "\n", result.err)
    lines = path.read_text()
    assert "earlier" not in lines and "eval time" in lines and "| generated 4 tokens" in lines
    run("-c", "-7", *HELLO, "--log-file", str(path))
    assert path.read_text().endswith(
        " E pyggml: --ctx-size -7 is too small: it must be at least 0\n"
    )


# ---------------------------------------------------------------- warm-up
@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_what_is_timed_compiles_nothing(flash_attn: str, tiny_models: dict[str, str]) -> None:
    with load(tiny_models["llama"], n_ctx=1024, flash_attn=flash_attn) as llama:
        chat = llama.session()
        known = _loaded_kernels()
        steps = list(chat.generate(list(range(200)) * 4, n_predict=8, ignore_eos=True))
        assert len(steps) == 8 and _loaded_kernels() == known


def _loaded_kernels() -> set[str]:
    device = registry.cpu_device()
    assert isinstance(device, CpuDevice)
    return set(device.library._addresses)


def test_warm_up_is_one_empty_run(tiny_models: dict[str, str]) -> None:
    def graphs(**params: Any) -> int:
        with load(tiny_models["llama"], **params) as llama:
            context = llama.session().session.context
            assert context.memory.pos_max(0) == -1
            return 0 if context._built is None else 1

    assert (graphs(), graphs(warmup=True), graphs(warmup=False)) == (1, 1, 0)


# ---------------------------------------------------------------- as a process
def test_a_reader_that_leaves_is_no_error(tiny_models: dict[str, str]) -> None:
    args = [*MODULE, "cli", "-m", tiny_models["llama"], "-p", "Hello", "-n", "-1", "--ignore-eos"]
    with subprocess.Popen(
        [*args, "--context-shift"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5) == b"Hello"
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(PATIENCE) == 0
    assert re.fullmatch(TIMINGS, err.splitlines()[-1]) and "Traceback" not in err


@pytest.mark.parametrize("flags", [(), ("-cnv",)])
def test_ctrl_c_shows_the_timings_and_exits_130(
    flags: tuple[str, ...], tiny_models: dict[str, str]
) -> None:
    args = [*MODULE, "cli", "-m", tiny_models["llama"], "-p", "Hello", "-n", "-1", "--ignore-eos"]
    with subprocess.Popen(
        [*args, "--context-shift", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == main.INTERRUPTED
    assert out.endswith(b"\n")
    assert re.fullmatch(TIMINGS, err.decode().splitlines()[-1]) and b"Traceback" not in err


def test_ctrl_c_while_the_prompt_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(screen: object, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr("pyggml.tools.ui.Screen.prompt_progress", interrupt)
    result = run("-p", "0123456789", "-ub", "4")
    assert (result.code, result.out) == (130, "")
    assert re.fullmatch(TIMINGS + "\n", result.err)
    assert result.err.startswith("[ prompt 8, ") and result.err.endswith("| context 8/4096 ]\n")


def test_closed_streams(tiny_models: dict[str, str]) -> None:
    command = " ".join([*MODULE, "cli", "-m", tiny_models["llama"], *HELLO])
    for streams, out in (("<&-", b"Hello"), ("2>&- <&-", b"Hello"), (">&- 2>&-", b"")):
        done = subprocess.run(
            ["sh", "-c", f"exec {command} {streams}"], capture_output=True, env=environment()
        )
        assert done.returncode == 0 and done.stdout.startswith(out)
        assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk(tiny_models: dict[str, str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*MODULE, "cli", "-m", tiny_models["llama"], *HELLO],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1] == "error: no space left on device"


def test_text_that_the_terminal_cannot_show(tiny_models: dict[str, str]) -> None:
    done = run_cli(
        *("-m", tiny_models["llama"], "-p", "é", "-n", "0"), env={"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stdout) == (0, b"?\n")


def test_an_argument_that_is_no_text(tiny_models: dict[str, str]) -> None:
    done = subprocess.run(
        [*map(os.fsencode, [*MODULE, "cli", "-m", tiny_models["llama"], "-p"]), b"a\xff"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment({"PYTHONUTF8": "1"}),
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: --prompt: not UTF-8 at character 1")


# ---------------------------------------------------------------- pyllama
@pytest.mark.parametrize(
    ("args", "code", "out", "err"),
    [
        ((), 0, "Usage: pyllama TOOL [OPTIONS]", ""),
        (("--help",), 0, "Usage: pyllama TOOL [OPTIONS]", ""),
        (("--version",), 0, "pyggml ", ""),
        (("cli", "--version"), 0, "pyggml ", ""),
        (("bench", "--help"), 0, "Usage: pyllama-bench [OPTIONS]", ""),
        (("cly",), 2, "", "error: there is no tool 'cly': did you mean cli?\nthere are: cli, "),
        (("-m", "x"), 2, "", "error: there is no tool '-m'"),
    ],
)
def test_pyllama(
    args: tuple[str, ...],
    code: int,
    out: str,
    err: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyllama", *args])
    left = 0
    try:
        main.main()
    except SystemExit as request:
        left = int(request.code or 0)
    shown = capsys.readouterr()
    assert left == code
    assert shown.out.startswith(out) and shown.err.startswith(err)


def test_garbage_is_collected_once_the_program_has_started(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command starts without; what it makes later is looked through, not what is there."""
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    calls: list[str] = []
    assert run(*HELLO).code == 0
    assert gc.isenabled() and calls == []
    gc.disable()
    try:
        assert run(*HELLO).code == 0
        assert gc.isenabled() and calls == ["freeze"]
    finally:
        gc.enable()
