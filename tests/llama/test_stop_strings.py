"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.llama.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    """All that is shown, and the stop string that ended it."""
    filter_, shown = StopStrings(stops), ""
    for piece in pieces:
        text, matched = filter_.feed(piece)
        shown += text
        if matched:
            return shown, matched
    return shown + filter_.flush(), ""


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        (["O P Q"], " ", "O P Q"),
        (["\n", "O P Q"], " ", "O P Q"),
        (["P"], " O ", "P"),
        (["X"], " O P Q R", ""),
        (["R S"], " O P Q R", ""),  # what was held back comes in the end
        ([], " O P Q R", ""),
        ([""], " O P Q R", ""),
        (["Q", "P"], " O ", "P"),  # the first in the text, not in the list
        (["P Q R", "O"], " ", "O"),
    ],
)
def test_text_ends_before_the_stop_string(stops: list[str], shown: str, matched: str) -> None:
    assert run(stops, [" O", " P", " Q", " R"]) == (shown, matched)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["</s>"])
    assert stops.feed("a<") == ("a", "")
    assert stops.feed("/") == ("", "")
    assert stops.feed("x<") == ("</x", "")
    assert stops.feed("/s>b") == ("", "</s>")
    assert stops.flush() == ""


def test_a_stop_string_may_lie_inside_one_piece() -> None:
    assert run(["stop"], ["go stop go"]) == ("go ", "stop")


@settings(deadline=None, max_examples=300)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_nothing_is_lost_and_no_stop_string_is_shown(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, matched = run(stops, pieces)
    if not matched:
        assert shown == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)
