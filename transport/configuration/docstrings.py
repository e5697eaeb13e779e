"""Reads the docstrings of a configuration model's fields from its source, when somebody asks for them.

Pydantic would read them whenever it builds a model (`use_attribute_docstrings`). Only help, errors and the OpenAPI document show
them, and every process of a job would pay: a fifth of the CPU time in which `counterpoint run` is imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def docstring_of(model: type[BaseModel], field: str) -> str:
    """Returns the docstring below a field, of the first class in the model's resolution order that has one; else an empty text.

    A class whose source is not there, such as one made by `create_model`, has none.
    """
    found = (_docstrings_in(each.__module__).get(each.__qualname__, {}).get(field) for each in model.__mro__)
    return next((text for text in found if text), "")


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings in a module, by the qualified name of the class and then by field."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # it has gone, has no source, or is built in
        return {}
    found: dict[str, dict[str, str]] = {}
    _collect(ast.parse(source).body, "", found)
    return found


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, dict[str, str]]) -> None:
    for statement in body:
        match statement:
            case ast.ClassDef(name=name, body=inner):
                found[prefix + name] = _fields_in(inner)
                _collect(inner, f"{prefix}{name}.", found)
            case ast.FunctionDef(name=name, body=inner) | ast.AsyncFunctionDef(name=name, body=inner):
                _collect(inner, f"{prefix}{name}.<locals>.", found)


def _fields_in(body: list[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, following in pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found
