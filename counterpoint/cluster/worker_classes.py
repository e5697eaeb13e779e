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
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
            names = _names(source, path)
        except (OSError, SyntaxError, ValueError) as error:
            raise LookupError(f"{source} cannot be read: {error}") from None
        if names is not None and name not in names:
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


def _definitions(source: Path) -> Mapping[str, list[ast.AST]]:
    """Returns, for each name that a source defines or imports anywhere, and for `*`, the nodes that do so."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    for node in ast.walk(ast.parse(source.read_bytes(), str(source))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name].append(node)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    found[alias.asname or alias.name].append(node)
            case ast.Name(id=name, ctx=ast.Store()):
                found[name].append(node)
    return dict(found)


def _names(source: Path, path: Sequence[str], *, is_taken: bool = False) -> set[str] | None:
    """Returns the names that a source defines; None if it may define others that are not written there.

    The names of a module from which it takes all by `import *` count; not so if that takes others in the same way (`is_taken`).
    """
    found = _definitions(source)
    names = {name.split(".")[0] for name in found}
    is_open = any(isinstance(node, ast.FunctionDef) for node in found.get("__getattr__", []))
    if is_open or (
        is_taken and "*" in names
    ):  # an assigned `__getattr__`, as our packages have, gives names that stand there
        return None
    for node in found.get("*", []):
        try:
            module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            other = _source_of(module, path) if module else None
            theirs = _names(other, path, is_taken=True) if other else None
        except (LookupError, OSError, SyntaxError, ValueError):
            return None
        if theirs is None:
            return None
        names |= theirs
    return names


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
        nodes = _definitions(source) if source and depth < _DEEPEST else {}
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
                match nodes.get(prefix, []):
                    case [ast.Import() | ast.ImportFrom() as node]:
                        return _kinds(_home(node, prefix, package), below, path, depth + 1)
        return {_UNKNOWN}

    match nodes.get(name, []):
        case [ast.ClassDef(decorator_list=[], bases=bases)]:
            return {f"{module}:{name}"}.union(*map(of, bases))
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[])]:
            return {"no class"}
        case [ast.ImportFrom() as node]:
            return _kinds(*_home(node, name, package).rpartition(".")[::2], path, depth + 1)
        case [] if nodes and hasattr(builtins, name) and "*" not in nodes:
            return {f"{builtins.__name__}:{name}"}
    return {_UNKNOWN}


def _path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _home(node: ast.Import | ast.ImportFrom, name: str, package: str) -> str:
    """Returns what a name that a node imports stands for: `module`, or `module.name`."""
    imported = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    if isinstance(node, ast.Import):
        return imported
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module]), imported])
