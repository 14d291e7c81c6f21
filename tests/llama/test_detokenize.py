"""Streams of bytes become text without broken characters; spaces are cleaned up as asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.llama.detokenize import Utf8Stream, byte_token_value, clean_up_spaces
from pyggml.llama.utf8 import characters, to_bytes, to_text


@given(st.text(), st.data())
def test_a_stream_gives_whole_characters(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    stream, shown, start = Utf8Stream(), "", 0
    while start < len(raw):
        end = start + data.draw(st.integers(1, 5))
        shown += stream.push(raw[start:end])
        assert text.startswith(shown)
        start = end
    assert shown == text
    assert stream.flush() == ""


@given(st.binary())
def test_a_stream_replaces_what_is_not_utf8(raw: bytes) -> None:
    stream = Utf8Stream()
    shown = "".join(stream.push(raw[i : i + 1]) for i in range(len(raw))) + stream.flush()
    assert shown == raw.decode("utf-8", "replace")


def test_a_stream_holds_back_then_gives_up() -> None:
    stream = Utf8Stream()
    assert stream.push("🦙".encode()[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push("🦙".encode()) == "🦙"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a . b , c ! d ?", "a. b, c! d?"),
        ("a  .", "a ."),
        (" .", "."),
        ("x ' y ' z", "x'y'z"),
        ("x ' ' y", "x'' y"),
        ("it 's I 'm we 're you 've", "it's I'm we're you've"),
        ("don 't he 'd I 'll o 'clock", "don 't he 'd I 'll o 'clock"),
        ("", ""),
        (" ", " "),
        ("'", "'"),
    ],
)
def test_clean_up_drops_the_spaces_old_tokenizers_add(text: str, cleaned: str) -> None:
    assert clean_up_spaces(text.encode()) == cleaned.encode()


def test_byte_tokens_are_read_and_others_left_alone() -> None:
    assert byte_token_value(b"<0xE4>") == b"\xe4"
    assert byte_token_value(b"<0xZZ>") == b"<0xZZ>"


@given(st.binary())
def test_any_bytes_survive_the_conversions(raw: bytes) -> None:
    assert to_bytes(raw.decode("utf-8", "surrogateescape")) == raw
    assert b"".join(characters(raw)) == raw
    assert to_text(to_text(raw).encode()) == to_text(raw)


@given(st.text())
def test_characters_of_good_text_are_its_code_points(text: str) -> None:
    assert characters(text.encode()) == [character.encode() for character in text]
