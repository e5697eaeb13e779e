"""JSON schemas of tools' arguments, of every draft from 4 on and of OpenAPI 3.0, as one of draft 2020-12, which is then held.

Servers and libraries leave out `$schema`, and write what their own draft has. A form that only an older draft has keeps that
draft's meaning; of a schema that names its draft, what that draft does not know is left out, as the draft says:

| key | becomes |
|---|---|
| `exclusiveMinimum: true` beside `minimum`, `exclusiveMaximum` alike (draft 4, OpenAPI 3.0) | the bound itself, exclusive |
| `nullable: true`, `x-nullable: true` beside `type` (OpenAPI 3.0) | `null` among the types; an `enum` has to name it |
| `nullable: true` beside `$ref`, `allOf`, `anyOf`, `oneOf` (exporters of OpenAPI 3.0) | that, or `null` |
| a key whose value is `null`, as for what an exporter leaves unset | left out; not of `const`, `default`, `type` |
| `[]` for a map of schemas or for a schema (PHP) | `{}` |
| `allOf: []`, `prefixItems: []`, `required: false`, a name twice in `required` or `type` | left out |
| a description or the like that is no text | left out |
| a list of `items`, and `additionalItems` (to 2019-09) | `prefixItems`, and `items` |
| `dependencies` (to draft 7) | `dependentRequired`, `dependentSchemas` |
| `$recursiveRef` without an anchor (2019-09) | `$ref` |
| keys beside `$ref`, where the schema names a draft to 7 | left out |
| `divisibleBy`, `disallow`, `extends` (draft 3), `$recursiveAnchor`, another draft, references to elsewhere | refused |
| `format`, `contentEncoding` and the like, `default`, `discriminator`, and any unknown key | without effect |

Everything else is held by the library jsonschema-rs: exactly, also of integers of any size and of decimals, and in bounded time,
also for a `pattern`.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs

from counterpoint.transport.exact_json import dumps, loads

_ONE = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_MAPS = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
"""The keys that hold a schema, a list of schemas, or schemas by name. What others hold is no schema, but a value."""

_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020, "oas/3.1": 2020}
_FIRST = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "dependentRequired": 2019,
    "dependentSchemas": 2019, "maxContains": 2019, "minContains": 2019, "unevaluatedItems": 2019, "unevaluatedProperties": 2019,
    "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip
"""The first draft that has a key, of those that draft 4 has not."""
_REFUSED = {"$recursiveAnchor", "disallow", "divisibleBy", "extends"}
_KEPT_NULL = {"const", "default", "type"}
"""Keys of which null is a value, or for which it may mean the type."""
_EMPTY = _MAPS | {"additionalItems", "additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties"}
"""Keys whose `[]` is what PHP writes for an empty object."""
_OF_TYPE: dict[str, type] = {
    "$comment": str, "contentEncoding": str, "contentMediaType": str, "deprecated": bool, "description": str, "examples": list,
    "format": str, "readOnly": bool, "title": str, "writeOnly": bool,
}  # fmt: skip
"""Keys without effect that the library refuses if they are of another type."""
_BESIDE = {"$ref", "allOf", "anyOf", "oneOf"}
_OF_THE_WHOLE = {"$anchor", "$defs", "$dynamicAnchor", "$id", "$schema", "definitions"}
"""Keys by which other places name this one, or what is below it."""
_SAID = {"$comment", "default", "deprecated", "description", "examples", "title", "$defs", "definitions"}
"""Keys that hold nothing by themselves, and may stand beside `$ref` in any draft."""

_MOST_ALTERNATIVES = 10_000
"""A message for a value goes through the alternatives of its parts: as many as a schema that names itself has, to their depth."""
_VALUE = "\0"
"""What stands for the value in the library's messages."""


def violation(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str:
    """Returns what in `value`, which is called `where`, is not as `schema` wants it, for a model to read; empty if nothing is.

    Raises `ValueError` for a schema that `check_schema` refuses.
    """
    validator, alternatives = _compiled(dumps(schema, default=str))
    if validator.is_valid(value):
        return ""
    if alternatives ** min(_depth(value), 64) <= _MOST_ALTERNATIVES:
        try:
            validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return _said(error, where)
    return f"{where}: not as the schema wants it"


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a schema that cannot be held, naming the place."""
    _compiled(dumps(schema, default=str))


def newest(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema as one of draft 2020-12, without `$schema`. Raises `ValueError` for one that cannot be held."""
    named = str(schema.get("$schema") or "")
    drafts = [number for name, number in _DRAFTS.items() if name in named]
    if (
        named and not drafts and not re.fullmatch(r"https?://json-schema\.org/schema#?", named)
    ):  # the newest, whichever that was
        raise ValueError(f"$schema is {named[:100]!r}; expected one of {', '.join(_DRAFTS)}")
    found = _newest(dict(schema), drafts[0] if drafts else None)
    assert isinstance(found, dict)
    return {key: value for key, value in found.items() if key != "$schema"}


def with_parts(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a schema with `change` made to each schema directly in it."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: change(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            found[key] = [change(each) for each in value]
        elif key in _ONE:
            found[key] = change(value)
    return found


def _newest(schema: Any, draft: int | None) -> Any:
    """Does as `newest` for a part. `draft` is the number of the schema's draft, None if it names none."""
    if not isinstance(schema, dict):
        return schema
    schema = _without_what_says_nothing(schema)
    if refused := sorted(_REFUSED & schema.keys()):
        raise ValueError(f"the key {refused[0]!r} is not held here")
    if draft is not None:
        is_alone = draft <= 7 and "$ref" in schema
        schema = {
            key: value
            for key, value in schema.items()
            if _FIRST.get(key, 0) <= draft and (not is_alone or key == "$ref" or key in _SAID)
        }
    found: dict[str, Any] = with_parts(schema, lambda part: _newest(part, draft))
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive):
            if bound not in found:
                raise ValueError(f"{exclusive} is true, and there is no {bound}")
            found[exclusive] = found.pop(bound)
    is_nullable = draft is None and True in (found.get("nullable"), found.get("x-nullable"))
    if is_nullable and "type" in found:
        kinds = found["type"] if isinstance(found["type"], list) else [found["type"]]
        found["type"] = [*kinds, "null"] if "null" not in kinds else kinds
    if isinstance(found.get("items"), list):
        if prefix := found.pop("items"):
            found["prefixItems"] = prefix
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    dependencies = found.pop("dependencies", None)
    if isinstance(dependencies, dict) and (draft is None or draft <= 7):
        for name, needed in dependencies.items():
            found.setdefault("dependentRequired" if isinstance(needed, list) else "dependentSchemas", {})[name] = needed
    if (recursive := found.pop("$recursiveRef", None)) is not None and draft in (None, 2019):
        found["allOf"] = [*found.get("allOf", []), {"$ref": recursive}]
    if is_nullable and _BESIDE & found.keys():
        of_the_whole = {key: found.pop(key) for key in _OF_THE_WHOLE & found.keys()}
        return {**of_the_whole, "anyOf": [found, {"type": "null"}]}
    return found


def _without_what_says_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without keys that exporters write for what they leave unset, and that change nothing."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if (value is None and key not in _KEPT_NULL) or (value == [] and key in ("allOf", "prefixItems", "required")):
            continue
        if (key == "required" and value is False) or not isinstance(value, _OF_TYPE.get(key, object)):
            continue
        if value == [] and key in _EMPTY and not (key == "items" and schema.get("additionalItems") is not None):
            found[key] = {}
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: {} if each is None else each for name, each in value.items()}
        elif key in ("required", "type") and isinstance(value, list):
            found[key] = ["null" if each is None else each for at, each in enumerate(value) if each not in value[:at]]
        else:
            found[key] = value
    return found


@lru_cache(maxsize=256)
def _compiled(text: bytes) -> tuple[Any, int]:
    """Returns what holds a schema, which is JSON, and the most alternatives at one place if it may name itself, else 1."""
    schema = newest(loads(text))
    try:
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=False, mask=_VALUE, offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        place = "".join(f"[{json.dumps(each)}]" for each in getattr(error, "instance_path", ()))
        problem = getattr(error, "message", str(error)).replace(_VALUE, reprlib.repr(getattr(error, "instance", "it")))
        raise ValueError(f"schema{place}: {problem[:300]}") from None
    found: list[int] = [1]

    def count(part: Any) -> Any:
        if isinstance(part, dict):
            found.append(sum(len(part[key]) for key in ("allOf", "anyOf", "oneOf") if isinstance(part.get(key), list)))
        return with_parts(part, count)

    count(schema)
    return validator, max(found) if b'"$ref"' in text or b'Ref"' in text else 1


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
    return depth


def _said(error: Any, where: str) -> str:
    """Returns an error of the library for a model; of alternatives, what is wrong with each."""
    place = where + "".join(f"[{each}]" if isinstance(each, int) else f".{each[:64]}" for each in error.instance_path)
    if parts := [each[0] for each in getattr(error.kind, "context", ()) if each]:
        return f"{place}: fits none of: {'; '.join(_said(each, where) for each in parts)}"[:500]
    value = error.instance
    shown = json.dumps(value[:64]) if isinstance(value, str) else reprlib.repr(value)
    return f"{place}: {error.message.replace(_VALUE, shown, 1)[:500]}"
