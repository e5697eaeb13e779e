"""Reads a TOML file, with errors that quote the line at fault. `transport/configuration/explain.py` explains wrong values.

Paths of keys and tokens count from the file that names them, so that a file and its keys can be moved, or mounted, together.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.transport.configuration.lines import lines_of, quoted
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_toml

Table = dict[Any, Any]
"""Values by name; by position if the table overrides entries of a list."""

BESIDE_THE_FILE = frozenset(
    {
        "api_key_file",
        "authorized_keys_directory",
        "ca_file",
        "identity_file",
        "keys_file",
        "read_token_file",
        "secret_key_file",
        "server_public_key_file",
        "tls_certificate",
        "tls_key",
        "token_file",
        "urls_file",
    }
)
"""Keys, in any table, whose relative paths count from the file that sets them: keys, tokens, certificates, lists of servers.

Other paths, such as `output_dir`, count from the working directory.
"""


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
    """Parses the text of `file`; what lies beside it is named by absolute paths. Raises `UserError` for a malformed one."""
    try:
        return anchored(parse_toml(text.encode()), file.absolute().parent)
    except UntrustedFileError as error:
        raise UserError(f"{file}: {error}{_offending_line(text, str(error))}") from None


def anchored(values: Table, directory: Path) -> Table:
    """Returns a copy of `values` in which the relative paths of keys in `BESIDE_THE_FILE` are below `directory`."""
    return {
        key: str(directory / value)
        if key in BESIDE_THE_FILE and isinstance(value, str) and value
        else _anchored_within(value, directory)
        for key, value in values.items()
    }


def _anchored_within(value: Any, directory: Path) -> Any:
    if isinstance(value, dict):
        return anchored(value, directory)
    return [_anchored_within(entry, directory) for entry in value] if isinstance(value, list) else value


def read_portable_text(file: Path) -> str:
    """Returns the text of a file, which means the same in another directory: written anew if it has a relative path of a key.

    Raises as `read_toml`.
    """
    text = read_text(file)
    values = parse(text, file)
    return text if values == tomllib.loads(text) else tomli_w.dumps(values)


def without_places(value: Any) -> Any:
    """Returns a copy of `value` without the keys in `BESIDE_THE_FILE`: what is the same wherever the file and its keys lie."""
    if isinstance(value, dict):
        return {key: without_places(entry) for key, entry in value.items() if key not in BESIDE_THE_FILE}
    return [without_places(entry) for entry in value] if isinstance(value, list) else value


def _offending_line(text: str, message: str) -> str:
    """The line that a TOML error names, quoted."""
    _, found, tail = message.partition("(at line ")
    number = tail.partition(",")[0]
    lines = lines_of(text)
    if not found or not number.isdigit() or int(number) > len(lines):
        return ""
    return f"\n  {quoted(int(number), lines[int(number) - 1])}"
