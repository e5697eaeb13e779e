"""Names for trainables and environments, and the import paths that other processes load them by.

Nothing is pickled: a trainable is named `module:name`, or `/path/script.py:name` when it is defined in the script that runs. What
has no such name (a lambda, a function inside a function, a partial) is kept here as `closure:name`: a process that is forked from
this one has it, any other refuses it with the reason. The names that are registered are sent to every trial, so that
`env_creator` works there, too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from counterpoint.environments.import_path import import_module, search_working_directory
from counterpoint.tune.errors import TuneError


class NotImportable(TuneError):
    """A class or function has no name by which another process could import it."""


CLOSURE = "closure:"
"""How the path begins of what only this process has, and those that are forked from it."""

logger = logging.getLogger(__name__)

_closures: dict[str, tuple[Any, str]] = {}
"""What cannot be imported, and why, by name."""

_trainables: dict[str, str] = {}
_environments: dict[str, str] = {}
"""Import paths by name."""

_loading = ""
"""The module that is being imported for its trainable or environment."""


def register_trainable(name: str, trainable: Callable[..., Any] | str, warn: bool = True) -> None:
    """Gives a class or function of the user a name, for `run` and `Trial.trainable_name`; a second call replaces the first.

    A function takes `(config)`, `(config, checkpoint_dir)` or `(config, reporter)`. With `warn` it is logged when the name stood
    for something else, and when only a forked process can have it. Raises `TuneError` for what cannot be called.
    """
    before, path = _trainables.get(_checked(name)), path_of(trainable, name)
    _trainables[name] = path
    if warn and before not in (None, path):
        logger.warning("trainable %r was %s, and is %s now", name, before, path)
    if warn and path.startswith(CLOSURE):
        logger.warning("trainable %r runs only where trials are forked from this process: %s", name, _closures[name][1])


def register_env(name: str, env_creator: Callable[..., Any] | str) -> None:
    """Gives a function that makes an environment from its config a name, which trials look up with `env_creator`.

    Raises `TuneError` for what cannot be called.
    """
    _environments[_checked(name)] = path_of(env_creator, f"env-{name}")


def env_creator(name: str) -> Callable[..., Any]:
    """Returns what `register_env` was given, in this process or in the one that started this trial.

    Raises `TuneError` if there is none.
    """
    if name not in _environments:
        raise TuneError(
            f"no environment {name!r} is registered; there are: {', '.join(sorted(_environments)) or 'none'}"
        )
    found: Callable[..., Any] = load(_environments[name])
    return found


def environments() -> dict[str, str]:
    """The import paths of the environments, by name."""
    return dict(_environments)


def adopt_environments(given: Mapping[str, str]) -> None:
    """Makes the environments of the process that started this trial known here."""
    _environments.update(given)


def trainable_path(name: str) -> str:
    """Returns the import path of a trainable that is registered, or of one named by its import path itself.

    Raises `TuneError` for any other name.
    """
    if name in _trainables:
        return _trainables[name]
    if ":" in name:
        return name
    known = ", ".join(sorted(_trainables)) or "none"
    raise TuneError(
        f"no trainable {name!r} is registered (there are: {known}); register it with register_trainable, or name it module:name"
    )


def trainable_name(run: Callable[..., Any] | str) -> str:
    """Returns what `Trial.trainable_name` holds for what a user gave `run`: a registered name as it is, else the import path."""
    if isinstance(run, str):
        trainable_path(run)
        return run
    return path_of(run)


def path_of(target: Callable[..., Any] | str, name: str = "") -> str:
    """Returns the import path of a class or function; of what has none the path of a closure, under that name or its own.

    Raises `TuneError` for what cannot be called, and for a name that is not registered.
    """
    try:
        return import_path_of(target)
    except NotImportable as error:
        if not callable(target):
            raise
        own = re.sub(r"\W+", "_", getattr(target, "__name__", type(target).__name__)).strip("_") or "function"
        number, unique = 1, name or own
        while not name and unique in _closures and _closures[unique][0] is not target:
            number, unique = number + 1, f"{own}_{number + 1}"
        _closures[unique] = (target, str(error))
        return f"{CLOSURE}{unique}"


def closures() -> dict[str, Any]:
    """What this process has that others cannot import, by name."""
    return {name: target for name, (target, _) in _closures.items()}


def why_not_imported(path: str) -> str:
    """Why what a closure's path names is not to be had by an import."""
    name = path.removeprefix(CLOSURE)
    return _closures[name][1] if name in _closures else f"there is no {name!r} here that was given as a function"


def import_path_of(target: Callable[..., Any] | str) -> str:
    """Returns the import path by which another process loads a class or function.

    Raises `NotImportable` with the reason if there is none.
    """
    if isinstance(target, str):
        return trainable_path(target)
    if isinstance(target, functools.partial):
        raise NotImportable(
            f"{target} is a partial, whose arguments other processes cannot import; put them into the trial's config"
        )
    if not inspect.isclass(target) and not inspect.isfunction(target):
        raise NotImportable(f"{target!r} is neither a class nor a function; name one that is at the top of its module")
    name, module = target.__qualname__, target.__module__
    if "<lambda>" in name:
        raise NotImportable(
            f"a lambda of {module} has no name to import it by; write it as a function at the top of its module"
        )
    if "<locals>" in name or "." in name:
        raise NotImportable(
            f"{module}:{name} is defined inside something else, where no other process finds it; "
            "move it to the top of its module, and put what it closes over into the trial's config"
        )
    _require_that_the_name_means(target, module, name)
    return f"{_main_path(name) if module == '__main__' else module}:{name}"


def load(path: str) -> Any:
    """Returns what an import path names.

    Raises `TuneError` if the module has no such name, and whatever importing the module raises.
    """
    if path.startswith(CLOSURE):
        if (name := path.removeprefix(CLOSURE)) not in _closures:
            raise TuneError(f"{path} is not to be had in this process, which is not forked from the one that has it")
        return _closures[name][0]
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise TuneError(f"{path!r} is no import path; expected module:name or /path/script.py:name")
    module = load_module(where)
    try:
        return getattr(module, name)
    except AttributeError:
        raise TuneError(f"{where} has no {name!r}, which was to be loaded as {path}") from None


def load_module(where: str) -> ModuleType:
    """Returns the module before the colon of an import path. Raises whatever importing it raises."""
    global _loading
    before, _loading = _loading, where
    try:
        return _script(where) if where.endswith(".py") else import_module(where)
    finally:
        _loading = before


def search_path() -> list[str]:
    """Returns the path on which this process finds modules, so that one started elsewhere finds them, too."""
    search_working_directory()
    return [os.path.abspath(entry) for entry in sys.path]


def is_at_top_level() -> bool:
    """Whether the script that runs is at a statement of its top level that a process which loads it would reach, too."""
    main, frame = sys.modules["__main__"], inspect.currentframe()
    while frame is not None and (frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>"):
        frame = frame.f_back
    if frame is None:
        return False
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    conditions = [each for each in ast.walk(tree) if isinstance(each, ast.If)]
    above = [each for each in conditions if each.lineno <= frame.f_lineno <= (each.end_lineno or 0)]
    tested = [part for each in above for part in ast.walk(each.test)]
    return not any(isinstance(part, ast.Name) and part.id == "__name__" for part in tested)


def without_reload(name: str) -> str:
    """Returns the name of a trainable by which no process loads the script that runs: what that has is made a closure.

    What the script has registered is treated alike.
    """
    main = vars(sys.modules["__main__"])

    def kept(path: str) -> str:
        own = path.rpartition(":")[2]
        if own not in main or path != f"{_main_path(own)}:{own}":
            return path
        _closures[own] = (
            main[own],
            "its script starts an experiment at its top level, as each process that loads it would",
        )
        return f"{CLOSURE}{own}"

    for names in (_trainables, _environments):
        names.update({each: kept(path) for each, path in names.items()})
    return name if name in _trainables else kept(name)


def require_no_import() -> None:
    """Raises `TuneError` when an experiment is started by the import of a trainable's module: each trial would start another."""
    if _loading:
        raise TuneError(
            f"an experiment was started while {_loading} is imported, which each of its trials does; "
            'start it below `if __name__ == "__main__":`'
        )


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name or ":" in name:
        raise TuneError(f"{name!r} is no name to register: expected a text without a colon, which import paths have")
    return name


def _require_that_the_name_means(target: Any, module: str, name: str) -> None:
    found = getattr(sys.modules.get(module), name, None)
    if found is not target and inspect.unwrap(found) is not target if callable(found) else True:
        raise NotImportable(
            f"{module}:{name} is {'missing' if found is None else 'something else'} in its module, so that other processes "
            "would not find it; give it a name of its own at the top of the module"
        )


def _main_path(name: str) -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise NotImportable(
            f"{name} is defined in an interactive session, which other processes cannot import; move it to a module"
        )
    return str(Path(file).resolve())


def _script(file: str) -> ModuleType:
    """A script as a module under a name that stays the same, so that its `if __name__ == "__main__"` does not run."""
    alias = "tune_script_" + re.sub(r"\W", "_", file)
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise TuneError(f"there is no script {file}, from which a trainable was to be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module
