"""llama.cpp's built-in chat formats: how each turn is framed, as data.

They serve `--chat-template NAME` and models whose template is not to be run (`--no-jinja`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

SPACES = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class Turn:
    """Text around one message. {role}, {Role} and {ROLE} stand for the role's name."""

    before: str
    after: str = ""
    strip: bool = False  # drop spaces around the content
    takes_system: bool = False  # where the format has no place for the system's text of its own

    def render(self, role: str, content: str, system: str = "") -> str:
        """The framed message, with a system text in front of its content."""
        before = self.before.replace("{role}", role).replace("{ROLE}", role.upper())
        before = before.replace("{Role}", role[:1].upper() + role[1:])
        content = content.strip(SPACES) if self.strip else content
        return before + (f"{system}\n\n" if system else "") + content + self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A chat format. A role without a turn, and without "*", is left out."""

    turns: Mapping[str, Turn]  # by role; "*": every other role
    ask: str = ""  # where the assistant is to speak
    start: str = ""  # before everything
    omit: str = ""  # left out where it would be the very first text
    opening: str = ""  # before a message that follows the assistant's
    first_opening: str = ""  # the same before the first message
    no_system: str = ""  # at the start when the first message is not the system's
    leading_system: bool = False  # a system message is rendered in first place only
    asks_after_user: bool = False  # ask exactly when the user spoke last

    def render(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
        """The prompt for (role, content) pairs."""
        last = messages[-1][0] if messages else ""
        first = messages[0][0] if messages else "system"
        asks = last == "user" if self.asks_after_user else add_generation_prompt
        filler = self.no_system if first != "system" else ""
        body = "".join(self._turns(messages)).removeprefix(self.omit)
        return self.start + filler + body + (self.ask if asks else "")

    def _turns(self, messages: Sequence[tuple[str, str]]) -> Iterator[str]:
        holds_system = any(turn.takes_system for turn in self.turns.values())
        system, opening = "", self.first_opening
        for place, (role, content) in enumerate(messages):
            turn = self.turns.get(role, self.turns.get("*"))
            if turn is None or (role == "system" and place and self.leading_system):
                continue
            if role == "system" and holds_system:
                system += turn.render(role, content)
                continue
            yield opening + turn.render(role, content, system if turn.takes_system else "")
            system = "" if turn.takes_system else system
            opening = self.opening if role not in ("system", "user") else ""


def _uniform(before: str, after: str, ask: str, *, strip: bool = False) -> ChatFormat:
    """The same frame for every role."""
    return ChatFormat(turns={"*": Turn(before, after, strip)}, ask=ask)


def _named(ask: str, /, **turns: Turn) -> ChatFormat:
    """A frame for each of the roles given, nothing for others; `other` is any other role."""
    by_role = {"*" if role == "other" else role: turn for role, turn in turns.items()}
    return ChatFormat(turns=by_role, ask=ask)


def _llama2(system: Turn, *, opening: str = "[INST] ", strip: bool = False) -> ChatFormat:
    return ChatFormat(
        start="[INST] ",
        opening=opening,
        turns={
            "system": system,
            "user": Turn("", " [/INST]", strip),
            "*": Turn("", "</s>", strip),
        },
    )


def _mistral(opening: str, close: str, answer: Turn) -> ChatFormat:
    return ChatFormat(
        first_opening=opening,
        opening=opening,
        turns={"system": Turn("", "\n\n"), "user": Turn("", close), "*": answer},
    )


def _mistral_v7(space: str) -> ChatFormat:
    return _named(
        "",
        system=Turn(f"[SYSTEM_PROMPT]{space}", "[/SYSTEM_PROMPT]"),
        user=Turn(f"[INST]{space}", "[/INST]"),
        other=Turn(space, "</s>"),
    )


def _bailing(after: str, ask: str, no_system: str = "") -> ChatFormat:
    human = Turn("<role>HUMAN</role>", after)
    turns = {"user": human, "*": Turn("<role>{ROLE}</role>", after)}
    return ChatFormat(turns=turns, ask=f"<role>ASSISTANT</role>{ask}", no_system=no_system)


def _granite(caller: str) -> ChatFormat:
    """caller: the role that a tool call is written under."""
    call = f"<|start_of_role|>{caller}<|end_of_role|><|tool_call|>"
    return _named(
        "<|start_of_role|>assistant<|end_of_role|>",
        assistant_tool_call=Turn(call, "<|end_of_text|>\n"),
        other=Turn("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"),
    )


_SYS = Turn("<<SYS>>\n", "\n<</SYS>>\n\n")
_COMMAND_R = "<|START_OF_TURN_TOKEN|>"
_EXAONE = {
    "system": Turn("[|system|]", "[|endofturn|]\n", strip=True),
    "user": Turn("[|user|]", "\n", strip=True),
    "assistant": Turn("[|assistant|]", "[|endofturn|]\n", strip=True),
}
_VICUNA = {"user": Turn("USER: ", "\n"), "assistant": Turn("ASSISTANT: ", "</s>\n")}
_HY = "<｜hy_{}｜>"
_PANGU = {"system": "系统", "user": "用户", "assistant": "助手", "tool": "工具", "function": "方法"}

FORMATS: dict[str, ChatFormat] = {
    "bailing": _bailing("", ""),
    "bailing-think": _bailing("", "<think>"),
    "bailing2": _bailing(
        "<|role_end|>", "", "<role>SYSTEM</role>detailed thinking off<|role_end|>"
    ),
    "chatglm3": replace(_uniform("<|{role}|>\n ", "", "<|assistant|>"), start="[gMASK]sop"),
    "chatglm4": replace(_uniform("<|{role}|>\n", "", "<|assistant|>\n"), start="[gMASK]<sop>"),
    "chatml": _uniform("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "command-r": _named(
        f"{_COMMAND_R}<|CHATBOT_TOKEN|>",
        **{
            role: Turn(f"{_COMMAND_R}<|{token}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", strip=True)
            for role, token in (("system", "SYSTEM"), ("user", "USER"), ("assistant", "CHATBOT"))
        },
    ),
    "deepseek": _named(
        "### Response:\n",
        system=Turn(""),
        user=Turn("### Instruction:\n", "\n"),
        assistant=Turn("### Response:\n", "\n<|EOT|>\n"),
    ),
    "deepseek-ocr": _uniform("", "", ""),
    "deepseek2": _named(
        "Assistant:",
        system=Turn("", "\n\n"),
        user=Turn("User: ", "\n\n"),
        assistant=Turn("Assistant: ", "<｜end▁of▁sentence｜>"),
    ),
    "deepseek3": _named(
        "<｜Assistant｜>",
        system=Turn("", "\n\n"),
        user=Turn("<｜User｜>"),
        assistant=Turn("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
    "dots1": _named(
        "<|response|>",
        system=Turn("<|system|>", "<|endofsystem|>"),
        user=Turn("<|userprompt|>", "<|endofuserprompt|>"),
        other=Turn("<|response|>", "<|endofresponse|>"),
    ),
    "exaone-moe": _named(
        "<|assistant|>\n",
        **{
            role: Turn("<|{role}|>\n", "<|endofturn|>\n", strip=True)
            for role in ("system", "user", "assistant", "tool")
        },
    ),
    "exaone3": _named("[|assistant|]", **_EXAONE),
    "exaone4": _named(
        "[|assistant|]", tool=Turn("[|tool|]", "[|endofturn|]\n", strip=True), **_EXAONE
    ),
    "falcon3": _uniform("<|{role}|>\n", "\n", "<|assistant|>\n"),
    "gemma": ChatFormat(
        turns={
            "system": Turn("", strip=True),
            "assistant": Turn("<start_of_turn>model\n", "<end_of_turn>\n", strip=True),
            "*": Turn("<start_of_turn>{role}\n", "<end_of_turn>\n", strip=True, takes_system=True),
        },
        ask="<start_of_turn>model\n",
    ),
    "gigachat": replace(
        _named(
            "assistant<|role_sep|>",
            system=Turn("", "<|message_sep|>"),
            user=Turn(
                "user<|role_sep|>",
                "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
            ),
            assistant=Turn("assistant<|role_sep|>", "<|message_sep|>"),
        ),
        start="<s>",
        leading_system=True,
    ),
    "glmedge": _uniform("<|{role}|>\n", "", "<|assistant|>"),
    "gpt-oss": _named(
        "<|start|>assistant",
        assistant=Turn("<|start|>{role}<|message|>", "<|return|>"),
        other=Turn("<|start|>{role}<|message|>", "<|end|>"),
    ),
    "granite": _granite("{role}"),
    "granite-4.0": _granite("assistant"),
    "granite-4.1": _granite("assistant"),
    "grok-2": _named(
        "Assistant:",
        system=Turn("System: ", "<|separator|>\n\n", strip=True),
        user=Turn("Human: ", "<|separator|>\n\n", strip=True),
        assistant=Turn("Assistant: ", "<|separator|>\n\n"),
    ),
    "hunyuan-dense": replace(
        _named(
            "",
            system=Turn("", _HY.format("place▁holder▁no▁3")),
            user=Turn(_HY.format("User"), _HY.format("Assistant")),
            assistant=Turn(_HY.format("Assistant"), _HY.format("place▁holder▁no▁2")),
        ),
        leading_system=True,
    ),
    "hunyuan-moe": _named(
        "",
        system=Turn("<|startoftext|>", "<|extra_4|>"),
        assistant=Turn("", "<|eos|>"),
        other=Turn("<|startoftext|>", "<|extra_0|>"),
    ),
    "hunyuan-vl": replace(
        _named(
            "",
            system=Turn("", _HY.format("place▁holder▁no▁3")),
            user=Turn("", _HY.format("User")),
            assistant=Turn("", _HY.format("Assistant")),
        ),
        start=_HY.format("begin▁of▁sentence"),
        leading_system=True,
    ),
    "kimi-k2": _named(
        "<|im_assistant|>assistant<|im_middle|>",
        system=Turn("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        user=Turn("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        assistant=Turn("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        tool=Turn("<|im_system|>tool<|im_middle|>", "<|im_end|>"),
        other=Turn("", "<|im_end|>"),
    ),
    "llama2": _llama2(Turn("", "\n")),
    "llama2-sys": _llama2(_SYS),
    "llama2-sys-bos": _llama2(_SYS, opening="<s>[INST] "),
    "llama2-sys-strip": _llama2(replace(_SYS, strip=True), strip=True),
    "llama3": _uniform(
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        strip=True,
    ),
    "llama4": _uniform(
        "<|header_start|>{role}<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        strip=True,
    ),
    "megrez": _uniform(
        "<|role_start|>{role}<|role_end|>",
        "<|turn_end|>",
        "<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": _named("", user=Turn("<用户>", "<AI>", strip=True), other=Turn("", strip=True)),
    "mistral-v1": _mistral(" [INST] ", " [/INST]", Turn(" ", "</s>")),
    "mistral-v3": _mistral("[INST] ", "[/INST]", Turn(" ", "</s>", strip=True)),
    "mistral-v3-tekken": _mistral("[INST]", "[/INST]", Turn("", "</s>")),
    "mistral-v7": _mistral_v7(" "),
    "mistral-v7-tekken": _mistral_v7(""),
    "monarch": replace(_uniform("<s>{role}\n", "</s>\n", "<s>assistant\n"), omit="<s>"),
    "openchat": _named(
        "GPT4 Correct Assistant:",
        system=Turn("", "<|end_of_turn|>"),
        other=Turn("GPT4 Correct {Role}: ", "<|end_of_turn|>"),
    ),
    "orion": ChatFormat(
        turns={
            "system": Turn(""),
            "user": Turn("Human: ", "\n\nAssistant: </s>", takes_system=True),
            "*": Turn("", "</s>"),
        },
    ),
    "pangu-embedded": ChatFormat(
        turns={role: Turn(f"[unused9]{name}：", "[unused10]") for role, name in _PANGU.items()},
        ask="[unused9]助手：",
        no_system="[unused9]系统：[unused10]",
    ),
    "phi3": _uniform("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _uniform(
        "<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"
    ),
    "rwkv-world": replace(
        _named(
            "Assistant:",
            system=Turn("System: ", "\n\n", strip=True),
            user=Turn("User: ", "\n\n", strip=True),
            assistant=Turn("Assistant: ", "\n\n", strip=True),
        ),
        asks_after_user=True,
    ),
    "seed_oss": _named(
        "<seed:bos>assistant\n",
        assistant=Turn("<seed:bos>{role}\n", "<seed:eos>", strip=True),
        other=Turn("<seed:bos>{role}\n", "<seed:eos>"),
    ),
    "smolvlm": replace(
        _named(
            "Assistant:",
            system=Turn("", "\n\n"),
            user=Turn("User: ", "<end_of_utterance>\n"),
            other=Turn("Assistant: ", "<end_of_utterance>\n"),
        ),
        start="<|im_start|>",
    ),
    "solar-open": _uniform("<|begin|>{role}<|content|>", "<|end|>", "<|begin|>assistant"),
    "vicuna": _named("ASSISTANT:", system=Turn("", "\n\n"), **_VICUNA),
    "vicuna-orca": _named("ASSISTANT:", system=Turn("SYSTEM: ", "\n"), **_VICUNA),
    "yandex": _named(
        " Ассистент:[SEP]",
        user=Turn(" Пользователь: ", "\n\n"),
        assistant=Turn(" Ассистент: ", "\n\n"),
    ),
    "zephyr": _uniform("<|{role}|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}
