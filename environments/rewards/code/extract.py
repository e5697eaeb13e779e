"""Finds the program in a completion."""

from __future__ import annotations

_LANGUAGES = frozenset(("", "python", "py", "python3"))


def code_of(completion: str) -> str | None:
    """Returns the last fenced block of Python, which may be open at the end; None if there is none.

    A completion without any fence is a program as a whole.
    """
    if "```" not in completion:
        return completion if completion.strip() else None
    found: str | None = None
    block: list[str] | None = None
    is_python = False
    for line in completion.splitlines():
        mark = line.strip()
        if block is None:
            if mark.startswith("```"):
                block, is_python = [], mark[3:].strip().lower() in _LANGUAGES
        elif mark == "```":
            found = "\n".join(block) if is_python else found
            block = None
        else:
            block.append(line)
    if block is not None and is_python:
        found = "\n".join(block)
    return found if found is not None and found.strip() else None
