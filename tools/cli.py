"""pyllama-cli: continue a text, or chat."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pyggml import registry
from pyggml.backend import Device, DeviceType
from pyggml.llama.api import Llama
from pyggml.threads import set_own_priority
from pyggml.tools import completion, conversation, details, logs, sched_file
from pyggml.tools.inputs import find_prompt, find_system
from pyggml.tools.placement import has_layers, tell_fit
from pyggml.tools.settings import Options, check, generation, load_model, sampling
from pyggml.tools.simulated import Simulated, chosen_devices
from pyggml.tools.task import Task
from pyggml.tools.ui import Screen, compiling_shown, size


def run(values: Mapping[str, Any]) -> None:
    """Do what the flags ask."""
    screen = Screen(values.get("color", "auto"), verbosity=logs.verbosity(values))
    logs.set_up(values, screen)
    with compiling_shown(screen):
        if values.get("list_devices"):
            list_devices(values)
        elif values.get("warmup_kernels"):
            warm_up_kernels(screen)
        elif values.get("dry_run"):
            from pyggml.tools import dry_run

            dry_run.run(values, screen)
        else:
            generate(values, screen)


def generate(values: Mapping[str, Any], screen: Screen) -> None:
    """Load the model and run a completion or a chat."""
    options = Options.of(values)
    # every mistake that can be seen before the model is read is reported before it
    check(values)
    sched_file.check(values)
    # the lines of stdin are the messages of a chat
    use_stdin = not options.conversation or options.single_turn
    system, prompt = find_system(values), find_prompt(values, use_stdin=use_stdin)
    simulated = Simulated(values)
    if simulated.devices is None:
        _warn_without_gpu(values, screen)
    _set_priority(values.get("cpu.prio", 0), screen)
    with _load(values, screen, simulated.devices) as llama:
        on_terminal = sys.stdin.isatty()
        is_chat = options.is_chat(has_template=llama.has_template, on_terminal=on_terminal)
        if is_chat and not llama.has_template:
            screen.warn("the model has no chat template: ChatML is used (--chat-template)")
        elif not is_chat and system is not None:
            screen.warn("a system prompt is for chats: it is ignored (-cnv)")
        params = sampling(values, llama.model.metadata)
        screen.status("warming up")
        chat = llama.session()
        screen.clear_progress()
        sched_file.write_wanted(values, chat.session.context)
        _collect_garbage()
        sampler, modelled = llama.sampler_of(params), simulated.modelled
        task = Task(llama, chat, sampler, generation(values), options, screen, modelled=modelled)
        details.log_start(task, params)
        details.tell_rules(task)
        if modelled is not None:
            modelled.begin()
        try:
            if is_chat:
                conversation.run(task, prompt, system)
            else:
                completion.run(task, prompt)
        finally:
            details.tell_end(task)
            simulated.end(screen)


def _set_priority(level: int, screen: Screen) -> None:
    """Of this thread; the workers take theirs, and what is started later inherits it."""
    try:
        set_own_priority(level)
    except OSError as e:
        screen.warn(f"--prio {level}: the system refuses ({e.strerror}); needs CAP_SYS_NICE")


def _load(values: Mapping[str, Any], screen: Screen, devices: Sequence[Device] | None) -> Llama:
    start = time.perf_counter()

    def progress(share: float) -> bool:
        screen.progress("loading", share)
        return True

    llama = load_model(values, progress, devices=devices)
    screen.clear_progress()
    tell_fit(llama, screen)
    model = llama.model
    if screen.is_terminal:
        seconds = time.perf_counter() - start
        name = model.hparams.name or model.gguf.path.name
        screen.say(
            f"{name} · {model.description} · {size(model.nbytes)} · loaded in {seconds:.2f} s"
        )
    return llama


def _collect_garbage() -> None:
    """From now on, if the program started without; and only in what is made from now on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _warn_without_gpu(values: Mapping[str, Any], screen: Screen) -> None:
    if not has_layers(values):
        return
    if all(device.type == DeviceType.CPU for device in registry.devices()):
        screen.warn("no usable GPU found, --gpu-layers option will be ignored")
        screen.warn("this version of pyggml computes on the CPU; --list-devices shows what it has")


def list_devices(values: Mapping[str, Any]) -> None:
    """As llama.cpp prints it: devices other than the CPU, one a line."""
    found = [d for d in chosen_devices(values) if d.type != DeviceType.CPU]
    print("Available devices:")
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
