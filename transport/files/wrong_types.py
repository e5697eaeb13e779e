"""Says what is wrong with a file of our own that is valid JSON, but not of the types that its reader expects."""

from __future__ import annotations

from pydantic import ValidationError

_OBJECT, _LIST = "expected an object", "expected a list"

_OF_JSON = {
    "dataclass_type": _OBJECT,
    "model_type": _OBJECT,
    "dict_type": _OBJECT,
    "list_type": _LIST,
    "tuple_type": _LIST,
}
"""What pydantic names by a type of Python."""


def first_wrong(error: ValidationError) -> str:
    """Returns the first wrong key, what was expected, and what was found: `runs[0].steps: expected a valid integer, found []`."""
    first = error.errors(include_url=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "value_error":  # of a check of the whole file
        return first["msg"].removeprefix("Value error, ")
    expected = _OF_JSON.get(first["type"]) or first["msg"].replace("Input should be", "expected")
    return f"{key}: {expected}, found {first['input']!r:.80}"
