"""Chat templates: from messages to the prompt the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyggml.errors import ConfigError
from pyggml.llama.chat_detect import detect_format
from pyggml.llama.chat_formats import FORMATS, ChatFormat
from pyggml.llama.chat_jinja import ChatTemplateError, JinjaTemplate, Message

if TYPE_CHECKING:
    from pyggml.gguf_metadata import Metadata
    from pyggml.llama.vocab import Vocab

__all__ = ["FORMATS", "ChatTemplate", "ChatTemplateError", "Message", "select_template"]

TEMPLATE_KEY = "tokenizer.chat_template"

EXAMPLE: tuple[Message, ...] = (
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "How are you?"},
)


class Renderer(Protocol):
    """What turns messages into text."""

    def __call__(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template, either jinja text or one of the built-in formats."""

    renderer: Renderer
    tool_renderer: Renderer | None = None  # used when tools are given
    explicit: bool = True  # chosen by the user or the model, not the ChatML default

    @classmethod
    def from_source(cls, source: str, **options: Any) -> ChatTemplate:
        """A template of jinja text. Options: bos_token, eos_token, add_bos, add_eos, now."""
        return cls(renderer=_jinja_renderer(source, **options))

    @classmethod
    def from_name(cls, name: str) -> ChatTemplate:
        """One of the built-in formats (FORMATS)."""
        return cls(renderer=_format_renderer(_find_format(name)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Variables reach the template: tools, enable_thinking, whatever else it knows.
        A BOS or EOS that tokenizing adds anyway is left out.
        """
        if variables.get("tools") and self.tool_renderer:
            return self.tool_renderer(messages, add_generation_prompt, variables)
        return self.renderer(messages, add_generation_prompt, variables)

    def render_delta(self, previous: Sequence[Message], message: Message, **variables: Any) -> str:
        """What a new message adds to the prompt; after a user's it asks for the answer.

        For a memory that holds the previous messages as generated: a line break that the
        template writes after the assistant's end token is made up for.
        """
        asks = message["role"] == "user"
        before = ""
        if previous:
            before = self.render(previous, add_generation_prompt=False, **variables)
        after = self.render([*previous, message], add_generation_prompt=asks, **variables)
        if not after.startswith(before):
            raise ChatTemplateError(
                "this chat template rewrites earlier messages when one is added: "
                "render the whole conversation instead"
            )
        missing = "\n" if asks and before.endswith("\n") else ""
        return missing + after[len(before) :]

    def example(self, **variables: Any) -> str:
        """A short conversation in this template, for the log."""
        return self.render(EXAMPLE, **variables)


def select_template(
    metadata: Metadata,
    vocab: Vocab,
    chat_template: str | None = None,
    *,
    chat_template_file: Path | None = None,
    jinja: bool = True,
) -> ChatTemplate:
    """The template of --chat-template (a name or jinja text), of its file, or of the model.

    Without jinja, a template text only serves to recognize a built-in format. A model
    without a template talks ChatML.
    """
    if chat_template and chat_template_file:
        raise ConfigError("give --chat-template or --chat-template-file, not both")
    if chat_template_file:
        chat_template = _read(chat_template_file)
    special = vocab.special
    options = {
        "bos_token": _text(vocab, special.bos),
        "eos_token": _text(vocab, special.eos),
        "add_bos": vocab.add_bos,
        "add_eos": vocab.add_eos,
    }
    if chat_template:
        return ChatTemplate(renderer=_chosen(chat_template, jinja, options))
    source = metadata.get_str(TEMPLATE_KEY, "")
    tools = metadata.get_str(f"{TEMPLATE_KEY}.tool_use", "")
    explicit = bool(source or tools)
    if source in ("", "chatml"):
        source = tools or "chatml"
    return ChatTemplate(
        renderer=_of_model(source, jinja, options),
        tool_renderer=_of_model(tools, jinja, options) if tools else None,
        explicit=explicit,
    )


def _chosen(text: str, jinja: bool, options: Mapping[str, Any]) -> Renderer:
    """The user's choice: mistakes are reported at once."""
    if text in FORMATS or "\n" not in text and "{" not in text:
        return _format_renderer(_find_format(text))
    if jinja:
        return _jinja_renderer(text, **options)
    return _format_renderer(_recognized(text))


def _of_model(source: str, jinja: bool, options: Mapping[str, Any]) -> Renderer:
    """The model's template: one that is not recognized matters only when it is used."""
    if source in FORMATS:
        return _format_renderer(FORMATS[source])
    if jinja:
        return _jinja_renderer(source, **options)

    def render(
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        chat_format = _recognized(source)
        return _format_renderer(chat_format)(messages, add_generation_prompt, variables)

    return render


def _recognized(source: str) -> ChatFormat:
    name = detect_format(source)
    if name is None:
        raise ConfigError("this custom template is not supported, try using --jinja")
    return FORMATS[name]


def _find_format(name: str) -> ChatFormat:
    if name not in FORMATS:
        raise ConfigError(
            f"--chat-template {name!r} is neither a template text nor a built-in format\n"
            f"formats: {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def _format_renderer(chat_format: ChatFormat) -> Renderer:
    def render(
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        if variables.get("tools"):
            raise ConfigError("built-in chat formats know no tools: use --jinja and a template")
        pairs = [(_role(m), joined(m.get("content"))) for m in messages]
        return chat_format.render(pairs, add_generation_prompt)

    return render


def _jinja_renderer(
    source: str, *, add_bos: bool = False, add_eos: bool = False, **tokens: Any
) -> Renderer:
    template = JinjaTemplate(source, **tokens)

    def render(
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        adapted = adapt(messages, template)
        text = template.render(adapted, add_generation_prompt, variables)
        if add_bos:
            text = text.removeprefix(tokens.get("bos_token", ""))
        if add_eos:
            text = text.removesuffix(tokens.get("eos_token", ""))
        return text

    return render


def adapt(messages: Sequence[Message], template: JinjaTemplate) -> list[Message]:
    """Messages in the form this template handles."""
    keeps_developer = "<|channel|>" in template.source  # GPT-OSS tells it from system
    known = [
        {**m, "role": "system" if _role(m) == "developer" and not keeps_developer else _role(m)}
        for m in messages
    ]
    if not template.supports_system:
        known = merge_system(known)
    return [_adapted(message, template) for message in known]


def merge_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Each system text in front of the next message, for templates without that role."""
    merged: list[dict[str, Any]] = []
    held = ""
    for message in messages:
        text = joined(message.get("content"))
        if message["role"] == "system":
            held += f"{text}\n"
        else:
            merged.append({**message, "content": held + text} if held else {**message})
            held = ""
    if held:  # nothing follows that could carry it
        merged.append({"role": "user", "content": held.removesuffix("\n")})
    return merged


def _adapted(message: Message, template: JinjaTemplate) -> Message:
    content = message.get("content")
    if template.wants_parts and not isinstance(content, list):
        content = [{"type": "text", "text": joined(content)}]
    elif not isinstance(content, str) and not (
        isinstance(content, list) and template.supports_parts
    ):
        content = joined(content)
    result = {**message, "content": content}
    if message.get("tool_calls") and template.wants_object_arguments:
        result["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return result


def _with_object(call: Message) -> Message:
    """A tool call whose arguments are an object instead of JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _role(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ConfigError(f"a chat message needs a role, got {dict(message)!r:.80}")
    return role


def joined(content: object) -> str:
    """The text of a message: a string, nothing, or text parts one per line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"content of a chat message must be text or a list, got {content!r:.80}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ConfigError(f"content part of type {kind!r} is not supported: use text")
    return "\n".join(str(part.get("text", "")) for part in content)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--chat-template-file {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"--chat-template-file {path}: not UTF-8 text") from e


def _text(vocab: Vocab, token: int | None) -> str:
    return "" if token is None else vocab.text(token)
