"""Text for a person: too much of it is cut where a word ends, and shows that it was."""

from __future__ import annotations

import pytest

from counterpoint.transport.printable import clipped, ending, shortened


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer", "no answer"),
        ("no answer at all", "no answer…"),
        ("nowhere:module", "nowhere:m…"),
    ],
)
def test_a_long_text_is_cut_after_a_word_with_an_ellipsis(text: str, shown: str) -> None:
    assert shortened(text, 10) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the cause", "the cause"),
        ("this is the cause", "…the cause"),
        ("the cause: nowhere:module", "…re:module"),
    ],
)
def test_of_a_long_text_that_ends_with_the_cause_the_end_is_kept(text: str, shown: str) -> None:
    assert ending(text, 10) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("why it failed", "why it failed"),
        ("request to http://one failed for hours: 400, too long", "request to… 400, too long"),
        ("no words at all", "no words at all"),
        ("x" * 100, "x" * 16 + "… " + "x" * 8),
    ],
)
def test_a_long_reason_keeps_its_beginning_and_its_end(text: str, shown: str) -> None:
    assert clipped(text, 26) == shown


def test_what_is_clipped_is_never_longer() -> None:
    for length in range(6, 60):
        for text in ("one two three four five six seven eight nine", "x" * 80, " " * 80):
            assert len(clipped(text, length)) <= length, (text, length)
