"""Messages between an executor and the process of a trial: MessagePack with its length before it, over a socket of their own.

Never pickle. Both ends refuse a message beyond `MAX_BYTES` before they allocate anything for it. The process's end blocks
(`receive`, `MESSAGES.frame`); the executor's end belongs to its event loop (`FramedChannel`).
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from counterpoint.transport.framed_maps import FramedMaps
from counterpoint.transport.frames import Framing

MAX_BYTES = 16 * 2**20
"""The size of one message: far more than a result or a config has."""


MESSAGES = FramedMaps(Framing(MAX_BYTES))


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next message; None when the other end is gone. Blocks. Raises `BadFrame`."""
    try:
        return MESSAGES.read(connection.recv)
    except (ConnectionResetError, EOFError):
        return None


SCRIPT = "tune_script_"
"""How the names of modules begin that are a script which another process runs (`tune.registry`)."""

LONGEST_ARGUMENT = 64 * 2**10
"""Characters of an argument that are sent."""


def as_data(error: BaseException) -> dict[str, Any]:
    """The class and the arguments of an exception. An argument that is no plain value is sent as text."""
    plain = [each if isinstance(each, bool | int | float | None) else _text(each) for each in error.args]
    kind = type(error)
    return {"module": kind.__module__, "name": kind.__qualname__, "args": plain}


def _text(value: Any) -> str:
    return str(value)[:LONGEST_ARGUMENT].encode(errors="replace").decode()


def made_again(data: Any) -> Exception | None:
    """The exception of `as_data`; None if its class is not known here, or ends programs (`SystemExit`).

    Only a class that this process has imported already is used, and its code does not run: an exception is made of its class and
    its arguments. So a trial can name no code that is to run here.
    """
    try:
        module, names, arguments = str(data["module"]), str(data["name"]).split("."), list(data["args"])
    except (KeyError, TypeError):
        return None
    found: Any = sys.modules.get("__main__" if module.startswith(SCRIPT) else module)
    for name in names:
        found = getattr(found, name, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    try:
        made = found.__new__(found)
    except TypeError:
        return None
    made.args = tuple(arguments)
    return made
