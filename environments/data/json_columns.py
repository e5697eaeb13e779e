"""Columns whose values are of several types, which the library `datasets` stores as JSON text (its type `Json`).

Arrow gives the text. A decoder here makes of it what `datasets` returns, at any depth, with exact numbers: the
library refuses integers of more than 64 bits, and rounds the last digit of some decimals. It also leaves the text in a list of
lists whose first is empty; here it is decoded there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from counterpoint.environments.data.rows import DataError
from counterpoint.transport.exact_json import MAX_WRITTEN_DEPTH, JsonError, loads

Decoder = Callable[[Any], Any]
"""Returns a value of Arrow with the JSON within decoded. Raises `JsonError`."""


def decoders_of(schema: Any) -> dict[str, Decoder]:
    """Returns the decoders of the columns of an Arrow schema that hold JSON, by name."""
    noted = _noted(schema.metadata or {})
    found = {field.name: _decoder(field.type, noted.get(field.name)) for field in schema}
    return {name: decoder for name, decoder in found.items() if decoder is not None}


def decoded(row: dict[str, Any], decoders: Mapping[str, Decoder], where: str) -> dict[str, Any]:
    """Returns the row with its JSON decoded. Raises `DataError`."""
    for name in decoders.keys() & row.keys():
        try:
            row[name] = decoders[name](row[name])
        except JsonError as error:
            raise DataError(f"{where}: the column {name!r}, which is of the type Json: {error}") from None
    return row


def _noted(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Returns what `datasets` noted of the columns; nothing where somebody else wrote the file."""
    try:
        noted = loads(metadata[b"huggingface"])["info"]["features"]
    except (JsonError, LookupError, TypeError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _decoder(kind: Any, noted: Any) -> Decoder | None:
    """Returns the decoder of a type of Arrow, of which `datasets` may have noted something; None if there is no JSON in it."""
    parts = noted if isinstance(noted, dict) else {}
    name = parts.get("_type")
    if name == "Json" or str(kind) == "extension<arrow.json>":
        return None if name == "Json" and parts.get("decode") is False else _value
    if hasattr(kind, "value_field"):  # a list
        item = noted[0] if isinstance(noted, list) and noted else parts.get("feature")
        of_item = _decoder(kind.value_type, item)
        return None if of_item is None else lambda values: values and [*map(of_item, values)]
    if hasattr(kind, "fields") and not hasattr(kind, "key_type"):  # a struct, and no map
        found = {field.name: _decoder(field.type, parts.get(field.name)) for field in kind.fields}
        inside = {name: decoder for name, decoder in found.items() if decoder is not None}
        if inside:
            return lambda value: value and value | {name: decode(value[name]) for name, decode in inside.items()}
    return None


def _value(text: str | None) -> Any:
    return None if text is None else loads(text, MAX_WRITTEN_DEPTH)
