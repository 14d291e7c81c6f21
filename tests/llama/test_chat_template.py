"""Chat templates: rendering equal to llama.cpp's, choice of template, sandbox, errors."""

import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_cpp_server import RealServer

from pyggml.errors import ConfigError, UserError
from pyggml.llama.chat import ChatTemplate, ChatTemplateError, select_template

Messages = list[dict[str, Any]]

CALL = {
    "type": "function",
    "id": "c1",
    "function": {"name": "f", "arguments": '{"a": 1, "b": "é"}'},
}
TALK: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi é<b> "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]
PARTS: Messages = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
TOOLS: Messages = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
NULL: Messages = [{"role": "user", "content": None}]
DEVELOPER: Messages = [{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}]
EVERY = [TALK, TALK[1:], TALK[:1] + TALK[1:2], PARTS, TOOLS, NULL, DEVELOPER]

END = "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
FEATURES = (
    "{{ {'b': 1, 'a': [1, 2.5, none, true, 'é<']} | tojson }}"
    "{{ {'a': {'b': 1}} | tojson(indent=2) }}{{ 7 % 4 }}"
    "{% generation %}gen{% endgeneration %}"
    "{% set ns = namespace(n=0) %}{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}"
    "{% if i == 3 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{{ loop.index0 }}{% endfor %}"
    "{{ ns.n }}{% macro say(a, b='x') %}\n  <{{ a | trim }}>{{ b }}\n{% endmacro %}\n"
    "{{ say(' q ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join(', ') }}"
    "{{ 'abcdef'[1:3] }}{{ 'x'.upper() }}{{ ' a '.strip() }}{{ 'abc'.startswith('a') }}"
    "{{ bos_token }}{{ extra | default('none') }}{% if tools %}T{% else %}no tools{% endif %}"
    "{{ messages[0] | tojson }}{{ strftime_now('%Y-%m-%d') }} {{ datetime }} {{ date_string }}"
    "{% if messages[0].content is string %}s{% endif %}"
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ 'a' ~ 1 }}"
    "a\n  {% if true %}\n  b\n  {%- endif %}\n\n c {#- x #}\n"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "features": FEATURES,
    "no system": "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}" + END,
    "parts only": "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text }}{% endfor %}" + END,
    "text or parts": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}" + END,
    "object arguments": "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}]{% endfor %}" + END,
    "text arguments": "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}]"
    "{% endfor %}" + END,
}


def vocab_with(bos: str = "<s>", eos: str = "</s>", *, add_bos: bool = False) -> Any:
    """As much of a vocabulary as choosing a template asks for."""
    special = SimpleNamespace(bos=0 if bos else None, eos=1 if eos else None)
    return SimpleNamespace(
        special=special, add_bos=add_bos, add_eos=False, text=[bos, eos].__getitem__
    )


def metadata_with(**templates: str) -> Any:
    """Metadata with tokenizer.chat_template and its variants (plain, tool_use)."""
    keys = {"plain": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    values = {keys[name]: text for name, text in templates.items()}
    return SimpleNamespace(get_str=values.get)


# --- equal to llama.cpp --------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_llama_cpp(name: str, smollm2: Path) -> None:
    server = RealServer(smollm2, chat_template=TEMPLATES[name])
    ours = ChatTemplate.from_source(TEMPLATES[name], bos_token="<|im_start|>")
    for messages in EVERY:
        assert ours.render(messages) == server.apply_template(messages)
    kwargs = {"extra": "hey"}
    expected = server.apply_template(TALK, chat_template_kwargs=kwargs)
    assert ours.render(TALK, **kwargs) == expected


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("jinja", [True, False])
def test_template_of_a_real_model(model: str, jinja: bool, request: Any) -> None:
    from pyggml.gguf import open_gguf
    from pyggml.llama.vocab import Vocab

    path = request.getfixturevalue(model)
    with open_gguf(path) as file:
        template = select_template(file.metadata, Vocab.from_metadata(file.metadata), jinja=jinja)
    assert template.explicit == (model == "smollm2")  # the other file has none: ChatML
    server = RealServer(path, jinja=jinja)
    for messages in EVERY[:4]:
        assert template.render(messages) == server.apply_template(messages)
        expected = server.apply_template(messages, add_generation_prompt=False)
        assert template.render(messages, add_generation_prompt=False) == expected


# --- which template ------------------------------------------------------------------------


def test_names_texts_and_files(tmp_path: Path) -> None:
    llama3 = "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    message = [{"role": "user", "content": "hi"}]

    def prompt(*args: Any, **kwargs: Any) -> str:
        template = select_template(
            metadata_with(plain="M{{ 1 + 1 }}"), vocab_with(), *args, **kwargs
        )
        return template.render(message, add_generation_prompt=False)

    assert prompt() == "M2"
    assert prompt("llama3") == prompt("llama3", jinja=False) == llama3
    assert prompt("C{{ bos_token }}") == "C<s>"
    assert (
        prompt("{{ '<start_of_turn>' }}", jinja=False) == "<start_of_turn>user\nhi<end_of_turn>\n"
    )
    file = tmp_path / "own.jinja"
    file.write_text("F{{ eos_token }}")
    assert prompt(chat_template_file=file) == "F</s>"


def test_a_model_without_template_talks_chatml() -> None:
    for metadata in (metadata_with(), metadata_with(plain="chatml")):
        template = select_template(metadata, vocab_with())
        text = template.render([{"role": "user", "content": "hi"}])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not select_template(metadata_with(), vocab_with()).explicit


def test_tool_template_when_tools_are_given() -> None:
    metadata = metadata_with(plain="plain", tool_use="tools {{ tools | length }}")
    template = select_template(metadata, vocab_with())
    assert template.render(TALK) == "plain"
    assert template.render(TALK, tools=[]) == "plain"
    assert template.render(TALK, tools=[{"name": "f"}]) == "tools 1"
    alone = select_template(metadata_with(tool_use="T"), vocab_with())
    assert alone.explicit and alone.render(TALK) == "T"


def test_bos_is_left_to_the_tokenizer() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    message = [{"role": "user", "content": "hi"}]
    for add_bos, expected in ((True, "hi</s>"), (False, "<s>hi</s>")):
        template = select_template(metadata_with(plain=source), vocab_with(add_bos=add_bos))
        assert template.render(message) == expected
    options = {"bos_token": "<s>", "eos_token": "</s>", "add_eos": True}
    assert ChatTemplate.from_source(source, **options).render(message) == "<s>hi"
    no_tokens = select_template(metadata_with(plain=source), vocab_with("", ""))
    assert no_tokens.render(message) == "hi"


# --- turn by turn --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "zephyr", "mistral-v7"])
def test_deltas_make_up_the_whole(name: str) -> None:
    template = ChatTemplate.from_name(name)
    for place, message in enumerate(TALK):
        before = template.render(TALK[:place], add_generation_prompt=False) if place else ""
        asks = message["role"] == "user"
        delta = template.render_delta(TALK[:place], message)
        if asks and before.endswith("\n"):
            assert delta[0] == "\n"  # made up for, as the next test shows
            delta = delta[1:]
        whole = template.render(TALK[: place + 1], add_generation_prompt=asks)
        assert before + delta == whole


def test_delta_makes_up_for_the_line_break_after_an_answer() -> None:
    template = ChatTemplate.from_name("chatml")
    first = template.render_delta([], TALK[1])
    assert first == "<|im_start|>user\n Hi é<b> <|im_end|>\n<|im_start|>assistant\n"
    # the model wrote Hello<|im_end|>, the template's line break after it is still missing
    second = template.render_delta(TALK[1:3], TALK[3])
    assert second == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert first + "Hello<|im_end|>" + second == template.render(TALK[1:])
    assert template.render_delta(TALK[:2], TALK[2]) == "<|im_start|>assistant\nHello<|im_end|>\n"


def test_delta_of_a_template_that_rewrites_history() -> None:
    source = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|"
        "{% endif %}{% endfor %}"
    )
    template = ChatTemplate.from_source(source)
    with pytest.raises(ChatTemplateError, match="rewrites earlier messages"):
        template.render_delta(TALK[1:3], TALK[3])


def test_example_for_the_log() -> None:
    assert ChatTemplate.from_name("chatml").example() == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n"
        "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )


# --- messages ------------------------------------------------------------------------------


def test_system_text_is_never_lost() -> None:
    template = ChatTemplate.from_source(TEMPLATES["no system"])
    system = {"role": "system", "content": "S"}
    user, answer = TALK[1], TALK[2]
    assert template.render([system, system, user]).startswith("<user>S\nS\n Hi é<b><end>")
    assert template.render([user, answer, system, user]).count("<user>S\n Hi é<b><end>") == 1
    assert template.render([system], add_generation_prompt=False) == "<user>S<end>\n"


@pytest.mark.parametrize(
    "make", [ChatTemplate.from_source, lambda _: ChatTemplate.from_name("chatml")]
)
def test_messages_that_cannot_be(make: Callable[[str], ChatTemplate]) -> None:
    template = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ConfigError, match="'image_url' is not supported"):
        template.render([{"role": "user", "content": picture}])
    with pytest.raises(ConfigError, match="needs a role"):
        template.render([{"content": "x"}])
    with pytest.raises(ConfigError, match="must be text or a list"):
        template.render([{"role": "user", "content": {"text": 7}}])


def test_parts_equal_the_joined_text() -> None:
    joined = [{"role": "user", "content": "a\nb"}]
    source = "{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
    for template in (ChatTemplate.from_name("phi3"), ChatTemplate.from_source(source)):
        assert template.render(PARTS) == template.render(joined)


def test_dates_come_from_the_clock() -> None:
    source = "{{ datetime }}/{{ date_string }}/{{ strftime_now('%H:%M') }}"
    noon = datetime(2026, 3, 1, 12, 30)
    template = ChatTemplate.from_source(source, now=lambda: noon)
    assert template.render(TALK) == "Mar 01 2026/01 Mar 2026/12:30"


def test_thinking_is_on_unless_switched_off() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}off{% else %}on{% endif %}"
    template = ChatTemplate.from_source(source)
    assert template.render(TALK) == "on"
    assert template.render(TALK, enable_thinking=False) == "off"


# --- sandbox and errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__self__.__class__.__mro__ }}",
        "{{ lipsum.__globals__['os'].popen('touch MARKER').read() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ 'x' * 999999999 }}",
        "{{ ([1] * 999999999) | length }}",
        "{{ 9 ** 99999999 }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_sandbox_stops(attack: str, tmp_path: Path) -> None:
    marker = tmp_path / "made-by-template"
    template = ChatTemplate.from_source(attack.replace("MARKER", str(marker)))
    with pytest.raises(ChatTemplateError, match="chat template"):
        template.render(TALK)
    assert not marker.exists()
    assert TALK[0] == {"role": "system", "content": "Be brief."}


def test_sandbox_hides_attributes_from_filters_and_formats() -> None:
    for attack in (
        "{{ 'a' | attr('__class__') }}",
        "{{ '{0.__class__}'.format('a') }}",
        "{{ strftime_now.__self__ }}",
    ):
        assert ChatTemplate.from_source(attack).render(TALK) == ""


def test_a_refusal_says_what_the_template_says() -> None:
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    )
    template = ChatTemplate.from_source(source)
    with pytest.raises(UserError, match="refuses these messages: Roles must alternate!$"):
        template.render(TALK)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("a\n\n{{ x | nofilter }}", "line 3: No filter named 'nofilter'"),
        ("{% for x in y %}", "line 1: Unexpected end of template"),
        ("a\n{{ messages[0].no.where }}", "line 2: .*no attribute 'no'"),
        ("a\n{{ 1 / 0 }}", "line 2: ZeroDivisionError: division by zero"),
        ("{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ undefined_function() }}", "line 1: 'undefined_function' is undefined"),
    ],
)
def test_template_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate.from_source(source).render(TALK)
    assert len(str(caught.value).splitlines()) == 1


def test_choices_that_cannot_be(tmp_path: Path) -> None:
    metadata, vocab = metadata_with(plain="{{ no marks }}"), vocab_with()
    with pytest.raises(ConfigError, match="'chatlm' is neither.*\n.*chatml"):
        select_template(metadata, vocab, "chatlm")
    with pytest.raises(ConfigError, match="not supported, try using --jinja"):
        select_template(metadata, vocab, "{{ no marks }}", jinja=False)
    with pytest.raises(ConfigError, match="not both"):
        select_template(metadata, vocab, "x", chat_template_file=tmp_path / "y")
    with pytest.raises(ConfigError, match=r"missing\.jinja: No such file"):
        select_template(metadata, vocab, chat_template_file=tmp_path / "missing.jinja")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary: not UTF-8"):
        select_template(metadata, vocab, chat_template_file=tmp_path / "binary")
    with pytest.raises(ConfigError, match="no tools"):
        ChatTemplate.from_name("llama3").render(TALK, tools=[{"name": "f"}])


def test_an_unrecognized_model_template_matters_only_when_used() -> None:
    template = select_template(metadata_with(plain="{{ no marks }}"), vocab_with(), jinja=False)
    with pytest.raises(ConfigError, match="not supported, try using --jinja"):
        template.render(TALK)


def test_jinja_is_imported_when_it_is_used() -> None:
    code = (
        "import sys; from pyggml.llama.chat import ChatTemplate; "
        "ChatTemplate.from_name('chatml').example(); t = ChatTemplate.from_source('x'); "
        "print('jinja2' in sys.modules); t.example(); print('jinja2' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]
