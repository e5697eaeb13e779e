"""What makes a target the one that was run: a digest of its configuration, and the fields that its dataclasses had.

The record of a target keeps both. A field that a program has got since, and that has its default, changes nothing: the target
that was run had no other value there.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

LARGEST_FIELDS_BYTES = 3000
"""Of the names of fields no more is kept: there has to be room in a record for an error and its traceback."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a target this one. It is compared if it consists of JSON and dataclasses."""

    value: Any

    @property
    def digest(self) -> str | None:
        """The digest with every field; None if it cannot be compared."""
        return _digest(self.value, {}, {})

    @property
    def field_names(self) -> str | None:
        """The fields of its dataclasses, `Config(lr, wd) Model(size)`; None if there are none, or too many."""
        seen: dict[str, set[str]] = {}
        _digest(self.value, {}, seen)
        text = " ".join(f"{name}({', '.join(sorted(names))})" for name, names in sorted(seen.items()))
        return text if text and len(json.dumps(text)) <= LARGEST_FIELDS_BYTES else None

    def is_that_of(self, digest: str | None, field_names: str | None) -> bool:
        """Whether a record with this `digest` and these `field_names` is of this target, as far as that can be told."""
        own = self.digest
        if None in (own, digest) or own == digest:
            return True
        known = {name: set(names.split(", ")) for name, names in re.findall(r"(\w+)\(([^)]*)\)", field_names or "")}
        return bool(known) and digest == _digest(self.value, known, {})


def _digest(value: Any, known: dict[str, set[str]], seen: dict[str, set[str]]) -> str | None:
    """Returns the digest of a value without the fields that are not `known` and have their default; notes those `seen`.

    None if it is no JSON.
    """
    try:
        return hashlib.blake2b(_text(value, known, seen).encode(), digest_size=16).hexdigest()
    except (TypeError, ValueError, RecursionError):
        return None


def _text(value: Any, known: dict[str, set[str]], seen: dict[str, set[str]]) -> str:
    def plain(found: Any) -> dict[str, Any]:
        if not is_dataclass(found) or isinstance(found, type):
            raise TypeError(f"{type(found).__name__} is no JSON")
        name = type(found).__name__
        seen.setdefault(name, set()).update(field.name for field in fields(found))
        compared = [
            field
            for field in fields(found)
            if field.name in known.get(name, {field.name}) or not _has_default(found, field)
        ]
        return {name: {field.name: getattr(found, field.name) for field in compared}}

    return json.dumps(value, sort_keys=True, default=plain)


def _has_default(instance: Any, field: Field[Any]) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return default is not MISSING and _text(getattr(instance, field.name), {}, {}) == _text(default, {}, {})
