"""Which calls of tools a turn completed that was cut before its end: some of vLLM's parsers close what was cut.

`remove(path="work", only="*.tm...` would become `remove("work", "*")`. A call counts where the parser read its end, where its
arguments stand in the text as whole JSON, or where the parser shows it only once it is whole.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

Calls = list[tuple[str, str]]
"""Name and arguments, as JSON, of each call."""


MOST_PLACES = 16
"""Braces at which arguments are looked for. They are the first object after the name; a model may write braces without end."""


def stands_whole(text: str, name: str, arguments: str) -> bool:
    """Returns whether `arguments` follow the last mention of `name` in `text` as a whole JSON object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return False
    place = text.rfind(name) + len(name) - 1
    for _ in range(MOST_PLACES if name in text else 0):
        place = text.find("{", place + 1)
        if place < 0:
            break
        try:
            found, _ = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        return bool(found == value)
    return False


def complete_calls(text: str, calls: Calls, count: int, parsed: Callable[[int], Calls]) -> Calls:
    """Returns the calls of a cut turn without the last one, unless that is proven to be whole.

    A parser that has begun the next call has read the end of those before. `count` is the number of the turn's tokens;
    `parsed` returns what the parser finds in the first so many of them.
    """
    if not calls:
        return []
    name, arguments = calls[-1]
    if stands_whole(text, name, arguments) or (arguments not in ("", "{}") and _appears_whole(calls, count, parsed)):
        return calls
    return calls[:-1]


def _appears_whole(calls: Calls, count: int, parsed: Callable[[int], Calls]) -> bool:
    """Whether the last call is not there with other arguments before it is there with these."""
    first = bisect_left(range(count), True, key=lambda tokens: parsed(tokens)[: len(calls)] == calls)
    return first > 0 and len(parsed(first - 1)) < len(calls)


class EndedCalls:
    """Makes an engine of vLLM's parsers report the calls whose end it reads, and no others.

    Such an engine closes an open call when the text ends. It tells of each end by an event.
    """

    def __init__(self, engine: Any) -> None:
        from vllm.parser.engine.events import EventType

        self.left_out = False
        """The text ended within a call."""
        ended: set[int] = set()
        feed, build = engine._feed, engine._build_extracted_result

        def feed_noting_ends(text: str, token_ids: Sequence[int]) -> Any:
            ended.clear()
            events = feed(text, token_ids)
            ended.update(event.tool_index for event in events if event.type is EventType.TOOL_CALL_END)
            return events

        def build_of_ended(*deltas: Any) -> Any:
            for index, slot in enumerate(engine._tool_slots):
                if index not in ended and not _is_object(slot.args):
                    self.left_out = True
                    engine._tool_slots[index] = type(slot)()
            return build(*deltas)

        engine._feed, engine._build_extracted_result = feed_noting_ends, build_of_ended


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
