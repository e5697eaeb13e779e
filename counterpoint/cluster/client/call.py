"""Calls the function of an `Entrypoint`, in the process of a job made of a function (`python -m counterpoint.cluster.client`).

A program that defines the function is imported under another name than `__main__`, so that what it does as a program, such as
submitting this job, is not done again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from counterpoint.cluster.client.entrypoint import VARIABLE, Entrypoint
from counterpoint.transport.errors import UserError

PROGRAM = "__entrypoint__"
"""The name under which a program is imported."""


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
