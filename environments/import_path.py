"""Advice for an import path whose module is not found. Environments, advantages and losses are all given by import path."""

from __future__ import annotations


def import_advice(module_name: str, error: BaseException) -> str:
    """Returns advice to append to the message of an `error` at importing `module_name`.

    Empty if the module was found and failed by itself.
    """
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module_name}.".startswith(f"{missing}."):
        return ""
    top = module_name.partition(".")[0]
    return f"; put the directory of {top} on PYTHONPATH (where you stand is not on it by itself)"
