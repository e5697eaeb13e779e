"""Checks the arguments of a configuration's `args` against the types that an operator's own class or function gives them.

Only what the configuration itself would refuse is refused here, a boolean where a number is expected: the rest is the class's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, ValidationError, create_model

from counterpoint.transport.config import NO_NUMBER, Config


class _Arguments(Config):
    """What the arguments of one function are checked with, each under its name."""

    model_config = ConfigDict(arbitrary_types_allowed=True)


def refuse_booleans(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises `ValueError`, which names the argument, for a boolean where the type or the default of a parameter is a number."""
    bases = inspect.getmro(function) if isinstance(function, type) else ()
    owners = [vars(each)["__init__"] for each in bases if "__init__" in vars(each)] or [function]
    for name, value in arguments.items():
        expected = next((found for owner in owners if (found := _expected(owner, name)) is not None), None)
        if expected is None:
            continue
        try:
            create_model("_One", __base__=_Arguments, argument=(expected, ...)).model_validate({"argument": value})
        except ValidationError as error:
            for each in error.errors():
                if each["type"] == NO_NUMBER:
                    raise ValueError(f"{name} = {value!r}: {each['msg']}") from None
        except (PydanticUserError, NameError, TypeError):  # no type that pydantic knows, so none of a number
            continue


def _expected(function: Callable[..., Any], name: str) -> Any:
    """The type of a parameter, or of its default without one; None if the function has no such parameter."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None:
        return None
    if parameter.annotation is not parameter.empty:
        stand_in = type("_", (), {"__annotations__": {name: parameter.annotation}})
        with suppress(Exception):
            # A name that is imported for the type checker alone, or anything else of an operator's, may raise.
            return get_type_hints(stand_in, getattr(function, "__globals__", {}), include_extras=True)[name]
    return type(parameter.default)
