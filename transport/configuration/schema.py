"""The keys of a configuration model, for flags, environment variables, error messages and help."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from counterpoint.transport.configuration.docstrings import docstring_of

ITEM = "[]"
"""Stands in a path for the position in a list."""

Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration file."""

    path: str
    """`section.key`; `section.[].key` inside a list of tables."""
    type: str
    """The type in words, such as `list of number`."""
    default: str
    """The default as TOML writes it; empty for a required key."""
    is_section: bool
    """Whether it is a table, or a list of tables, with keys of its own here."""
    is_free: bool
    """Whether it is a table with arbitrary keys (`args`)."""
    model: Model
    """The model that has it as a field."""

    @property
    def description(self) -> str:
        """The docstring of the field."""
        return docstring_of(self.model, self.path.rpartition(".")[2])


@cache
def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """Returns every key of `model` by path, sections before their keys: the same table each time, not to be changed."""
    found: dict[str, Key] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        annotation = field.annotation
        models = _models_in(annotation)
        free = not models and _mentions(annotation, dict)
        found[path] = Key(path, _type_name(field), _default(field), bool(models), free, model)
        inner = f"{path}.{ITEM}." if _is_list(annotation) else f"{path}."
        for nested in models:
            for key in keys_of(nested, inner).values():
                found[key.path] = _either(found[key.path], key) if key.path in found else key
    return found


def _either(one: Key, other: Key) -> Key:
    """Merges a key that several members of a union have: all their types, and no default if theirs differ."""
    names = " | ".join(dict.fromkeys([*one.type.split(" | "), *other.type.split(" | ")]))
    return replace(one, type=names, default=one.default if one.default == other.default else "")


def pattern_of(path: str, keys: dict[str, Key]) -> str:
    """Returns a path as in `keys`: the position of a list's entry becomes `[]`."""
    parts: list[str] = []
    for part in path.split("."):
        above = keys.get(".".join(parts))
        is_entry = part.isdecimal() and above is not None and above.type.startswith("list")
        parts.append(ITEM if is_entry else part)
    return ".".join(parts)


def is_known(path: str, keys: dict[str, Key]) -> bool:
    """Returns whether a flag or a variable may set `path`: a key, or anything in a table with arbitrary keys."""
    pattern = pattern_of(path, keys)
    parts = pattern.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return pattern in keys or any(key in keys and keys[key].is_free for key in above)


def typed(pattern: str, like: str) -> str:
    """Returns a key as written in a flag, with the positions in lists from the path `like`, or 0."""
    numbers = iter([part for part in like.split(".") if part.isdigit()])
    return ".".join(next(numbers, "0") if part == ITEM else part for part in pattern.split("."))


def nearest(path: str, keys: dict[str, Key]) -> str | None:
    """Returns the existing key most similar to `path`; None without a similar one.

    One that `path` abbreviates (`lr` of `learning_rate`) in a section of a similar name comes first; then a sibling of a similar
    name; then the same or a similar name in another section, of several such one in a section of a similar name.
    """
    section, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    around = section.rpartition(".")[2]
    for key in (*siblings.values(), *keys):
        inside, _, own = key.rpartition(".")
        is_near = not section or difflib.SequenceMatcher(None, around, inside.rpartition(".")[2]).ratio() >= 0.6
        if is_near and "_" in own and name == "".join(word[:1] for word in own.split("_")):
            return key
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return siblings[close[0]]
    elsewhere: dict[str, list[str]] = {}
    for key in keys:
        elsewhere.setdefault(key.rpartition(".")[2], []).append(key)
    if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        sections = {key.rpartition(".")[0]: key for key in elsewhere[close[0]]}
        alike = difflib.get_close_matches(section, sections, n=1, cutoff=0.85)
        return sections[alike[0]] if alike else elsewhere[close[0]][0]
    names = difflib.get_close_matches(name, elsewhere, n=len(elsewhere), cutoff=0.6)
    whole = difflib.get_close_matches(path, [key for each in names for key in elsewhere[each]], n=1, cutoff=0.6)
    return whole[0] if whole else None


def valid_keys(section: str, keys: dict[str, Key]) -> list[str]:
    """Returns the names of the keys in `section`; those at the top for an empty one."""
    return sorted({key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section} - {ITEM})


def _members(annotation: Any) -> list[Any]:
    """Splits an annotation: into the members of unions, the type in `Annotated`, the items of lists."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType, list, tuple):
        return [member for argument in typing.get_args(annotation) for member in _members(argument)]
    return [annotation]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    return [member for member in _members(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def _mentions(annotation: Any, container: type) -> bool:
    origin = typing.get_origin(annotation)
    return origin is container or any(_mentions(argument, container) for argument in typing.get_args(annotation))


def _is_list(annotation: Any) -> bool:
    return _mentions(annotation, list) or _mentions(annotation, tuple)


def _type_name(field: FieldInfo) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    members = [member for member in _members(annotation) if member is not type(None)]
    names = [
        " | ".join(str(value) for value in typing.get_args(member))
        if typing.get_origin(member) is typing.Literal
        else {"str": "text", "int": "integer", "float": "number", "bool": "true | false", "Path": "path"}.get(
            getattr(member, "__name__", ""), "table"
        )
        for member in members
    ]
    text = " | ".join(dict.fromkeys(names))
    return (f"list of {text}s" if text == "table" else f"list of {text}") if _is_list(annotation) else text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=False)
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case BaseModel() | dict() | list() | tuple():
            return ""
        case _:
            return str(value)
