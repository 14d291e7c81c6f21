"""From flag values to the library's parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.backend import Device
from pyggml.errors import ConfigError, UserError
from pyggml.gguf import parse_overrides
from pyggml.llama.api import Llama, load
from pyggml.llama.context_params import ContextParams, RopeOverrides
from pyggml.llama.cpu_params import CpuParams
from pyggml.llama.loader import ModelParams, Progress
from pyggml.llama.sampling import (
    SamplingParams,
    model_defaults,
    parse_logit_bias,
    parse_samplers,
    parse_sampling_seq,
)
from pyggml.llama.session import GenerateParams
from pyggml.tools.inputs import read_text, unescape
from pyggml.tools.options import flag_named, section
from pyggml.tools.placement import placement


def check(values: Mapping[str, Any]) -> None:
    """Find every mistake that can be seen without the model: reading that may take minutes."""
    if "model" not in values:
        raise UserError("--model is required: pyllama-cli -m MODEL.gguf -p 'text'")
    if str(values["model"]).lower().startswith(("http://", "https://")):
        raise UserError(
            f"--model {values['model']}: download the file first; only pyllama-plan reads headers "
            "of models on servers"
        )
    if "json" in values and "dry_run" not in values:
        raise UserError("--json is the form of a plan: give --dry-run as well")
    sampling(values, {})
    generation(values)
    ModelParams(**_model(values))
    ContextParams(**_context(values))
    CpuParams(**section(values, "cpu"))
    RopeOverrides(**_rope(values))


def load_model(
    values: Mapping[str, Any],
    progress: Progress | None = None,
    *,
    devices: Sequence[Device] | None = None,
    no_alloc: bool = False,
) -> Llama:
    """Load what the flags describe, or only plan it; on some devices (None: all there are)."""
    overrides = [o for text in values.get("override_kv", ()) for o in parse_overrides(text)]
    return load(
        values["model"],
        progress=progress,
        no_alloc=no_alloc,
        override_kv=overrides,
        chat_template=_template(values),
        jinja=values.get("jinja", True),
        devices=devices,
        **_model(values),
        **_context(values),
        **section(values, "cpu"),
        **_rope(values),
    )


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    model = section(values, "model")
    older = [flag for flag in ("no_mmap", "mlock") if flag in values]
    if older and "load_mode" in model:
        raise ConfigError(
            f"--load-mode and {flag_named(older[0])} contradict each other: give one of them"
        )
    if older:
        lock_only = "mlock" if "no_mmap" in values else "mmap+mlock"
        model["load_mode"] = lock_only if "mlock" in values else "none"
    model["placement"] = placement(values)
    return model


def _context(values: Mapping[str, Any]) -> dict[str, Any]:
    context = section(values, "context")
    for name in ("n_threads", "n_threads_batch"):
        # llama.cpp: 0 and below mean "all cores"
        if name in context:
            context[name] = max(0, context[name])
    return context


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    rope = section(values, "rope")
    if "rope_scale" in values:
        if values["rope_scale"] <= 0:
            raise UserError(f"--rope-scale {values['rope_scale']}: it must be positive")
        rope.setdefault("freq_scale", 1.0 / values["rope_scale"])
    return rope


def _template(values: Mapping[str, Any]) -> str | None:
    if "chat_template" in values and "chat_template_file" in values:
        raise UserError("--chat-template and --chat-template-file contradict each other")
    if "chat_template_file" in values:
        return read_text(values["chat_template_file"], "--chat-template-file")
    template: str | None = values.get("chat_template")
    return template


def sampling(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters: given ones, else the model's own, else llama.cpp's defaults."""
    given = section(values, "sampling")
    if "samplers" in values and "sampling_seq" in values:
        raise UserError("--samplers and --sampling-seq contradict each other: give one of them")
    if "samplers" in values:
        given["samplers"] = parse_samplers(values["samplers"])
    if "sampling_seq" in values:
        given["samplers"] = parse_sampling_seq(values["sampling_seq"])
    if "logit_bias" in values:
        given["logit_bias"] = dict(parse_logit_bias(text) for text in values["logit_bias"])
    breakers = values.get("dry_sequence_breaker")
    if breakers:
        given["dry_sequence_breakers"] = tuple(
            unescape(b, "--dry-sequence-breaker") for b in breakers if b != "none"
        )
    try:
        return SamplingParams(**{**model_defaults(metadata), **given})
    except ConfigError as error:
        # the library speaks of parameters, a person gave flags
        name, space, rest = str(error).partition(" ")
        if name not in given:
            raise
        raise ConfigError(flag_named(f"sampling.{name}") + space + rest) from None


def generation(values: Mapping[str, Any]) -> GenerateParams:
    """When generation ends."""
    stop = values.get("stop", ())
    if values.get("escape", True):
        stop = tuple(unescape(s, "--reverse-prompt") for s in stop)
    return GenerateParams(stop=tuple(stop), **section(values, "generate"))


@dataclass(frozen=True, slots=True)
class Options:
    """What the tool itself decides by."""

    display_prompt: bool
    verbose_prompt: bool
    perf: bool
    conversation: bool | None
    single_turn: bool
    multiline: bool
    simple_io: bool
    has_system: bool

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Options":
        return Options(
            display_prompt=values.get("display_prompt", True),
            verbose_prompt=values.get("verbose_prompt", False),
            perf=values.get("perf", True),
            conversation=values.get("conversation"),
            single_turn=values.get("single_turn", False),
            multiline=values.get("multiline", False),
            simple_io=values.get("simple_io", False),
            has_system="system" in values or "system_file" in values,
        )

    def is_chat(self, *, has_template: bool, on_terminal: bool) -> bool:
        """As asked; else if the model can and there is somebody to talk to, or it is meant."""
        if self.conversation is not None:
            return self.conversation
        return has_template and (on_terminal or self.single_turn or self.has_system)
