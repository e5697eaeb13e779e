"""`Entrypoint`: a function that another process calls, named by its module or program, with arguments that are JSON.

Nothing is pickled: the other process imports what defines the function (`cluster/client/call.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from cluster.worker_classes import search_path
from transport.errors import UserError

VARIABLE = "COUNTERPOINT_ENTRYPOINT"
"""Holds the call for the process that makes it: unlike a command line, only its own user can read it."""


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A function and its arguments."""

    source: str
    """The module that defines it, or the path of the program that does."""
    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: Sequence[str] = ()
    """Where modules are looked for first."""
    directory: str = ""
    """The directory in which it is called."""

    @classmethod
    def from_callable(
        cls, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Entrypoint:
        """Takes a function that stands at the top of a module or of the program itself.

        Raises `UserError` for another one, and for arguments that are not JSON.
        """
        given = dict(kwargs or {})
        try:
            json.dumps(
                [list(args), given], allow_nan=False
            )  # refuses what orjson would change, such as infinity or a date
            orjson.dumps([list(args), given])
        except (TypeError, ValueError) as error:
            raise UserError(f"the arguments of {function!r} are not JSON: {error}") from None
        source, name = _source_of(function)
        return cls(source, name, list(args), given, search_path(), os.getcwd())

    def to_variables(self) -> dict[str, str]:
        """Returns the environment variables by which a process finds it."""
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @property
    def command(self) -> list[str]:
        """The command of that process."""
        return [sys.executable, "-m", "cluster.client"]


def _source_of(function: Callable[..., Any]) -> tuple[str, str]:
    if isinstance(function, partial):
        raise UserError(f"{function!r} is a partial: give the function itself, and its arguments as args and kwargs")
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not name.isidentifier() or module is None:
        raise UserError(
            f"{function!r} cannot be found by another process: define it with `def` at the top of its module"
        )
    if module != "__main__":
        return module, name
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return main.__spec__.name, name  # type: ignore[union-attr]
    file = getattr(main, "__file__", None)
    if file is None:
        raise UserError(
            f"{name} is defined in an interactive session: move it to a file, which other processes can import"
        )
    return str(Path(file).absolute()), name
