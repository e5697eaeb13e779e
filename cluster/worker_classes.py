"""Checks at submission that the classes of a job's workers can be found, without importing the modules that define them."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.spec import JobSpec
from transport.errors import UserError


def search_path() -> tuple[str, ...]:
    """Returns where this program finds its own modules: its directory, and the current one."""
    first = sys.path[0] if sys.path else ""
    return tuple(dict.fromkeys(os.path.abspath(entry or ".") for entry in (first, ".")))


def require_classes(spec: JobSpec, path: Sequence[str]) -> None:
    """Raises `UserError` naming the role whose class is not there. What cannot be told without an import passes."""
    for role in spec.roles:
        for key, import_path in (("worker", role.worker), ("sub_master", role.sub_master)):
            if import_path is not None:
                try:
                    _require(import_path, path)
                except LookupError as error:
                    raise UserError(f"role {role.name!r}: {key} = {import_path!r}: {error.args[0]}") from None


def _require(import_path: str, path: Sequence[str]) -> None:
    """Raises `LookupError` with the reason."""
    module, _, name = import_path.partition(":")
    if module == "__main__":
        raise LookupError("`__main__` is another program in each process; move the class to a module of its own")
    source = _source_of(module, path)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        raise LookupError(f"{source} cannot be read: {error}") from None
    names, is_open = _top_level_names(tree, path)
    if name not in names and not is_open:
        near = difflib.get_close_matches(name, sorted(names), n=1)
        raise LookupError(f"{source} defines no {name}" + (f"; the nearest is {near[0]}" if near else ""))


def _source_of(module: str, path: Sequence[str]) -> Path | None:
    """The module's source; None if it has none. Raises `LookupError` if there is no such module."""
    parts = module.split(".")
    places: Sequence[str] | None = [*path, *sys.path]
    for position, part in enumerate(parts):
        found = importlib.machinery.PathFinder.find_spec(part, places)
        if found is None and position == 0:
            found = importlib.util.find_spec(part)  # built in, frozen, or found by an editable installation
        if found is None:
            inside = (
                f" in {'.'.join(parts[:position])}"
                if position
                else f"; searched {', '.join(path)} and what is installed"
            )
            raise LookupError(f"there is no module {part!r}{inside}")
        if position < len(parts) - 1:
            if found.submodule_search_locations is None:
                raise LookupError(f"{'.'.join(parts[: position + 1])} is no package")
            places = list(found.submodule_search_locations)
    return Path(found.origin) if found is not None and found.origin and found.origin.endswith(".py") else None


def _top_level_names(tree: ast.Module, path: Sequence[str]) -> tuple[set[str], bool]:
    """The names that a module defines, and whether it may define others that are not written there.

    The public names of a package, which another takes over by `import *`, count as those of the other.
    """
    names: set[str] = set()
    is_open = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            is_open |= node.name == "__getattr__"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                of_others = _names_of(node.module, path) if node.module and not node.level else None
                names |= of_others or set()
                is_open |= of_others is None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names, is_open


def _names_of(module: str, path: Sequence[str]) -> set[str] | None:
    """The names of a module that `import *` takes over; None if they cannot be told from its source."""
    try:
        source = _source_of(module, path)
        tree = ast.parse(source.read_bytes(), str(source)) if source else None
    except (LookupError, OSError, SyntaxError, ValueError):
        return None
    if tree is None or any(
        alias.name == "*" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    ):
        return None
    names, is_open = _top_level_names(tree, path)
    return None if is_open else names
