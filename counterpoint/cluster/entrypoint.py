"""`Entrypoint`: a function that another process calls, named by its module or program, with arguments that are JSON, or tuples.

Nothing is pickled: the other process, `python -m counterpoint.cluster.entrypoint`, imports what defines the function. A program
that defines it is imported under another name than `__main__`, so that what it does as a program, such as submitting this job,
is not done again.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from counterpoint.cluster.worker_classes import search_path
from counterpoint.transport.errors import UserError

PROGRAM = "__entrypoint__"
"""The name under which a program is imported."""

VARIABLE = "COUNTERPOINT_ENTRYPOINT"
"""Holds the call for the process that makes it: unlike a command line, only its own user can read it."""

_TUPLE = "__tuple__"
"""The only key of an object that stands for a tuple."""

_NEVER_CALLED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""What a call of these makes would be thrown away, and the job would count as done."""


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A function and its arguments."""

    source: str
    """The module that defines it, or the path of the program that does."""
    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: Sequence[str] = ()
    """The directory in which modules are looked for first."""
    directory: str = ""
    """The directory in which it is called."""

    @classmethod
    def from_callable(
        cls, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Entrypoint:
        """Takes a function that stands at the top of a module or of the program itself.

        Its arguments arrive as they are: JSON, with whole numbers of any size, and tuples. Raises `UserError` for another
        function, and for arguments that would not arrive as they are.
        """
        if not isinstance(args, list | tuple):
            raise UserError(f"args = {args!r:.80}: expected a list or a tuple of arguments, such as [{args!r:.40}]")
        given = [*args], dict(kwargs or {})
        try:
            json.dumps(given, allow_nan=False)  # says best what is no JSON
            for value in given:
                _packed(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the arguments of {function!r} are not JSON: {error}") from None
        if any(is_one(function) for is_one in _NEVER_CALLED):
            raise UserError(
                f"{function!r} does nothing when it is called: give one that runs it, such as by asyncio.run"
            )
        source, name = _source_of(function)
        return cls(source, name, *given, search_path(), os.getcwd())

    def to_variables(self) -> dict[str, str]:
        """Returns the environment variables by which a process finds it."""
        packed = {"args": _packed([*self.args]), "kwargs": _packed(dict(self.kwargs))}
        fields = {"source": self.source, "name": self.name, **packed, "path": [*self.path], "directory": self.directory}
        return {VARIABLE: json.dumps(fields, separators=(",", ":"))}

    @classmethod
    def from_variable(cls, text: str) -> Entrypoint:
        """Returns what `to_variables` wrote."""
        return cls(**json.loads(text, object_hook=_unpacked))

    @property
    def command(self) -> list[str]:
        """The command of that process."""
        return [sys.executable, "-P", "-m", "counterpoint.cluster.entrypoint"]


def _packed(value: Any) -> Any:
    """Returns the value with objects in place of tuples. Raises `TypeError` for what would arrive as something else."""
    if type(value) is list:
        return [_packed(each) for each in value]
    if type(value) is tuple:
        return {_TUPLE: [_packed(each) for each in value]}
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key == _TUPLE:
                raise TypeError(f"the key {key!r} would not arrive as it is; expected other text")
        return {key: _packed(each) for key, each in value.items()}
    if value is not None and type(value) not in (bool, int, float, str):
        kind = next(each for each in type(value).__mro__ if each in (int, float, str, list, tuple, dict))
        raise TypeError(
            f"{value!r:.80}, of type {type(value).__name__}, would arrive as {kind.__name__}: give that itself"
        )
    return value


def _unpacked(found: dict[str, Any]) -> Any:
    return tuple(found[_TUPLE]) if [*found] == [_TUPLE] else found


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


# --- in the process that makes the call ---


def is_importing() -> bool:
    """Whether this process imports a function that it is to call: a job submitted meanwhile would submit itself again."""
    return _importing


_importing = False


def main() -> None:
    """Calls the function in the main thread. Raises what it raises."""
    entrypoint = Entrypoint.from_variable(os.environ.pop(VARIABLE))
    os.chdir(entrypoint.directory)
    sys.path[:0] = entrypoint.path
    function(entrypoint)(*entrypoint.args, **entrypoint.kwargs)


def function(entrypoint: Entrypoint) -> Any:
    """Imports and returns the function. Raises `UserError` if it is not there, and what the import raises."""
    global _importing
    _importing = True
    try:
        is_program = entrypoint.source.endswith(".py")
        module = _program(entrypoint.source) if is_program else importlib.import_module(entrypoint.source)
    finally:
        _importing = False
    found = getattr(module, entrypoint.name, None)
    if not callable(found):
        raise UserError(f"{entrypoint.source} defines no function {entrypoint.name}")
    return found


def _program(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(PROGRAM, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PROGRAM] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    from counterpoint.cluster.entrypoint import main as call  # the module that a program imports, too: `is_importing`

    call()
