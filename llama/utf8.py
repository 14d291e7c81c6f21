"""Bytes, characters and text: the conversions the tokenizers share."""

import re

SPACE = "\u2581".encode()  # how vocabularies spell a space
_CHARACTER = re.compile(
    rb"[\x00-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL
)


def to_bytes(text: str) -> bytes:
    """UTF-8 of a text; a surrogate escape is the byte it stands for, any other surrogate U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole.encode("utf-8")


def to_text(data: bytes) -> str:
    """Text for a regular expression: every byte that is not UTF-8 becomes one U+FFFD."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        escaped = data.decode("utf-8", "surrogateescape")
        return re.sub("[\ud800-\udfff]", "\ufffd", escaped)


def is_utf8(data: bytes) -> bool:
    """Whether the bytes are a whole number of characters."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def characters(data: bytes) -> list[bytes]:
    """UTF-8 characters, cut where their first bytes say; damaged ones stay as they are."""
    return _CHARACTER.findall(data)
