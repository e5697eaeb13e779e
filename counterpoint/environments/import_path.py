"""Import paths in configurations, by which environments, advantages, losses, functions and tools are given.

Modules are found where the process finds its own, and then in the working directory (`import_module`). In the process of a guest,
and in those that it starts, only the paths are loaded that the job allows (`only_imports`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import counterpoint

LIBRARY_KEYS = frozenset({"id", "fn"})
"""Keys in tables of the verifiers library whose values it imports, in forms of its own, such as `file.py:function`."""

VARIABLE = "COUNTERPOINT_IMPORTS"
"""Holds the paths that may be loaded, as a JSON list. Unset: all."""

_OWN = {found.name for found in pkgutil.iter_modules(counterpoint.__path__)}


@contextmanager
def only_imports(allowed: Collection[str]) -> Iterator[None]:
    """Has this process, and those that it starts, load only these import paths, and what is built in, during the block."""
    before = os.environ.get(VARIABLE)
    os.environ.update(variable_of(allowed))
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def variable_of(allowed: Collection[str]) -> dict[str, str]:
    """Returns the environment variable with which a process loads only these import paths."""
    return {VARIABLE: json.dumps(sorted(allowed))}


def check_allowed(path: str, key: str) -> None:
    """Raises `ValueError` for an import path, the value of `key`, that this process may not load. Call it before the import."""
    allowed = os.environ.get(VARIABLE)
    if allowed is not None and path not in json.loads(allowed):
        raise ValueError(not_allowed(path, key))


def not_allowed(path: str, key: str) -> str:
    """Returns why the value of `key` is refused."""
    return (
        f"{key} = {path!r} is an import path, and the operator's file does not allow it: expected what is built in, what the "
        f"job's own runs name, or a path in trainer.allowed_imports of the job's file; its operator may add {path!r} there"
    )


def search_working_directory() -> None:
    """Lets modules of the working directory be found, after all others, which none of them hides."""
    with suppress(OSError):  # it is gone
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)


def import_module(name: str) -> ModuleType:
    """Imports what a configuration names; raises whatever the import raises.

    In a checkout a folder of ours is no module: it would be a second copy of `counterpoint.NAME`.
    """
    search_working_directory()
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top) if top in _OWN else None
    places = [] if spec is None else spec.submodule_search_locations or []
    if any(os.path.samefile(place, Path(counterpoint.__path__[0], top)) for place in places):
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)
    return importlib.import_module(name)


def import_advice(module_name: str, error: BaseException) -> str:
    """Returns advice to append to the message of an `error` at importing `module_name`.

    Empty if the module was found and failed by itself.
    """
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module_name}.".startswith(f"{missing}."):
        return ""
    top = module_name.partition(".")[0]
    if top in _OWN:
        return f"; a module of this project is counterpoint.{module_name}"
    return f"; put the directory of {top} on PYTHONPATH, or start where {top} is"
