"""One request to parse a completion: which server is asked, and what happens if it does not answer.

Any server of the pool parses as any other does, whatever weights it holds; the one that generated the completion is asked first.
A parse takes no place of a model call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inference.base import InferenceError, ParsedText, ServerFailure
from inference.clients.client import ServerClient

PARSE_SECONDS = 240.0
"""Deadline of one parse, retries included. A server's first one may wait for its parsers to load."""

ATTEMPTS = 4
PAUSE_SECONDS = 0.5


async def parse(
    clients: Sequence[ServerClient],
    token_ids: list[int],
    tools: Sequence[Any],
    template_kwargs: dict[str, Any],
    *,
    cut: bool,
    first: str | None,
) -> ParsedText:
    """Returns what a completion says. `clients` are those of the servers in service; `first` is the URL asked first.

    `cut`: the model did not end it, and only calls that are whole count.

    Raises `RequestRefused` if the server has no parser or refuses the tools, `InferenceError` if none answers.
    """
    if not clients:
        raise InferenceError("no inference server is in service to parse a completion")
    order = sorted(clients, key=lambda client: client.url != first)
    last: ServerFailure | None = None
    try:
        async with asyncio.timeout(PARSE_SECONDS):
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(PAUSE_SECONDS)
                try:
                    return await order[attempt % len(order)].parse(token_ids, list(tools), template_kwargs, cut=cut)
                except ServerFailure as error:
                    last = error
    except TimeoutError:
        raise InferenceError(f"a completion was not parsed within {PARSE_SECONDS:g} s: {last or 'no answer'}") from None
    raise InferenceError(f"a completion was not parsed after {ATTEMPTS} attempts; the last: {last}") from last
