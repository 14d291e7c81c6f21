"""Why a planned placement is as fast as it is, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml.llama.planner import Choice

GIB, MIB = 1 << 30, 1 << 20
PARTS = {"gate_up": "gate and up"}


def reason(choice: Choice) -> str:
    """What lies where, what that costs, and why the other flags are there."""
    return ". ".join(_sentence(text) for text in _reasons(choice)) + "."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _reasons(choice: Choice) -> Iterator[str]:
    yield ", ".join((*_layers(choice), *_moved(choice)))
    yield _time(choice)
    mode = choice.flags.mode
    if not mode.kv_offload:
        yield "keys and values stay in memory of the host, which leaves room for weights"
    if not mode.output:
        yield "the CPU multiplies with the output's matrix, which leaves room for layers"
    if not mode.op_offload:
        yield "large batches are multiplied where weights lie, so that no room is kept for copies"
    if mode.no_host:
        yield (
            "--no-host lets the CPU lay out its weights for its own kernels, which is worth more "
            "here than copying them for large batches"
        )
    if choice.modelled.missing:
        yield _disk(choice)


def _disk(choice: Choice) -> str:
    m = choice.modelled
    share = 100 * (1 - m.token_estimate.seconds / m.token)
    return (
        f"the host's {choice.host_bytes / GIB:.1f} GiB of weights are more than its memory: "
        f"{100 * m.missing:.0f} % of what is used is read from disk each time, which takes "
        f"{share:.0f} % of a token's time"
    )


def _layers(choice: Choice) -> Iterator[str]:
    n, n_cpu = len(choice.layers), list(choice.layers).count("CPU")
    for device in dict.fromkeys(name for name in choice.layers if name != "CPU"):
        count = list(choice.layers).count(device)
        yield f"{device} has {'all' if count == n else count} of {n} layers"
    if n_cpu:
        yield f"the CPU {f'the first {n_cpu}' if n_cpu < n else f'has all of {n} layers'}"


def _moved(choice: Choice) -> Iterator[str]:
    if not choice.moved:
        return
    by_count: dict[int, list[str]] = {}
    for name, count in sorted(choice.moved.items()):
        word = name.removeprefix("ffn_").removesuffix("_exps")
        by_count.setdefault(count, []).append(PARTS.get(word, word))
    what = "experts" if any(name.endswith("_exps") for name in choice.moved) else "matrices"
    texts = [f"{_and(words)} of {count}" for count, words in by_count.items()]
    yield f"but the CPU their {what}: {_and(texts)}"


def _time(choice: Choice) -> str:
    token = choice.modelled.token_estimate
    cpu = next(d for d in token.devices if d.name == "CPU")
    share = 100 * cpu.compute / choice.modelled.token
    read = token.host_weights
    if not read:
        return "no weights are read from memory of the host for a token"
    return (
        f"a token reads {read / MIB:,.0f} MiB of the host's weights, "
        f"{share:.0f} % of its time the CPU computes"
    )


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
