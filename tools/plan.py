"""pyllama-plan: which flags make a model fastest on some devices."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyggml.backend import Device, DeviceType
from pyggml.backends.cpu.device import CpuDevice
from pyggml.backends.cpu.library import default_cache
from pyggml.cost import Rates
from pyggml.disk import disk_gbs
from pyggml.errors import ConfigError
from pyggml.gguf import Gguf, open_gguf
from pyggml.gguf_remote import fetch_header, is_address
from pyggml.llama.context_params import ContextParams
from pyggml.llama.description import describe
from pyggml.llama.planner import Choice, Plan, PlannerParams, plan
from pyggml.llama.planner_reason import reason
from pyggml.threads import ThreadParams
from pyggml.tools import logs
from pyggml.tools.cli import list_devices
from pyggml.tools.options import section
from pyggml.tools.plan_verify import Verified, verify
from pyggml.tools.simulated import chosen_devices
from pyggml.tools.ui import Screen, compiling_shown

GIB, MIB = 1 << 30, 1 << 20
NOTE = "Speeds are modelled, not measured, for a context that is full."


def run(values: Mapping[str, Any]) -> None:
    """Do what the flags ask."""
    screen = Screen(verbosity=logs.verbosity(values))
    # a plan loads the model many times: what that tells belongs to -v
    logs.set_up({"verbosity": 1, **values}, screen)
    with compiling_shown(screen):
        if values.get("list_devices"):
            list_devices(values)
            return
        if "model" not in values:
            raise ConfigError(
                "--model is required: pyllama-plan -m MODEL.gguf --sim-device rtx3060"
            )
        with tempfile.TemporaryDirectory(prefix="pyggml-plan-") as folder:
            _answer(values, _file(values, Path(folder), screen), screen)


def _file(values: Mapping[str, Any], folder: Path, screen: Screen) -> Path:
    """The model's file, or its header fetched into a folder."""
    model = str(values["model"])
    if not is_address(model):
        return Path(model)
    if values.get("verify"):
        raise ConfigError(f"--verify runs the model, and {model} is not here: download it first")
    screen.status("fetching the header")
    return fetch_header(model, folder)


def _answer(values: Mapping[str, Any], path: Path, screen: Screen) -> None:
    devices = chosen_devices(values, dry=True)
    params = ContextParams(**section(values, "context"))
    options = PlannerParams(**section(values, "plan"))
    if "plan_margin" in values:
        options = replace(options, margin=_margin(values["plan_margin"]))
    options = replace(options, rates=_rates(devices[-1], params.n_threads))
    with open_gguf(path, allow_no_data=True) as gguf:
        if values.get("verify") and not gguf.has_data:
            raise ConfigError(f"--verify runs the model, and {path} is only its header")
        head = list(_head(gguf, devices))
        if gguf.nbytes > devices[-1].memory().free:
            screen.status("measuring the disk")
            options = replace(options, disk_gbs=disk_gbs(path, default_cache()))
            head.append(_disk(options.disk_gbs))
    screen.status("searching")
    found = plan(path, devices, params, options)
    verified = verify(path, values, found.choices[0], params) if values.get("verify") else None
    screen.clear_progress()
    if values.get("json"):
        print(json.dumps(as_json(found, options, verified)))
        return
    lines = [*head, NOTE, *_choices(values, found), *(_verified(verified) if verified else ())]
    print("\n".join(lines))


def _rates(cpu: Device, n_threads: int) -> Mapping[str, Rates]:
    """What the CPU reaches with so many threads, if they are given."""
    if n_threads <= 0 or not isinstance(cpu, CpuDevice):
        return {}
    return {cpu.name: cpu.rates(ThreadParams(n_threads))}


def _margin(mib: int) -> int:
    if mib < 0:
        raise ConfigError(f"--fit-target {mib}: MiB to leave free, 0 or more")
    return mib * MIB


# ---------------------------------------------------------------- as text
def _head(gguf: Gguf, devices: Sequence[Device]) -> Iterator[str]:
    types = [t.type for t in gguf.tensors.values()]
    yield f"{describe(gguf.metadata, gguf.n_params, types)}, {gguf.nbytes / GIB:.1f} GiB"
    for device in devices:
        free = device.memory().free / GIB
        host = ", its speed is measured" if device.type == DeviceType.CPU else ""
        yield f"{device.name}: {device.description}, {free:.1f} GiB free{host}"


def _disk(gbs: float) -> str:
    if not gbs:
        return "Disk: could not be measured, what is read from it is left out"
    return f"Disk: {gbs:.1f} GB/s (measured): the model is larger than what is free of memory"


def _choices(values: Mapping[str, Any], found: Plan) -> Iterator[str]:
    for i, choice in enumerate(found.choices, 1):
        m = choice.modelled
        yield ""
        yield f"{i}. {choice.flags}"
        rates = f"prompt {m.prompt_rate:.1f} t/s, generation {m.generation_rate:.2f} t/s"
        yield f"   {rates} (modelled)"
        yield f"   {reason(choice)}"
        yield from (f"   {line}" for line in choice.memory.lines())
        yield f"   {command(values, choice)}"


def _file_name(model: str) -> str:
    """The path, or what the file of an address will be called when it is here."""
    return unquote(urlsplit(model).path).rsplit("/", 1)[-1] if is_address(model) else model


def command(values: Mapping[str, Any], choice: Choice) -> str:
    """A line for a shell; its flags are llama.cpp's, but --sim-device."""
    words = ["pyllama-cli", "-m", shlex.quote(_file_name(str(values["model"])))]
    for flag, target in (
        ("-c", "context.n_ctx"),
        ("-ub", "context.n_ubatch"),
        ("-t", "context.n_threads"),
        ("-fa", "context.flash_attn"),
        ("-ctk", "context.type_k"),
        ("-ctv", "context.type_v"),
    ):
        if target in values:
            words += [flag, str(values[target])]
    words.append(str(choice.flags))
    words += [f"--sim-device {shlex.quote(spec)}" for spec in values.get("sim_device", ())]
    return " ".join(words)


def _verified(v: Verified) -> Iterator[str]:
    yield ""
    yield f"verified ({v.how}): {v.n_prompt} tokens of a prompt, {v.n_generated} generated"
    for name, modelled, measured in (
        ("prompt", v.modelled_prompt, v.measured_prompt),
        ("generation", v.modelled_generation, v.measured_generation),
    ):
        off = 100 * (modelled / measured - 1)
        yield f"   {name:<10} modelled {modelled:8.2f} t/s, {v.how} {measured:8.2f} ({off:+.1f} %)"


# ---------------------------------------------------------------- as JSON
def as_json(found: Plan, options: PlannerParams, verified: Verified | None) -> Mapping[str, Any]:
    """The object that docs/planner.md describes."""
    answer: dict[str, Any] = {
        "for": found.goal,
        "disk_gbs": options.disk_gbs or None,
        "plans": [_plan_json(choice) for choice in found.choices],
    }
    if verified:
        answer["verified"] = verified.as_json()
    return answer


def _plan_json(choice: Choice) -> Mapping[str, Any]:
    m = choice.modelled
    return {
        "flags": str(choice.flags),
        "reason": reason(choice),
        "prompt_rate": m.prompt_rate,
        "generation_rate": m.generation_rate,
        "pp_ms": 1e3 * m.ubatch,
        "tg_ms": 1e3 * m.token,
        "n_ubatch": m.n_ubatch,
        "host_bytes": choice.host_bytes,
        "from_disk": m.missing,
        "devices": [
            {
                "name": d.name,
                "total": d.total,
                "free": d.free,
                "model": d.use.model,
                "context": d.use.context,
                "compute": d.use.compute,
                "simulated": d.simulated,
            }
            for d in choice.memory.devices
        ],
    }
