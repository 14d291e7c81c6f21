"""How each `tokenizer.ggml.pre` cuts text into words before byte-pair merging: one table.

A row holds regular expressions (`regex` module, version 1 syntax) that are applied one after the
other: every pass cuts the pieces of the pass before it into matches and the gaps between them.
Where llama.cpp's own engine reads a pattern in its own way (it does not know upper from lower case
outside ASCII, for one), the row spells what llama.cpp does, since that is what models meet.
One difference is left: llama.cpp knows Unicode 15.1, the `regex` module a later version, and
characters that were assigned since may be cut in another way.
"""

from dataclasses import dataclass

from pyggml.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Patterns and habits that belong to one pre-tokenizer name."""

    patterns: tuple[str, ...]
    clean_spaces: bool = True  # detokenizing drops spaces before punctuation
    ignore_merges: bool = False  # a word that is a token needs no merging
    add_bos: bool = False  # default when the file does not say
    always_bos: bool = False  # whatever the file says
    default_bos: bool = True  # id 11 is BOS when the file does not say
    byte_encode: bool = True  # tokens are spelled in GPT-2's printable bytes
    escape_spaces: bool = False  # tokens spell a space as U+2581
    newlines_whole: bool = False  # a run of newlines that is a token needs no merging
    drop_gaps: bool = False  # text that no pattern matches has no tokens
    cut_at_spaces: bool = False  # every escaped space begins a word, and so does every line
    needs_merges: bool = True


CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s+(?!\S)|\s+"
LINES_AND_SPACES = rf"\s*[\r\n]+|{SPACES}"
LINES = r"[^\n]+|\n+"
DIGITS_3 = r"\p{N}{1,3}"
# A backward search groups digits as in 1 234 567; the first group keeps the text before it.
DIGITS_3_FROM_THE_RIGHT = r"(?r)\P{N}*\p{N}{1,3}"
# Cuts before every group of three counted from the right end of a number; shorter numbers that
# other digits join to it stay in its last piece.
GROUPS_OF_3 = r"(?r)[0-9]{3}(?:[^0-9]+[0-9]{1,2})*[^0-9]*"
ASCII_DIGITS_3 = "[0-9][0-9][0-9]"
KANA_AND_CJK = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
CJK = r"[[\u0800-\u9fa5\uac00-\ud7ff]--\s]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{LETTERS}|{DIGITS_3}|{SYMBOLS}|{LINES_AND_SPACES}"
QWEN2 = rf"{CONTRACTION}|{LETTERS}|\p{{N}}|{SYMBOLS}|{LINES_AND_SPACES}"
_DEEPSEEK3_WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
)
DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{LINES_AND_SPACES}"
SPARK2_5 = rf"{_DEEPSEEK3_WORDS}|[\r\n]|{SPACES}"


def _cased(letter: str, digits: str, contraction: str) -> str:
    """o200k's words: capitals before small letters, case being known for ASCII letters only."""
    upper, lower = rf"[{letter}--[a-z]]", rf"[{letter}--[A-Z]]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
        rf"|{digits}|{SYMBOLS_AND_SLASHES}|{LINES_AND_SPACES}"
    )


def _caseless(digits: str) -> str:
    """o200k's words where a pattern asks for case by category, which is not told apart."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{CONTRACTION}?"
        rf"|{digits}|{SYMBOLS_AND_SLASHES}|{LINES_AND_SPACES}"
    )


GPT4O = _cased(r"\p{L}", DIGITS_3, f"{CONTRACTION}?")
GRANITE_EMBED = _cased(r"[\p{L}\p{M}]", DIGITS_3, f"{CONTRACTION}?")
TEKKEN = _cased(r"\p{L}", r"\p{N}", "")
JAIS2 = (
    rf"{CONTRACTION}|{LETTERS}|{DIGITS_3}|{SYMBOLS}|\s*[\r\n]+|"
    + "".join(
        rf"\s{{{n}}}(?!\S)|" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
    )
    + r"\s"
)
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES_AND_SPACES}"
)
EXAONE_MOE = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}"
)
SEED_CODER = rf"{CONTRACTION}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES_AND_SPACES}"
HAN = (
    r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef"
    r"\U0002f800-\U0002fa1f]"
)
KIMI_K2 = (
    rf"{HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--{HAN}]+{CONTRACTION}?"
    rf"|{DIGITS_3}|{SYMBOLS}|{LINES_AND_SPACES}"
)
K2_HORIZON = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\u200c\u200d]+|{DIGITS_3}|{SYMBOLS}"
    rf"|{LINES_AND_SPACES}"
)
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# The table of llama.cpp begins its block of compatibility ideographs at U+8C48.
AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\u1100-\u11ff]+"
)
YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    rf"|[\u3105-\u312f]+|{KANA_AND_CJK}"
)

CASED_LETTERS = (
    "0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF "
    "0370-0373 0376 0377 037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 "
    "048A-052F 0531-0556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D "
    "1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 "
    "213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _character_class(ranges: str) -> str:
    """A set from hexadecimal code points and inclusive ranges of them."""
    spans = [[rf"\U{point:0>8}" for point in span.split("-")] for span in ranges.split()]
    return f"[{''.join('-'.join(span) for span in spans)}]"


DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_character_class(CASED_LETTERS)}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    r"\s+\Z",
    CJK,
    r"\p{N}+",
)


def _pre(*patterns: str, **habits: bool) -> PreTokenizer:
    return PreTokenizer(patterns=patterns, **habits)


ROWS = {
    "default": _pre(r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", ASCII_DIGITS_3),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _pre(
        LLAMA3, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe": _pre(LLAMA3),
    "chatglm-bpe": _pre(LLAMA3, default_bos=False),
    "glm4 glm5": _pre(LLAMA3, default_bos=False, ignore_merges=True),
    "jais-2": _pre(JAIS2),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": _pre(
        QWEN2, clean_spaces=False
    ),
    "megrez stablelm2": _pre(QWEN2),
    "qwen35": _pre(QWEN35, clean_spaces=False),
    "ufakzeka": _pre(rf"{LETTERS}|\p{{N}}|{SYMBOLS}|{LINES_AND_SPACES}", clean_spaces=False),
    "deepseek-llm": _pre(*DEEPSEEK_LLM, clean_spaces=False),
    "deepseek-coder": _pre(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}", clean_spaces=False
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _pre(
        DIGITS_3, KANA_AND_CJK, DEEPSEEK3, clean_spaces=False
    ),
    "spark2_5": _pre(DIGITS_3, KANA_AND_CJK, SPARK2_5, r"\p{N}", clean_spaces=False),
    "youtu": _pre(YOUTU_SCRIPTS, _caseless(r"\p{N}"), clean_spaces=False, ignore_merges=True),
    "falcon": _pre(r"[\p{P}$+<=>^~|`]+", GPT2, ASCII_DIGITS_3),
    "smollm command-r": _pre(r"\p{N}", GPT2, clean_spaces=False),
    "starcoder refact codeshell exaone minerva-7b mellum2": _pre(r"\p{N}", GPT2),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "exaone4 mpt olmo jais jina-v1-en jina-v2-code roberta-bpe": _pre(GPT2),
    "trillion granite-docling": _pre(GPT2, clean_spaces=False),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _pre(GPT4O, clean_spaces=False),
    "granite-embed-multi-97m": _pre(GRANITE_EMBED, clean_spaces=False, ignore_merges=True),
    "tekken": _pre(TEKKEN, clean_spaces=False, ignore_merges=True, add_bos=True),
    "tiny_aya cohere2moe": _pre(DIGITS_3_FROM_THE_RIGHT, _caseless(DIGITS_3), clean_spaces=False),
    "superbpe": _pre(r"\p{N}+", GROUPS_OF_3, clean_spaces=False),
    "kimi-k2": _pre(KIMI_K2, clean_spaces=False, needs_merges=False),
    "k2-horizon": _pre(K2_HORIZON, clean_spaces=False),
    "bailingmoe bailingmoe2 llada-moe": _pre(
        rf"{CONTRACTION}|{LETTERS}|\p{{N}}|{SYMBOLS}|\s*[\r\n]|{SPACES}", clean_spaces=False
    ),
    "seed-coder": _pre(SEED_CODER, clean_spaces=False),
    "afmoe": _pre(DIGITS_3_FROM_THE_RIGHT, AFMOE_SCRIPTS, DEEPSEEK3, clean_spaces=False),
    "laguna": _pre(LINES, QWEN2, clean_spaces=False),
    "exaone-moe": _pre(EXAONE_MOE),
    "minicpm5": _pre(
        DIGITS_3,
        rf"{CONTRACTION}|{LETTERS}|\p{{N}}+|{SYMBOLS}|{LINES_AND_SPACES}",
        ignore_merges=True,
    ),
    "chameleon": _pre(
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
        clean_spaces=False,
        add_bos=True,
    ),
    "poro-chat": _pre(BLOOM, clean_spaces=False),
    "bloom gpt3-finnish": _pre(BLOOM),
    "viking": _pre(BLOOM, r"\p{N}", clean_spaces=False),
    "gemma4 granite-embed-multi-311m": _pre(
        LINES, always_bos=True, escape_spaces=True, byte_encode=False, newlines_whole=True
    ),
    "mmbert": _pre(
        LINES, escape_spaces=True, byte_encode=False, newlines_whole=True, cut_at_spaces=True
    ),
    "sarvam-moe": _pre(LINES, escape_spaces=True, byte_encode=False, clean_spaces=False),
    "whitespace": _pre(r"\S+", byte_encode=False, drop_gaps=True),
}
PRETOKENIZERS = {name: row for names, row in ROWS.items() for name in names.split()}


def find_pretokenizer(name: str) -> PreTokenizer:
    """The row of a `tokenizer.ggml.pre`; a name that is not in the table is a ModelError."""
    if name not in PRETOKENIZERS:
        raise ModelError(
            f"unknown pre-tokenizer type: {name!r} (key tokenizer.ggml.pre)\n"
            f"known ones: {', '.join(sorted(PRETOKENIZERS))}\n"
            "--override-kv tokenizer.ggml.pre=str:NAME chooses one, if it cuts text alike"
        )
    return PRETOKENIZERS[name]
