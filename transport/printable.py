"""Text of others, such as a model's, a log's or a guest's, as text that a terminal only shows."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with all else escaped: controls, what changes the direction of writing, half characters. Line feeds and tabs
    stay."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )
