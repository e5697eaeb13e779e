"""Checks at submission that the classes of a job's workers are there and are workers, without importing what defines them.

A module that this program has imported already is asked; of others the source is read.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from counterpoint.cluster.spec import JobSpec
from counterpoint.cluster.worker import SubMaster, Worker
from counterpoint.transport.errors import UserError

_UNKNOWN = "?"
"""Stands for what a source does not tell."""

_OURS = ("cluster", "counterpoint")
"""Packages whose modules are imported: quickly, and without effect."""

_DEEPEST = 32
"""Most classes above each other, and modules between which a name is handed on."""

_NOTHING = ModuleType("nothing")


def search_path() -> tuple[str, ...]:
    """Returns where this program finds its own modules: its directory, and the current one."""
    first = sys.path[0] if sys.path else ""
    return tuple(dict.fromkeys(os.path.abspath(entry or ".") for entry in (first, ".")))


def require_classes(spec: JobSpec, path: Sequence[str]) -> None:
    """Raises `UserError` naming the role whose class is not there, or is none of its kind.

    What cannot be told without an import passes.
    """
    for role in spec.roles:
        for key, import_path, base in (("worker", role.worker, Worker), ("sub_master", role.sub_master, SubMaster)):
            if import_path is not None:
                try:
                    _require(import_path, path, base)
                except LookupError as error:
                    raise UserError(f"role {role.name!r}: {key} = {import_path!r}: {error.args[0]}") from None


def _require(import_path: str, path: Sequence[str], base: type[Worker]) -> None:
    """Raises `LookupError` with the reason."""
    module, _, name = import_path.partition(":")
    if module == "__main__":
        raise LookupError("`__main__` is another program in each process; move the class to a module of its own")
    source = _source_of(module, path)
    if source is not None:
        try:
            tree = ast.parse(source.read_bytes(), str(source))
        except (OSError, SyntaxError, ValueError) as error:
            raise LookupError(f"{source} cannot be read: {error}") from None
        names, is_open = _top_level_names(tree, path)
        if name not in names and not is_open:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            raise LookupError(f"{source} defines no {name}" + (f"; the nearest is {near[0]}" if near else ""))
    kinds = _kinds(module, name, path)
    if base is Worker and _path_of(SubMaster) in kinds:
        raise LookupError(
            f"{name} is a SubMaster, which manages a role's workers; give it as `sub_master` of that role"
        )
    if {_UNKNOWN, _path_of(base)}.isdisjoint(kinds):
        raise LookupError(
            f"{name} of {source or module} is no subclass of {base.__name__}; derive it from counterpoint.cluster.{base.__name__}"
        )


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


# --- what a class is derived from ---


def _kinds(module: str, name: str, path: Sequence[str], depth: int = 0) -> set[str]:
    """Returns the import paths of a module's class and of those above it; with `_UNKNOWN` where a source does not tell."""
    is_ours = module.partition(".")[0] in _OURS
    try:
        known = importlib.import_module(module) if is_ours else sys.modules.get(module)
        if is_ours or name in vars(known or _NOTHING):
            found = getattr(known, name, None)
            return {_path_of(each) for each in found.__mro__} if isinstance(found, type) else {"no class"}
        source = _source_of(module, path)
        nodes = [*ast.walk(ast.parse(source.read_bytes(), str(source)))] if source and depth < _DEEPEST else []
    except (ImportError, LookupError, OSError, SyntaxError, ValueError):
        return {_UNKNOWN}
    package = module if source and source.name == "__init__.py" else module.rpartition(".")[0]

    def of(expression: ast.expr) -> set[str]:
        match expression:
            case ast.Name(id=below):
                return _kinds(module, below, path, depth + 1)
            case ast.Subscript(value=ast.Name() | ast.Attribute() as generic):
                return of(generic)
            case ast.Attribute(value=value, attr=below):
                prefix = ast.unparse(value)
                homes = [home for node in nodes for names, home in _imported(node, package) if names == prefix]
                return _kinds(homes[0], below, path, depth + 1) if len(homes) == 1 else {_UNKNOWN}
        return {_UNKNOWN}

    match [node for node in nodes if _defines(node, name)]:
        case [ast.ClassDef(decorator_list=[], bases=bases)]:
            return {f"{module}:{name}"}.union(*map(of, bases))
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[])]:
            return {"no class"}
        case [ast.ImportFrom() as node]:
            home = next(home for names, home in _imported(node, package) if names == name)
            return _kinds(*home.rpartition(".")[::2], path, depth + 1)
        case [] if nodes and hasattr(builtins, name) and not any(_defines(node, "*") for node in nodes):
            return {f"{builtins.__name__}:{name}"}
    return {_UNKNOWN}


def _path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _defines(node: ast.AST, name: str) -> bool:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name
        case ast.Import() | ast.ImportFrom():
            return any((alias.asname or alias.name) == name for alias in node.names)
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yields each name that a node imports, and what it stands for: `module`, or `module.name`."""
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        home = ".".join([*above, *filter(None, [node.module])])
        yield from ((alias.asname or alias.name, f"{home}.{alias.name}") for alias in node.names)
