"""Templates of prompts: `{name}` is a value, `{{` and `}}` are braces. Values are put in once and never read as a template.

Jinja and `str.format` would let a template run code or read attributes; these have names only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from counterpoint.environments.data.rows import unwritable
from counterpoint.transport.exact_json import WrittenDecimal

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Template:
    """A template, and the names that it needs. Any other brace is itself, as in LaTeX."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self.fields = frozenset(match[1] for match in _FIELD.finditer(text) if match[1])
        whole = _FIELD.fullmatch(text.strip())
        self.only = whole[1] if whole else None
        """The name, where the template is that alone."""

    def fill(self, values: Mapping[str, Any], where: str) -> str:
        """Returns the text with `values`; those that are no text as JSON. Raises `ValueError` for one missing, null or NaN."""
        for field in self.fields:
            if field not in values:
                raise ValueError(
                    f"{where} has no column {field!r} for `{self._name}`; it has {', '.join(map(str, values))}. "
                    "Braces that are meant as such are doubled: {{" + field + "}}"
                )
            if found := "null" if values[field] is None else unwritable(values[field]):
                verb = "holds" if isinstance(values[field], list | dict) else "is"
                raise ValueError(
                    f"{where}: the column {field!r} for `{self._name}` {verb} {found}; expected a value of JSON"
                )
        return _FIELD.sub(lambda match: as_text(values[match[1]]) if match[1] else match[0][0], self._text)


def as_text(value: object) -> str:
    """Returns a value of a row as prompts and answers have it: text and numbers as they are written, anything else as JSON."""
    return str(value) if isinstance(value, str | WrittenDecimal) else json.dumps(value, ensure_ascii=False)
