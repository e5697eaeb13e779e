"""Checks the directory of a dump: that one to write is absent, and that one to replay runs no code that nobody trusts."""

from __future__ import annotations

from pathlib import Path

from counterpoint.orchestrator.rollouts.dump import Dump, DumpError, open_dump
from counterpoint.transport.errors import UserError


def open_trusted(directory: Path, trust: bool) -> Dump:
    """Opens the dump in `directory`.

    Raises `UserError` if it cannot be read, or if it names a custom advantage function and `trust` is False.
    """
    try:
        dump = open_dump(directory)
    except DumpError as error:
        raise UserError(str(error)) from None
    kind = dump.header.advantage.kind
    if ":" in kind and not trust:
        raise UserError(
            f"{directory}/header.json names the advantage function {kind!r}, and a replay would import and call it. If you trust "
            "the author of the dump, add --trust"
        )
    return dump


def check_absent(directory: Path) -> None:
    """Raises `UserError` if the path exists."""
    if directory.exists():
        raise UserError(f"{directory} exists; choose another place, or remove it")
