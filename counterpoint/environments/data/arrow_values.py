"""Values of Arrow as those of a row: what JSON has, by one table of types, at any depth.

| type | in a row |
|---|---|
| null, booleans, integers, float64, text, lists, structs, dictionaries | as they are |
| float32, float16 | whole numbers exactly, else the shortest decimal that is this float: 0.1, not 0.10000000149011612 |
| decimals | without places an integer, else a float with the text of its digits |
| dates, times, timestamps | text by ISO 8601 |
| maps | with keys of text an object, else a list of pairs |
| `Json` of the library `datasets`, and Arrow's `json` | the value of the JSON |
| UUIDs | text |
| bytes, durations, intervals, images and the like | Python's own, which no prompt may hold (`rows.py`:`unwritable`) |
| times in nanoseconds, which Python would cut, and any other | refused |

`datasets` stores columns of several types as JSON text. It refuses integers of more than 64 bits, rounds the last digit of some
decimals, and leaves the text in a list of lists whose first is empty; here numbers are exact, and it is decoded there, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from counterpoint.environments.data.rows import DataError, Row
from counterpoint.transport.exact_json import MAX_WRITTEN_DEPTH, JsonError, loads, written_decimal

Decoder = Callable[[Any], Any]
"""Returns a row's value of what Arrow returns for Python, which is never None. Raises `JsonError`."""


class Media(dict[str, Any]):
    """An image, sound, or the like: `bytes`, or the `path` of a file."""


_MEDIA = {"Audio", "BioSequence", "BioStructure", "Image", "Mesh", "Nifti", "Pdf", "Video"}
"""Types of `datasets` that are a struct of bytes and a path."""


class ArrowValues:
    """The types of a table."""

    def __init__(self, schema: Any, where: str) -> None:
        """Raises `DataError` for a column of a type that is not read, naming it."""
        noted = _noted(schema.metadata or {})
        self._decoders: dict[str, Decoder] = {}
        for field in schema:
            try:
                decoder = _decoder(field.type, noted.get(field.name))
            except JsonError as error:
                raise DataError(f"{where}: the column {field.name!r}: {error}; name the others in `columns`") from None
            if decoder is not None:
                self._decoders[field.name] = decoder

    def row(self, table: Any, where: str) -> Row:
        """Returns the row that a table of one holds. Raises `DataError`."""
        try:
            row: dict[str, Any] = table.to_pylist()[0]
        except (
            ValueError,
            OverflowError,
        ) as error:  # a year beyond 9999, nanoseconds of a time, two fields of one name
            raise DataError(f"{where}: it cannot be read: {error}") from None
        for name, decode in self._decoders.items():
            try:
                row[name] = _decoded(decode, row[name])
            except JsonError as error:
                raise DataError(f"{where}: the column {name!r}: {error}") from None
        return row


def _noted(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Returns what `datasets` noted of the columns; nothing where somebody else wrote the file."""
    try:
        noted = loads(metadata[b"huggingface"])["info"]["features"]
    except (JsonError, LookupError, TypeError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _decoded(decode: Decoder | None, value: Any) -> Any:
    return value if decode is None or value is None else decode(value)


def _decoder(kind: Any, noted: Any, *, inside: bool = False) -> Decoder | None:
    """Returns the decoder of a type of Arrow, of which `datasets` may have noted something; None if its values are a row's.

    `inside`: in a list or struct. Raises `JsonError` for a type that is not read.
    """
    parts = noted if isinstance(noted, dict) else {}
    name, word = parts.get("_type"), re.match(r"(?:extension<)?[a-z_.]+\d*", str(kind))
    known = word[0] if word else ""
    if name == "Json":
        return None if parts.get("decode") is False else _json
    if hasattr(kind, "key_type"):  # a map
        key, item = _decoder(kind.key_type, None, inside=True), _decoder(kind.item_type, None, inside=True)
        is_object = str(kind.key_type) in _TEXT
        return lambda pairs: _map([(_decoded(key, a), _decoded(item, b)) for a, b in pairs], is_object=is_object)
    if hasattr(kind, "fields"):  # a struct
        found = {field.name: _decoder(field.type, parts.get(field.name), inside=True) for field in kind.fields}
        if isinstance(name, str) and name in _MEDIA:
            return Media
        changed = {field: decoder for field, decoder in found.items() if decoder is not None}
        return (lambda value: value | {f: _decoded(d, value[f]) for f, d in changed.items()}) if changed else None
    if hasattr(kind, "value_field"):  # a list
        item = noted[0] if isinstance(noted, list) and noted else parts.get("feature")
        of_item = _decoder(kind.value_type, item, inside=True)
        return None if of_item is None else lambda values: [_decoded(of_item, each) for each in values]
    if known in _ENCODED:
        return _decoder(kind.value_type, noted, inside=inside)
    if str(kind).startswith("extension<datasets.features.features.Array"):  # `Array2D` to `Array5D`: lists of lists
        return _decoder(kind.storage_type, None)
    if known in _AS_THEY_ARE:
        return None
    if inside and known.startswith("decimal"):
        return _inner_decimal
    if known not in _FORMS or str(kind) == "time64[ns]":
        raise JsonError(f"its type {kind} is not read")
    return _FORMS[known]


def _json(text: str) -> Any:
    return loads(text, MAX_WRITTEN_DEPTH)


def _map(pairs: list[tuple[Any, Any]], *, is_object: bool) -> Any:
    if not is_object:
        return [list(pair) for pair in pairs]
    if len(found := dict(pairs)) != len(pairs):
        raise JsonError("a map has a key twice")
    return found


def _decimal(value: Decimal) -> float:
    return int(value) if value == value.to_integral_value() and "." not in f"{value:f}" else _written(value)


def _inner_decimal(value: Decimal) -> float:
    """As `_decimal`. Only a column of its own keeps its digits as text, so one here must have no more than a float."""
    found = _decimal(value)
    if Decimal(repr(found)) != value:
        raise JsonError(f"a list or struct has {value:f}, which has more digits than a float; make it text")
    return found


def _shortest(value: float, kind: Callable[[float], Any]) -> float:
    return value if value.is_integer() and abs(value) < _EXACT_INTEGERS else float(str(kind(value)))


def _written(value: Decimal) -> float:
    return written_decimal(f"{value:f}", float(value))


_EXACT_INTEGERS = 2**53
_TEXT = {"string", "large_string", "string_view"}
_AS_THEY_ARE = {
    *_TEXT, "null", "bool", "double", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "binary", "large_binary", "fixed_size_binary", "binary_view", "duration", "month_day_nano_interval",
    "extension<arrow.bool8",
}  # fmt: skip
_ENCODED = {"dictionary", "run_end_encoded"}
_FORMS: dict[str, Decoder] = {
    "halffloat": lambda value: _shortest(value, np.float16),
    "float": lambda value: _shortest(value, np.float32),
    "decimal32": _decimal,
    "decimal64": _decimal,
    "decimal128": _decimal,
    "decimal256": _decimal,
    "date32": lambda value: value.isoformat(),
    "date64": lambda value: value.isoformat(),
    "time32": lambda value: value.isoformat(),
    "time64": lambda value: value.isoformat(),
    "timestamp": lambda value: value.isoformat(),
    "extension<arrow.uuid": str,
    "extension<arrow.json": _json,
}
