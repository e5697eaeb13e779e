"""Loads an environment by its `kind` in a configuration: a built-in name, or an import path `package.module:Class`.

All errors are reported here, before a run starts: an unknown kind, an argument that the constructor does not take, a class
that lacks a part of the protocol (`environments.base.Environment`).
"""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Iterable
from typing import Any, cast

from counterpoint.environments.base import Environment
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.describe_error import describe_loading
from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.environments.reward import own_bounds, place_of
from counterpoint.transport.configuration.arguments import refuse_booleans

BUILT_IN = {
    "agent": "counterpoint.environments.gateway.agent:AgentEnvironment",
    "arithmetic": "counterpoint.environments.tasks.arithmetic:Arithmetic",
    "closest-number": "counterpoint.environments.tasks.closest_number:ClosestNumber",
    "guess-number": "counterpoint.environments.tasks.guess_number:GuessNumber",
    "harbor": "counterpoint.environments.tasks.harbor:Harbor",
    "reverse-text": "counterpoint.environments.tasks.reverse_text:ReverseText",
    "single-turn": "counterpoint.environments.rewards.single_turn:SingleTurn",
    "tools": "counterpoint.environments.tools.rows:RowsWithTools",
    "verifiers": "counterpoint.environments.verifiers_library.environment:Verifiers",
}
"""Import paths by kind. The modules load only when asked for."""


def load_here(config: EnvironmentConfig) -> Environment:
    """The environment that `config` describes, constructed and checked in this process, whatever `workers` says.

    Raises `ValueError` that names the environment, the value at fault, and what would do instead.
    """
    where = f"environment {config.name!r}"
    built = _construct(_find_class(config.kind, where), config.args, where)
    _check_shape(built, config.kind, where)
    _check_columns(built, config.state_columns, where)
    return cast(Environment, built)


def _find_class(kind: str, where: str) -> type[Any]:
    if kind == "seat":
        raise ValueError(f"{where}: kind = 'seat': runs meet in no rollout any more; make the other policy an opponent")
    path = BUILT_IN.get(kind, kind)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ValueError(
            f"{where}: kind = {kind!r} is not known{_nearest(kind, BUILT_IN)} Built in are {', '.join(sorted(BUILT_IN))}; "
            "your own is an import path, package.module:Class"
        )
    if kind not in BUILT_IN:
        check_allowed(kind, f"{where}: kind")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"{where}: kind = {kind!r}: importing {module_name!r} failed: {describe_loading(error)}"
            f"{import_advice(module_name, error)}"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(
            f"{where}: kind = {kind!r}: {module_name} has no class {class_name!r}{_nearest(class_name, classes)}"
        )
    return found


def _construct(found: type[Any], arguments: dict[str, Any], where: str) -> Any:
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        allowed = _argument_names(found)
        unknown = [name for name in arguments if name not in allowed]
        nearest = _nearest(unknown[0], allowed) if unknown else "."
        raise ValueError(f"{where}: args: {error}{nearest} Allowed are {', '.join(allowed) or 'none'}") from error
    try:
        refuse_booleans(found, arguments)
        return found(**arguments)
    except (Exception, SystemExit) as error:  # likewise: the class may be anybody's
        raise ValueError(f"{where}: args = {reprlib.repr(arguments)}: {describe_loading(error)}") from error


def _argument_names(found: type[Any]) -> list[str]:
    """The constructor's arguments; where it passes on keywords, those of the classes that it extends, too."""
    parameters = inspect.signature(found).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    base = found.__mro__[1]
    if any(each.kind is each.VAR_KEYWORD for each in parameters) and base.__module__ not in ("builtins", "typing"):
        names += [name for name in _argument_names(base) if name not in names]
    return names


_ARGUMENTS = {
    "example": ("index",),
    "rollout": ("example", "model", "state"),
    "score": ("example", "rollout"),
    "score_group": ("example", "rollouts"),
}
"""What each method is called with, in this order."""


def _check_shape(built: Any, kind: str, where: str) -> None:
    grouped = getattr(built, "group_scoring", None)
    if not isinstance(grouped, bool):
        raise ValueError(f"{where}: {kind} needs an attribute group_scoring, True or False, and has {grouped!r}")
    if not callable(getattr(built, "example", None)):
        raise ValueError(f"{where}: {kind} needs a method example(index)")
    if inspect.iscoroutinefunction(built.example):
        raise ValueError(f"{where}: {kind}: example is `async def`; expected `def example` ({place_of(built.example)})")
    methods = ("rollout", "score_group" if grouped else "score")
    for name in methods:
        method = getattr(built, name, None)
        if not inspect.iscoroutinefunction(method):
            found = f", and `async` is missing ({place_of(method)})" if callable(method) else _instead_of(name, built)
            raise ValueError(f"{where}: {kind} needs a method `async def {name}`{found}")
    for name in ("example", *methods):
        _check_arguments(name, getattr(built, name), f"{where}: {kind}")
    try:
        length = len(built)
    except TypeError as error:
        raise ValueError(f"{where}: {kind} needs a method __len__ that counts its examples: {error}") from error
    if length < 1:
        raise ValueError(f"{where}: {kind} has no examples with these args")
    try:
        own_bounds(built)
    except ValueError as error:
        raise ValueError(f"{where}: {kind}: {error}") from error
    except Exception as error:  # it may be a property of anybody's
        raise ValueError(f"{where}: {kind}: reward_bounds: {type(error).__name__}: {error}") from error


def _check_arguments(name: str, method: Any, where: str) -> None:
    """Raises `ValueError` for a method that cannot be called as it will be."""
    try:
        signature = inspect.signature(method, follow_wrapped=False)  # a decorator may give what the caller does not
    except (TypeError, ValueError):  # what is not written in Python may have none
        return
    try:
        signature.bind(*_ARGUMENTS[name])
    except TypeError as error:
        expected = f"{name}(self, {', '.join(_ARGUMENTS[name])})"
        raise ValueError(
            f"{where}: {name}{signature} does not take what it is called with: {error}; expected {expected} ({place_of(method)})"
        ) from error


def _instead_of(name: str, built: Any) -> str:
    """Says which method has nearly the name of one that is missing, or where the methods are described."""
    methods = [
        each for found in type(built).__mro__ for each, value in vars(found).items() if inspect.isfunction(value)
    ]
    near = difflib.get_close_matches(name, methods, n=1, cutoff=0.75)
    return f"; did you misspell it ({place_of(getattr(built, near[0]))})?" if near else "; see docs/environments.md"


def _check_columns(built: Any, columns: Iterable[str], where: str) -> None:
    """Raises `ValueError` for a column that the environment never fills, if it says which ones it does."""
    known = getattr(built, "state_keys", None)
    if known is None:
        return
    for name in columns:
        if name not in known:
            raise ValueError(
                f"{where}: state_columns: its state has no {name!r}{_nearest(name, known)} It has "
                f"{', '.join(sorted(known)) or 'nothing'}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else "."
