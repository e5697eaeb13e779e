"""Finds the program in a completion."""

from __future__ import annotations

import re

_LANGUAGES = frozenset(("", "python", "py", "python3"))
_OPENS = re.compile(r"(?P<fence>`{3,}|~{3,})\s*\{?\.?(?P<language>[^\s`{},:=]*)[^`]*")
"""A fence as in CommonMark: three or more of a kind, a language, and whatever else, such as a title."""


def code_of(completion: str) -> str | None:
    """Returns the last fenced block of Python, which may be open at the end; None if there is none.

    A block ends with a fence of its kind that is at least as long. A completion without any fence is a program as a whole.
    """
    found: str | None = None
    block: list[str] | None = None
    fence, is_python, has_fences = "", False, False
    for line in completion.splitlines():
        mark = line.strip()
        if block is None:
            if (opens := _OPENS.fullmatch(mark)) is not None:
                has_fences = True
                fence, block = opens["fence"], []
                is_python = opens["language"].lower() in _LANGUAGES
        elif len(mark) >= len(fence) and not mark.strip(fence[0]):
            found = "\n".join(block) if is_python else found
            block = None
        else:
            block.append(line)
    if not has_fences:
        return completion if completion.strip() else None
    if block is not None and is_python:
        found = "\n".join(block)
    return found if found is not None and found.strip() else None
