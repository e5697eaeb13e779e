"""Events as JSON objects, for the journal: the class's name as `kind`, and its fields.

What is read is checked against the class, so that an entry of another version is refused with a name, and not misread.
"""

from __future__ import annotations

import logging
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import orjson

from counterpoint.cluster.manager import events as vocabulary
from counterpoint.cluster.manager.events import LONGEST_REASON, Event, WorkerSilent

logger = logging.getLogger(__name__)

KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Event)}

MAX_EVENT_BYTES = 64 * 2**10
"""The size of one event as JSON."""

CUT = " ... (cut)"


class UnknownEvent(ValueError):
    """An object that is no event of this version."""


def encode(event: Event) -> dict[str, Any]:
    """Returns the event as a JSON object."""
    return {"kind": type(event).__name__} | {one.name: getattr(event, one.name) for one in fields(event)}


def decode(data: Mapping[str, Any]) -> Event:
    """Reads what `encode` returned. Raises `UnknownEvent`, naming the kind and the field."""
    kind = KINDS.get(data.get("kind", ""))
    if kind is None:
        raise UnknownEvent(f"{data.get('kind')!r} is no event; expected one of {', '.join(sorted(KINDS))}")
    expected = _types(kind)
    if set(data) != {"kind", *expected}:
        raise UnknownEvent(f"{kind.__name__} has the fields {sorted(expected)}, found {sorted(set(data) - {'kind'})}")
    values = {}
    for name, allowed in expected.items():
        value = tuple(data[name]) if isinstance(data[name], list) else data[name]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise UnknownEvent(
                f"{kind.__name__}.{name} is {value!r:.80}; expected {' or '.join(t.__name__ for t in allowed)}"
            )
        values[name] = value
    event: Event = kind(**values)
    return event


def fitting(event: Event) -> Event:
    """Returns the event as it can be journalled: with a reason that is not too long, and is text.

    One that is too large all the same, or would not come back as it is, is replaced by the failure of its cause: the worker that
    it is about, or from, counts as silent and is created again. Raises `ValueError` if it is of no worker.
    """
    reason = getattr(event, "reason", "")
    if isinstance(reason, str) and (len(reason) > LONGEST_REASON or not reason.isascii()):
        text = reason.encode(errors="replace").decode()
        mended: Any = {"reason": text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - len(CUT)] + CUT}
        event = replace(event, **mended)
    if not (wrong := _misfit(event)):
        return event
    worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
    if worker is None or incarnation is None:
        raise ValueError(wrong)
    silent = WorkerSilent(worker, incarnation, 0.0, event.at)
    if _misfit(silent):
        raise ValueError(wrong)
    logger.error("%s counts as silent: %s", worker, wrong)
    return silent


def _misfit(event: Event) -> str:
    """Returns why an event cannot be journalled; empty if it can: an entry that cannot be read back would end the job."""
    name = type(event).__name__
    try:
        data = orjson.dumps(encode(event))
        if len(data) > MAX_EVENT_BYTES:
            return f"{name} has {len(data)} bytes as JSON; an event may have {MAX_EVENT_BYTES}"
        decode(orjson.loads(data))
    except (TypeError, UnknownEvent) as error:  # TypeError: JSON has no such value
        return f"{name} cannot be journalled: {error}"
    return ""


@cache
def _types(kind: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(kind, vars(vocabulary))
    return {one.name: _allowed(hints[one.name]) for one in fields(kind)}


def _allowed(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(allowed for one in typing.get_args(hint) for allowed in _allowed(one))
    plain: type = typing.get_origin(hint) or hint
    return (int, float) if plain is float else (plain,)
