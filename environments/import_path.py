"""What to tell an operator whose module is not found. Environments, advantages and losses are all given by import path."""

from __future__ import annotations


def import_advice(module_name: str, error: BaseException) -> str:
    """What to do when importing `module_name` failed with `error` because it is not there, to append to a message; nothing when
    it was found and failed by itself.
    """
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module_name}.".startswith(f"{missing}."):
        return ""
    top = module_name.partition(".")[0]
    return f"; put the directory of {top} on PYTHONPATH (where you stand is not on it by itself)"
