"""What makes a target the one that was run: a digest of its configuration, and the fields that its classes had.

The record of a target keeps both. A field that a program has got since, and that has its default, changes nothing: the target
that was run had no other value there.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

LARGEST_FIELDS_BYTES = 3000
"""The most that is kept of the names of fields: there has to be room in a record for an error and its traceback."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a target this one. It is compared if it consists of JSON, dataclasses and named tuples."""

    value: Any

    @property
    def digest(self) -> str | None:
        """The digest with every field; None if it cannot be compared."""
        return _digest(self.value, {}, {})

    @property
    def field_names(self) -> str | None:
        """The fields of its dataclasses and named tuples, `Config(lr, wd) Model(size)`; None if there are none, or too many."""
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

    None if it is no JSON, or its classes do not let it be read.
    """
    try:
        return hashlib.blake2b(_text(value, known, seen).encode(), digest_size=16).hexdigest()
    except Exception:  # noqa: BLE001 - such as that of a field without a value, or of a user's default_factory
        return None


def _text(value: Any, known: dict[str, set[str]], seen: dict[str, set[str]]) -> str:
    return json.dumps(_plain(value, known, seen), sort_keys=True)


def _plain(value: Any, known: dict[str, set[str]], seen: dict[str, set[str]]) -> Any:
    """Returns a value with its dataclasses as `{class: {field: value}}`, and its named tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(each, known, seen) for key, each in value.items()}
    named = hasattr(value, "_field_defaults")
    if isinstance(value, list | tuple) and not named:
        return [_plain(each, known, seen) for each in value]
    if not named and (isinstance(value, type) or not is_dataclass(value)):
        return value
    kind, names = type(value).__name__, value._fields if named else [field.name for field in fields(value)]
    seen.setdefault(kind, set()).update(names)
    compared = {
        name: _plain(getattr(value, name), known, seen)
        for name in names
        if name in known.get(kind, {name}) or not _has_default(value, name)
    }
    return [*compared.values()] if named else {kind: compared}


def _has_default(instance: Any, name: str) -> bool:
    if hasattr(instance, "_field_defaults"):
        default = instance._field_defaults.get(name, MISSING)
    else:
        field = instance.__dataclass_fields__[name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and _text(getattr(instance, name), {}, {}) == _text(default, {}, {})
