"""An exception of a trial's process as data, and the same exception made again in the tuner, for `fail_fast="raise"`.

Only a class that this process has imported already is used, and its code does not run: an exception is made of its class and its
arguments. So a trial can name no code that is to run here.
"""

from __future__ import annotations

import sys
from typing import Any

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
    """The exception of `as_data`; None if its class is not known here, or ends programs (`SystemExit`)."""
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
