"""Reads an endpoint's parameters from a request: path and query of a `GET`, else path and JSON body. Everything is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from counterpoint.serve.endpoint import Endpoint
from counterpoint.serve.errors import BadParameter
from counterpoint.transport.config import Config
from counterpoint.transport.exact_json import MAX_WRITTEN_DEPTH, JsonError, dumps, loads


def names_in(path: str) -> list[str]:
    """Returns the names in braces of an endpoint's path."""
    return re.findall(r"\{(\w+)\}", path)


def lists_of(parameters: type[Config]) -> frozenset[str]:
    """Returns the fields that take several values."""
    properties = parameters.model_json_schema().get("properties", {})
    return frozenset(
        name
        for name, schema in properties.items()
        if any(each.get("type") == "array" for each in (schema, *schema.get("anyOf", ())))
    )


def from_query(
    endpoint: Endpoint[Any, Any], lists: frozenset[str], path: Mapping[str, str], query: Sequence[tuple[str, str]]
) -> Config:
    """Returns the parameters of a reading request. Raises `BadParameter`."""
    given: dict[str, Any] = dict(path)
    for name, value in query:
        if name in path:
            raise BadParameter(
                f"{name} stands in the path", where=name, value=value, advice="leave it out of the query"
            )
        if name in lists:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise BadParameter(f"{name} is given twice", where=name, value=value, expected="one value")
        else:
            given[name] = value
    try:
        parsed: Config = endpoint.parameters.model_validate(given)
    except ValidationError as error:
        raise _bad(error) from None
    return parsed


def from_body(endpoint: Endpoint[Any, Any], path: Mapping[str, str], body: bytes) -> Config:
    """Returns the parameters of a changing request. No body stands for `{}`. Raises `BadParameter`."""
    try:
        values = loads(body or b"{}", MAX_WRITTEN_DEPTH)
    except JsonError as error:
        raise BadParameter(f"the body cannot be read: {error}", where="body", expected="a JSON object") from None
    if not isinstance(values, dict):
        raise BadParameter(f"the body is a JSON {type(values).__name__}", where="body", expected="a JSON object")
    if twice := [name for name in path if name in values]:
        raise BadParameter(f"{twice[0]} stands in the path", where=twice[0], advice="leave it out of the body")
    try:
        parsed: Config = endpoint.parameters.model_validate_json(dumps({**values, **path}), strict=True)
    except ValidationError as error:
        raise _bad(error) from None
    return parsed


def _bad(error: ValidationError) -> BadParameter:
    """Describes the first thing that is wrong: a parameter that does not exist, since it may be another that is misspelt."""
    every: list[ErrorDetails] = error.errors(include_url=False)
    details = next((each for each in every if each["type"] == "extra_forbidden"), every[0])
    where = ".".join(map(str, details["loc"]))
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return BadParameter(f"{where} is missing", where=where, expected=message)
    if details["type"] == "extra_forbidden":
        return BadParameter(
            f"there is no parameter {where[:64]!r}", where=where[:64], advice="see /api/v1/openapi.json"
        )
    return BadParameter(
        f"{where[:64]} is wrong: {message}", where=where[:64], value=str(details["input"]), expected=message
    )
