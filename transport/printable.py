"""Prepares text for a person: escapes what is untrusted, such as a model's or a log's, and cuts what is too long."""

from __future__ import annotations

LONGEST_LINE = 1000
"""Characters of a reason that is shown on one line."""


def printable(text: str) -> str:
    """Returns the text with every unprintable character escaped, except line feeds and tabs: it cannot control the terminal.

    Unprintable are controls, changes of the writing direction and surrogates.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def shortened(text: str, longest: int) -> str:
    """Returns the text, or its beginning up to the end of a word, unless that is far away, with an ellipsis.

    `longest` is in characters.
    """
    if len(text) <= longest:
        return text
    end = text.rfind(" ", 0, longest)
    return f"{text[: end if end > longest // 2 else longest - 1]}…"


def clipped(text: str, longest: int) -> str:
    """Returns the text, or its first two thirds and its end around an ellipsis: the end of an error often has the reason.

    `longest` is in characters, 6 or more.
    """
    if len(text) <= longest:
        return text
    head = shortened(text, 2 * longest // 3)
    return f"{head} {ending(text, longest - len(head))[1:]}"


def ending(text: str, longest: int) -> str:
    """Returns the text, or its end from the beginning of a word, unless that is far away, after an ellipsis.

    `longest` is in characters.
    """
    if len(text) <= longest:
        return text
    start = text.find(" ", -longest, -longest // 2) + 1
    return f"…{text[start:] if start else text[1 - longest :]}"


def on_one_line(text: str) -> str:
    """Returns the lines of a message as one line, cut where it is longer than `LONGEST_LINE`."""
    line = " ".join(filter(None, (part.strip() for part in text.splitlines())))
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
