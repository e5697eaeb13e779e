"""Text for a person: too much of it is cut where a word ends, and shows that it was."""

from __future__ import annotations

import pytest

from counterpoint.transport.printable import ending, shortened


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
