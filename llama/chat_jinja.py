"""Jinja chat templates, run in a sandbox: the text comes out of a model file."""

from __future__ import annotations

import functools
import json
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyggml.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = Mapping[str, Any]

LARGEST = 1 << 20  # items a template may make by multiplying, bits by exponentiation


class ChatTemplateError(UserError):
    """A chat template that is malformed, refuses the messages or attempts what it must not."""


@functools.cache
def environment() -> Environment:
    """Jinja with the options, filters and functions that chat templates rely on."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks the assistant's text for training; here it is only text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: object, operator_: str, left: Any, right: Any) -> Any:
            sizes = {"*": _repetition, "**": _power_bits}
            if sizes[operator_](left, right) > LARGEST:
                raise SecurityError("a result that large is not allowed")
            return {"*": operator.mul, "**": operator.pow}[operator_](left, right)

    env = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = _refuse
    return env


def _repetition(left: object, right: object) -> int:
    """Items of a sequence repeated by `*`; 0 for the product of two numbers."""
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            return len(items) * count
    return 0


def _power_bits(left: object, right: object) -> int:
    """Bits of an integer power; 0 for other numbers."""
    if not isinstance(left, int) or not isinstance(right, int):
        return 0
    return left.bit_length() * right


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The tojson filter: unlike jinja's own it does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Refusal(Exception):
    """raise_exception(): the template's own words."""


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


class JinjaTemplate:
    """A compiled template with the variables every rendering gets."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    @functools.cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateSyntaxError

        try:
            return environment().from_string(self.source)
        except TemplateSyntaxError as e:
            raise ChatTemplateError(f"chat template, line {e.lineno}: {e.message}") from e

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt; whatever goes wrong inside the template is a ChatTemplateError."""
        now = self._now()
        context: dict[str, object] = {
            "messages": messages,
            **self._tokens,
            "enable_thinking": True,
            "strftime_now": now.strftime,
            "datetime": now.strftime("%b %d %Y"),
            "date_string": now.strftime("%d %b %Y"),
            **variables,
        }
        if add_generation_prompt:
            context["add_generation_prompt"] = True
        template = self._template
        try:
            return template.render(context)
        except _Refusal as e:
            raise ChatTemplateError(f"the chat template refuses these messages: {e}") from e
        except Exception as e:  # a template can raise anything, even RecursionError
            raise ChatTemplateError(f"chat template{_line_of(e)}: {_describe(e)}") from e

    @functools.cached_property
    def supports_text(self) -> bool:
        """Content may be a string."""
        rendered = self._attempt([_say("user", "<usr>")])
        return rendered is not None and "<usr>" in rendered

    @functools.cached_property
    def supports_parts(self) -> bool:
        """Content may be a list of parts."""
        rendered = self._attempt([_say("user", _part("<usr>"))])
        return rendered is not None and "<usr>" in rendered and "'type'" not in rendered

    @functools.cached_property
    def wants_parts(self) -> bool:
        """Content must be a list of parts."""
        return self.supports_parts and not self.supports_text

    @functools.cached_property
    def supports_system(self) -> bool:
        """A system message appears in the prompt."""
        system, user = (_part(s) if self.wants_parts else s for s in ("<sys>", "<usr>"))
        rendered = self._attempt([_say("system", system), _say("user", user)])
        return rendered is not None and "<sys>" in rendered

    @functools.cached_property
    def wants_object_arguments(self) -> bool:
        """Arguments of a tool call must be an object, not JSON text."""
        text, value = '{"key": "<arg>"}', {"key": "<arg>"}
        as_text, as_value = (self._attempt(_tool_call(argument)) for argument in (text, value))
        return (as_text is None or text not in as_text) and "<arg>" in (as_value or "")

    def _attempt(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.render(messages, False, {})
        except ChatTemplateError:
            return None


def _say(role: str, content: object) -> Message:
    return {"role": role, "content": content}


def _part(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def _tool_call(arguments: object) -> list[Message]:
    call = {"id": "call00001", "type": "function"}
    function = {"name": "tool", "arguments": arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
    return [_say("user", "<usr>"), answer]


def _describe(e: Exception) -> str:
    """One line about an exception."""
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    known = type(e).__module__.startswith("jinja2")
    return text if known else f"{type(e).__name__}: {text}"


def _line_of(e: Exception) -> str:
    """ ", line N" of the innermost template line in a traceback."""
    frames = traceback.extract_tb(e.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return f", line {lines[-1]}" if lines else ""
