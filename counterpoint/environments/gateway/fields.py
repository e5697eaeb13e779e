"""Reads fields of requests that become chat requests (`responses_request`, `anthropic_request`); a refusal names its field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import is_one_of
from counterpoint.environments.gateway.messages import MOST_MESSAGES
from counterpoint.environments.messages import shown


def check_names(
    fields: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    advice: Mapping[str, str],
) -> None:
    """Raises `GatewayRefused` for a field that is not `known`. A `neutral` one may be null, or ask for nothing in its way."""
    for name, value in fields.items():
        if name in neutral:
            if value is not None and not is_one_of(value, neutral[name]):
                refuse(name, value, advice.get(name, "it is not served; leave it out"))
        elif name not in known:
            refuse(name[:64], value, "this field is not served; leave it out")


def list_of(name: str, value: object, expected: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the objects of a list of at least one, each with its place. Raises `GatewayRefused`."""
    if not isinstance(value, list) or not value:
        refuse(name, value, expected)
    if len(value) > MOST_MESSAGES:
        raise GatewayRefused(f"{len(value)} entries; at most {MOST_MESSAGES} are taken", parameter=name)
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            refuse(f"{name}[{index}]", each, "expected an object")
    return [(f"{name}[{index}]", each) for index, each in enumerate(value)]


def text_of(where: str, value: object, kinds: Collection[str]) -> str:
    """Returns the text of a content.

    Parts of these types are joined by a line break, as in a chat request. Raises `GatewayRefused`.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(where, value, "expected text, or a list of parts of text")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(kind, str) or kind not in kinds or not isinstance(part.get("text"), str):
            refuse(f"{where}[{index}]", kind, f"only parts of type {', '.join(kinds)} are taken")
    return "\n".join(part["text"] for part in value)


def table_of(name: str, value: object, known: Collection[str]) -> dict[str, Any]:
    """Returns an object with no other keys than these; an empty one for null. Raises `GatewayRefused`."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not value.keys() <= set(known):
        refuse(name, value, f"expected an object with {', '.join(sorted(known))}")
    return value


def count_of(name: str, value: object) -> int | None:
    """Returns a whole number of at least 1, or None for null. Raises `GatewayRefused`."""
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= 2**31:
        refuse(name, value, "expected a whole number of at least 1")
    return value


@contextmanager
def named_as(places: Mapping[str, str], words: Mapping[str, str]) -> Iterator[None]:
    """Gives a refusal of the chat request, within the block, the names of the request that it was made of.

    `places` has the places of that request by those of the chat request, of which the longest counts; `words`, parts of what
    follows a place.
    """
    try:
        yield
    except GatewayRefused as refusal:
        name = refusal.parameter or ""
        found = [each for each in places if name == each or name.startswith((f"{each}.", f"{each}["))]
        place = max(found, key=len, default="")
        rest = name[len(place) :]
        for chat, own in words.items():
            rest = rest.replace(chat, own)
        theirs = places.get(place, "") + rest
        if name and refusal.message.startswith(name):
            refusal.message = theirs + refusal.message.removeprefix(name)
        refusal.message = refusal.message.replace(f"`{name}`", f"`{theirs}`")
        refusal.parameter = theirs or None
        raise


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raises `GatewayRefused` for the value of a field."""
    raise GatewayRefused(f"{name} is {shown(value)}; {expected}", parameter=name)
