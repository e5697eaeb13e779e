"""Values of Python as JSON and back: only plain data, exactly typed. Runs inside the sandbox, beside hostile code.

What a program returns crosses into the process of the tests as data, so that no object of it, such as one that equals everything,
comes along. What is no plain data becomes `Opaque`, which equals nothing.
"""

from typing import Any

_DEEPEST = 60
_EXACT_INTEGERS = 2**53


class Opaque:
    """Stands for a value that is no plain data."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def encode(value: Any, depth: int = 0) -> Any:
    """Returns the value for JSON."""
    if isinstance(value, Opaque):
        return {"o": Opaque.__name__}
    if depth > _DEEPEST:
        return {"o": "something deeper"}
    if value is None or isinstance(value, bool):
        return value if value is None else bool(value)
    if isinstance(value, str):
        return str(value).encode(errors="replace").decode()
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < _EXACT_INTEGERS else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    for name, kind in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {name: [encode(item, depth + 1) for item in value]}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    return {"o": type(value).__name__[:60]}


def decode(data: Any) -> Any:
    """Returns the value. Data that `encode` would not have written is `Opaque`."""
    try:
        return _decode(data)
    except (TypeError, ValueError, KeyError, RecursionError, OverflowError):
        return Opaque("damaged")


def _decode(data: Any) -> Any:
    if data is None or type(data) in (bool, int, str):
        return data
    if type(data) is list:
        return [_decode(item) for item in data]
    if type(data) is not dict:
        raise TypeError
    ((name, content),) = data.items()
    match name:
        case "i":
            return int(content, 16)
        case "f":
            return float.fromhex(content)
        case "c":
            return complex(*map(float.fromhex, content))
        case "b":
            return bytes.fromhex(content)
        case "d":
            return {_decode(key): _decode(item) for key, item in content}
        case "t":
            return tuple(map(_decode, content))
        case "s":
            return set(map(_decode, content))
        case "z":
            return frozenset(map(_decode, content))
    return Opaque(str(content)[:60])
