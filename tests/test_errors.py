"""`counterpoint.errors`: its tree is that of the classes, and public functions name the errors of it that they raise."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import counterpoint
from counterpoint import errors

pytestmark = pytest.mark.slow  # every public name is imported

ROW = re.compile(r"^( *)[*+-] (\w+) +\S", flags=re.MULTILINE)

KINDS: dict[str, type[Exception]] = {name: getattr(errors, name) for name in dir(errors)}


def public_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Each function, method and constructor that users call, by its name, with its docstring (a constructor's: its class's)."""
    packages = [getattr(counterpoint, name) for name in dir(counterpoint)]
    for package in [counterpoint, *filter(inspect.ismodule, packages)]:
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield name, value, value.__doc__ or ""
            elif inspect.isclass(value) and value.__module__.startswith("counterpoint."):
                for own, member in vars(value).items():
                    function = getattr(member, "__func__", member)
                    if inspect.isfunction(function) and (own == "__init__" or not own.startswith("_")):
                        of_class = value.__doc__ or "" if own == "__init__" else ""
                        yield f"{name}.{own}", function, of_class + (function.__doc__ or "")


def raised_by(function: Callable[..., Any]) -> set[str]:
    """The names that its own `raise` statements name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError):  # a dataclass's: it has no source
        return set()
    made = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return {ast.unparse(each.func if isinstance(each, ast.Call) else each).rpartition(".")[2] for each in made}


FUNCTIONS = {name: (raised_by(function), text) for name, function, text in public_functions()}


def test_the_tree_is_that_of_the_classes() -> None:
    parents: list[str] = []
    drawn: dict[str, str | None] = {}
    for indent, name in ROW.findall(errors.__doc__ or ""):
        depth = len(indent) // 2
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else None
    real = {
        name: next((base.__name__ for base in kind.__mro__[1:] if base in KINDS.values()), None)
        for name, kind in KINDS.items()
    }
    assert drawn == real


def test_public_functions_name_what_they_raise() -> None:
    unnamed = {name: raised & KINDS.keys() - {*re.findall(r"\w+", text)} for name, (raised, text) in FUNCTIONS.items()}
    assert not {name: missing for name, missing in unnamed.items() if missing}


CALLED_FIRST = ("start", "read", "run", "submit", "claim_and_run", "load_rows", "DrivenRun.forward_backward")


@pytest.mark.parametrize("function", CALLED_FIRST)
def test_what_a_user_calls_first_names_an_error(function: str) -> None:
    assert any(name in FUNCTIONS[function][1] for name in KINDS)


def test_every_error_of_the_tree_is_named_by_something_that_raises_it() -> None:
    said = {*re.findall(r"\w+", " ".join(text for _, text in FUNCTIONS.values()))}
    tops = [name for name, kind in KINDS.items() if not KINDS.keys() & {base.__name__ for base in kind.__mro__[1:]}]
    unsaid = [top for top in tops if not any(issubclass(KINDS[name], KINDS[top]) for name in said & KINDS.keys())]
    assert not unsaid
