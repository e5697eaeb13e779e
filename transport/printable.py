"""Escapes untrusted text, such as a model's, a log's or a guest's, so that it cannot control the terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text with every unprintable character escaped, except line feeds and tabs.

    Unprintable are controls, changes of the writing direction and surrogates.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )
