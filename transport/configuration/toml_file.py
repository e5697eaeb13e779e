"""Reads a TOML file, with errors that quote the line at fault. `transport/configuration/explain.py` explains wrong values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from transport.configuration.lines import lines_of
from transport.errors import UserError

Table = dict[Any, Any]
"""Values by name; by position if the table overrides entries of a list."""


def read_toml(file: Path) -> Table:
    """Reads a file. Raises `UserError` for one that is missing, unreadable or malformed."""
    return parse(read_text(file), file)


def read_text(file: Path) -> str:
    """Reads a file's text. Raises `UserError` for one that is missing or unreadable."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def parse(text: str, file: Path) -> Table:
    """Parses the text of `file`. Raises `UserError` for a malformed one."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: this is not TOML: {error}{_offending_line(text, str(error))}") from None


def _offending_line(text: str, message: str) -> str:
    """The line that a TOML error names, quoted."""
    _, found, tail = message.partition("(at line ")
    number = tail.partition(",")[0]
    lines = lines_of(text)
    if not found or not number.isdigit() or int(number) > len(lines):
        return ""
    return f"\n  {number} | {lines[int(number) - 1]}"
