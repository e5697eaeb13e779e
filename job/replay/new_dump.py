"""Checks the directory of a dump that is to be written."""

from __future__ import annotations

from pathlib import Path

from transport.errors import UserError


def check_absent(directory: Path) -> None:
    """Raises `UserError` if the path exists."""
    if directory.exists():
        raise UserError(f"{directory} exists; choose another place, or remove it")
