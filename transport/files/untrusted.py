"""Reads files that others may have written, such as a guest's: without waiting, bounded in size and in depth.

At a path there may be a FIFO, a device, a link, gigabytes, or brackets that exhaust a parser's stack. Only a regular file is
read, never through a link as the last part of its path, never more than the given limit, and nothing that would exhaust a
parser is parsed. Everything else raises `UntrustedFileError`, which names what was found; a missing file raises `OSError`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tomllib
from typing import Any, BinaryIO

from counterpoint.transport.exact_json import JsonError, is_deeper, loads
from counterpoint.transport.printable import printable

MAX_DEPTH = 32
"""Tables and arrays inside one another, and parts of a dotted key, in a TOML file."""

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_LONG_KEY = re.compile(
    rb"(?:\.[ \t]*+(?:[A-Za-z0-9_-]++|\"(?:[^\"\\\n]|\\[^\n])*+\"|'[^'\n]*+')[ \t]*+){%d}" % MAX_DEPTH,
)
"""`tomllib` takes time that grows with the square of a dotted key's parts: hours for a megabyte of them."""


class UntrustedFileError(ValueError):
    """A file is not what its reader expects; the message names the file, what was found, and what was expected."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens the file at `path` for reading in bytes; never waits, as opening a FIFO would.

    Raises `UntrustedFileError` for anything but a regular file, a symbolic link included; `OSError` when the file is missing
    or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFileError(f"{path} is a symbolic link; expected a regular file") from None
        if error.errno == errno.ENXIO:
            raise UntrustedFileError(f"{path} is a socket or a device; expected a regular file") from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise UntrustedFileError(f"{path} is {kind}; expected a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of the regular file at `path`.

    Raises `UntrustedFileError`, too, when it has more than `max_bytes`; else as `open_regular`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        raise UntrustedFileError(f"{path} has {max(size, len(content))} bytes; at most {max_bytes} are read")
    return content


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """The same as text for people: what is no UTF-8 is replaced, and what could steer a terminal is escaped."""
    return printable(read_bytes(path, max_bytes).decode(errors="replace"))


def read_toml(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """The table in the file, at most `MAX_DEPTH` deep. Raises `UntrustedFileError` when it is no such, else as `read_bytes`."""
    content = read_bytes(path, max_bytes)
    try:
        return parse_toml(content)
    except UntrustedFileError as error:
        raise UntrustedFileError(f"{path}: {error}") from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """The table in `data`, at most `MAX_DEPTH` deep. Raises `UntrustedFileError` when it is no such."""
    if _LONG_KEY.search(data):
        raise UntrustedFileError(f"it has a dotted key of more than {MAX_DEPTH} parts")
    try:
        table = tomllib.loads(data.decode())
        too_deep = is_deeper(table, MAX_DEPTH)
        repr(None if too_deep else table)  # raises for a hexadecimal integer that nobody could show
    except RecursionError:
        too_deep = True
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UntrustedFileError(f"this is not TOML: {error}") from None
    except ValueError:
        # Python refuses longer numbers: the time to read one grows with the square of its length.
        raise UntrustedFileError(f"it has an integer of more than {sys.get_int_max_str_digits()} digits") from None
    if too_deep:
        raise UntrustedFileError(f"it has tables or arrays more than {MAX_DEPTH} deep")
    return table


def read_json(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """The JSON object in the file. Raises `UntrustedFileError` when it is none, else as `read_bytes`."""
    content = read_bytes(path, max_bytes)
    try:
        return parse_json(content)
    except UntrustedFileError as error:
        raise UntrustedFileError(f"{path}: {error}") from None


def object_in(data: bytes) -> dict[str, Any] | None:
    """Returns the JSON object that a line of a file is; None if `parse_json` refuses it."""
    try:
        return parse_json(data)
    except UntrustedFileError:
        return None


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, such as a line of a metrics file.

    Raises `UntrustedFileError` when it is no object, or what `loads` refuses.
    """
    try:
        value = loads(data)
    except JsonError as error:
        raise UntrustedFileError(str(error)) from None
    if not isinstance(value, dict):
        raise UntrustedFileError(f"expected a JSON object, found {type(value).__name__}")
    return value
