"""What every kind of chaos prints and raises."""

from __future__ import annotations

import sys


class ChaosError(Exception):
    """A chaos cannot begin, or what it disturbs ended or stood still; the message says what was waited for."""


def say(words: str) -> None:
    """Prints progress and faults to standard error."""
    print(words, file=sys.stderr, flush=True)
