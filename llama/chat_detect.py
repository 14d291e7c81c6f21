"""Which built-in chat format a template text stands for, by the marks it contains.

The order is llama.cpp's: a rule may rely on the ones before it not having applied.
"""

from __future__ import annotations

Rule = tuple[str, tuple[str, ...]]  # format, marks that must all be there

# templates that contain [INST], or that begin with "mistral"
_INSTRUCT_V1_V3: tuple[Rule, ...] = (
    ("mistral-v1", (" [INST]",)),
    ("mistral-v3-tekken", ('"[INST]"',)),
    ("mistral-v3", ()),
)
_INSTRUCT_LLAMA2: tuple[Rule, ...] = (
    ("llama2-sys-strip", ("content.strip()",)),
    ("llama2-sys-bos", ("bos_token + '[INST]",)),
    ("llama2-sys", ("<<SYS>>",)),
    ("llama2", ()),
)

_RULES: tuple[Rule, ...] = (
    ("phi3", ("<|assistant|>", "<|end|>")),
    ("chatglm4", ("[gMASK]<sop>",)),
    ("exaone-moe", ("<|assistant|>", "<|user|>", "<|tool_declare|>")),
    ("falcon3", ("<|assistant|>", "<|user|>", "</s>")),
    ("glmedge", ("<|assistant|>", "<|user|>")),
    ("glmedge", ("<|{{ item['role'] }}|>", "<|begin_of_image|>")),
    ("zephyr", ("<|user|>", "<|endoftext|>")),
    ("monarch", ("bos_token + message['role']",)),
    ("gemma", ("<start_of_turn>",)),
    ("orion", ("'\\n\\nAssistant: ' + eos_token",)),
    ("openchat", ("GPT4 Correct ",)),
    ("vicuna-orca", ("USER: ", "ASSISTANT: ", "SYSTEM: ")),
    ("vicuna", ("USER: ", "ASSISTANT: ")),
    ("deepseek", ("### Instruction:", "<|EOT|>")),
    ("command-r", ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>")),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("chatglm3", ("[gMASK]sop",)),
    ("minicpm", ("<用户>",)),
    ("deepseek2", ("'Assistant: ' + message['content'] + eos_token",)),
    ("deepseek3", ("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>")),
    ("exaone4", ("[|system|]", "[|assistant|]", "[|endofturn|]", "[|tool|]")),
    ("exaone3", ("[|system|]", "[|assistant|]", "[|endofturn|]")),
    ("rwkv-world", ("rwkv-world",)),
    ("rwkv-world", ("{{- 'User: ' + message['content']|trim + '\\n\\n' -}}",)),
    ("granite-4.0", ("<|start_of_role|>", "<tools>", "g4_default_system_message")),
    ("granite-4.1", ("<|start_of_role|>", "<tools>")),
    ("granite", ("<|start_of_role|>",)),
    (
        "gigachat",
        (
            "message['role'] + additional_special_tokens[0]"
            " + message['content'] + additional_special_tokens[1]",
        ),
    ),
    ("megrez", ("<|role_start|>",)),
    ("yandex", (" Ассистент:",)),
    ("bailing", ("<role>ASSISTANT</role>", "'HUMAN'")),
    ("bailing-think", ("<role>ASSISTANT</role>", '"HUMAN"', "<think>")),
    ("bailing2", ("<role>ASSISTANT</role>", "<role>HUMAN</role>", "<|role_end|>")),
    ("llama4", ("<|header_start|>", "<|header_end|>")),
    ("dots1", ("<|endofuserprompt|>",)),
    ("hunyuan-moe", ("<|extra_0|>", "<|extra_4|>")),
    ("gpt-oss", ("<|start|>", "<|channel|>")),
    ("hunyuan-vl", ("<｜hy_Assistant｜>", "<｜hy_begin▁of▁sentence｜>")),
    ("hunyuan-dense", ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁3｜>")),
    ("kimi-k2", ("<|im_assistant|>assistant<|im_middle|>",)),
    ("seed_oss", ("<seed:bos>",)),
    ("grok-2", ("'Assistant: '  + message['content'] + '<|separator|>",)),
    ("pangu-embedded", ("[unused9]系统：[unused10]",)),
    ("solar-open", ("<|begin|>", "<|content|>", "<|end|>")),
)
_CHATML: tuple[Rule, ...] = (
    ("phi4", ("<|im_sep|>",)),
    ("smolvlm", ("<end_of_utterance>",)),
    ("chatml", ()),
)


def detect_format(template: str) -> str | None:
    """The name of the built-in format for a template text; None: no mark is known."""
    if "<|im_start|>" in template:
        return _first(_CHATML, template)
    if template.startswith("mistral") or "[INST]" in template:
        if "[SYSTEM_PROMPT]" in template:
            return "mistral-v7"
        official = "' [INST] ' + system_message" in template or "[AVAILABLE_TOOLS]" in template
        return _first(_INSTRUCT_V1_V3 if official else _INSTRUCT_LLAMA2, template)
    return _first(_RULES, template)


def _first(rules: tuple[Rule, ...], template: str) -> str | None:
    return next((name for name, marks in rules if all(mark in template for mark in marks)), None)
