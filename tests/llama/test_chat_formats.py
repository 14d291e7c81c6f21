"""The built-in chat formats and their recognition, against llama.cpp's own."""

import random

import pytest
from llama_cpp_library import apply_format, builtin_formats

from pyggml.llama import chat_detect
from pyggml.llama.chat_detect import detect_format
from pyggml.llama.chat_formats import FORMATS, ChatFormat, Turn

ROLES = ("system", "user", "assistant", "tool", "function", "assistant_tool_call", "Weird")
CONTENTS = ("a", " b ", "\n c\t", "d\n", "", " ", "é \N{NO-BREAK SPACE}")
TALK = [("system", " s "), ("user", " a "), ("assistant", " b "), ("assistant_tool_call", "t")]


def test_every_name_of_llama_cpp_is_there() -> None:
    assert set(builtin_formats()) == set(FORMATS) - {"dots1"}  # found by marks only


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"dots1"}))
def test_format_equals_llama_cpp(name: str) -> None:
    choose = random.Random(name)
    for _ in range(60):
        length = choose.randint(1, 6)
        messages = [(choose.choice(ROLES), choose.choice(CONTENTS)) for _ in range(length)]
        for ask in (True, False):
            assert FORMATS[name].render(messages, ask) == apply_format(name, messages, ask)


def test_frames_by_hand() -> None:
    plain = ChatFormat(turns={"*": Turn("<{role}|{Role}|{ROLE}>", "\n", strip=True)}, ask="<me>")
    assert plain.render([("user", " hi ")], True) == "<user|User|USER>hi\n<me>"
    assert plain.render([], True) == "<me>"
    held = ChatFormat(turns={"system": Turn(""), "user": Turn("U:", "\n", takes_system=True)})
    assert held.render([("system", "s"), ("user", "a"), ("user", "b")], True) == "U:s\n\na\nU:b\n"


MARKS = sorted(
    {
        mark
        for rules in (
            chat_detect._RULES,
            chat_detect._CHATML,
            chat_detect._INSTRUCT_V1_V3,
            chat_detect._INSTRUCT_LLAMA2,
        )
        for _, marks in rules
        for mark in marks
    }
    | {
        "<|im_start|>",
        "[INST]",
        "[SYSTEM_PROMPT]",
        "[AVAILABLE_TOOLS]",
        "' [INST] ' + system_message",
    }
)


def assert_recognized(text: str) -> None:
    """The format found for a text writes what llama.cpp writes for that text."""
    name = detect_format(text)
    for messages in (TALK, [("user", "c "), *TALK, ("user", "x")]):
        expected = apply_format(text, messages, True)
        assert (name and FORMATS[name].render(messages, True)) == expected, (text, name)


@pytest.mark.parametrize(("name", "marks"), chat_detect._RULES)
def test_marks_of_a_rule(name: str, marks: tuple[str, ...]) -> None:
    text = "{{ x }}".join(marks)
    assert detect_format(text) == name
    assert_recognized(text)


def test_recognition_equals_llama_cpp() -> None:
    choose = random.Random(11)
    for mark in MARKS:
        assert_recognized(mark)
    for _ in range(1500):
        assert_recognized("|x|".join(choose.sample(MARKS, choose.randint(2, 5))))


def test_unknown_text() -> None:
    assert detect_format("{{ messages[0].content }}") is None
    assert apply_format("{{ messages[0].content }}", TALK, True) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{'<|' + m.role + '|>'}}<|end|>{% if ask %}<|assistant|>", "phi3"),
        ("<|im_start|>{{m.role}}<|im_sep|>{{m.content}}<|im_end|>", "phi4"),
        ("{{bos_token}}<start_of_turn>{{m.role}}\n<end_of_turn>", "gemma"),  # Gemma 2, 3
        ("[gMASK]<sop><|system|>\n<|user|>\n<|assistant|>\n", "chatglm4"),  # GLM-4
        ("{{bos_token}}[SYSTEM_PROMPT]x[/SYSTEM_PROMPT][INST]y[/INST]", "mistral-v7"),
        ("<|im_start|>system\n## Metadata\n<|im_start|>assistant\n", "chatml"),  # SmolLM 3
        ("{{bos_token}}<|user|>\n<|assistant|>\n<|endoftext|>", "glmedge"),  # OLMo 2
        ("<|start_of_role|>user<|end_of_role|>", "granite"),
        ("<|start_of_role|>user<|end_of_role|><tools>", "granite-4.1"),
    ],
)
def test_formats_of_dense_families(template: str, name: str) -> None:
    assert detect_format(template) == name
    assert_recognized(template)
