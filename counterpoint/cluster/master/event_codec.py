"""Events as JSON objects, for the journal: the class's name as `kind`, and its fields.

What is read is checked against the class, so that an entry of another version is refused with a name, and not misread.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import orjson

from counterpoint.cluster.manager.events import LONGEST_REASON, Event, WorkerSilent
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown

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
    name = data.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UnknownEvent(f"{shown(name)} is no event; expected one of {', '.join(sorted(KINDS))}")
    names = {one.name for one in fields(kind)}
    if set(data) != {"kind", *names}:
        raise UnknownEvent(f"{kind.__name__} has the fields {sorted(names)}, found {sorted(set(data) - {'kind'})}")
    event: Event = typed(data, kind, kind.__name__, UnknownEvent)
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
