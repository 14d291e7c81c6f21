"""--dry-run: what would lie where and run where, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyggml.llama.description import mib
from pyggml.llama.dry_run import dry_run, report
from pyggml.llama.out_of_memory import shortages
from pyggml.tools import sched_file
from pyggml.tools.placement import tell_fit
from pyggml.tools.settings import check, load_model
from pyggml.tools.simulated import chosen_devices
from pyggml.tools.ui import Screen


def run(values: Mapping[str, Any], screen: Screen) -> None:
    """Print the plan on stdout, as JSON if that is wanted; what does not fit is a warning."""
    check(values)
    sched_file.check(values)
    devices = chosen_devices(values, dry=True)
    with load_model(values, devices=devices, no_alloc=True) as llama:
        tell_fit(llama, screen)
        model = llama.model
        context = llama.context()
        plan = dry_run(model, context)
        sched_file.write_wanted(values, context)
        if values.get("json"):
            print(json.dumps(plan.as_json()))
        else:
            for line in report(model, plan):
                print(line)
        has_experts = model.hparams.experts is not None
        for text in shortages(plan.memory.devices, model.devices, has_experts=has_experts):
            screen.warn(text)
        host = plan.memory.devices[-1]
        if plan.modelled is not None and host.use.model > host.total:
            screen.warn(
                f"{mib(host.use.model)} of weights are more than the {mib(host.total)} of memory "
                "here: times do not contain reading them from disk (those of pyllama-plan do)"
            )
