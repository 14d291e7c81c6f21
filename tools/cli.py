"""pyllama-cli: continue a text, or chat."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from pyggml import registry
from pyggml.backend import DeviceType
from pyggml.llama.api import Llama
from pyggml.tools import completion, conversation, logs
from pyggml.tools.inputs import find_prompt, find_system
from pyggml.tools.settings import Options, generation, load_model, sampling
from pyggml.tools.ui import Screen, size


def run(values: Mapping[str, Any]) -> None:
    """Do what the flags ask."""
    logs.set_up(values)
    screen = Screen(values.get("color", "auto"))
    for device in registry.devices():
        device.watch_compiling(screen.compiling)
    if values.get("list_devices"):
        list_devices()
        return
    if values.get("warmup_kernels"):
        warm_up_kernels(screen)
        return
    options = Options.of(values)
    # every mistake that can be seen before the model is read is reported before it
    params, system, prompt = generation(values), find_system(values), find_prompt(values)
    with _load(values, screen) as llama:
        sampler = llama.sampler_of(sampling(values, llama.model.metadata))
        chat = llama.session()
        if _is_chat(options, llama):
            conversation.run(llama, chat, sampler, params, options, screen, prompt, system)
        else:
            completion.run(llama, chat, sampler, params, options, screen, prompt)


def _load(values: Mapping[str, Any], screen: Screen) -> Llama:
    start = time.perf_counter()

    def progress(share: float) -> bool:
        screen.progress("loading", share)
        return True

    try:
        llama = load_model(values, progress)
    finally:
        screen.clear_progress()
    model = llama.model
    if screen.is_terminal and values.get("verbosity", 3) >= 3:
        seconds = time.perf_counter() - start
        name = model.hparams.name or model.gguf.path.name
        screen.say(
            f"{name} · {model.description} · {size(model.nbytes)} · loaded in {seconds:.2f} s"
        )
    return llama


def _is_chat(options: Options, llama: Llama) -> bool:
    if options.conversation is not None:
        return options.conversation
    return llama.has_template and sys.stdin.isatty()


def list_devices() -> None:
    """As llama.cpp prints it: devices other than the CPU, one a line."""
    print("Available devices:")
    found = [d for d in registry.devices() if d.type != DeviceType.CPU]
    for device in found:
        memory = device.memory()
        total, free = memory.total >> 20, memory.free >> 20
        print(f"  {device.name}: {device.description} ({total} MiB, {free} MiB free)")
    if not found:
        print("  (none)")


def warm_up_kernels(screen: Screen) -> None:
    """Compile every kernel for this CPU."""
    start = time.perf_counter()
    for device in registry.devices():
        device.compile_kernels()
    screen.say(f"kernels are ready ({time.perf_counter() - start:.1f} s)")
