"""Compares the model names that servers list with the one in a run's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from counterpoint.inference.base import InferenceError, ModelNotServed
from counterpoint.inference.clients.client import served_models
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.transport.printable import shortened

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Seconds that a server may take to list its models."""

LONGEST_NAMES = 300
"""Characters of the names of a server's models in a message."""


async def check(model: str, urls: Sequence[str], connections: HttpSessions) -> None:
    """Raises `ModelNotServed` if servers list models, and none of these has `model`.

    Trusts a server that lists none. Logs a server without it beside one that has it.
    """
    lists = zip(urls, await asyncio.gather(*(_models_of(url, connections) for url in urls)), strict=True)
    listing = [(url, names) for url, names in lists if names]
    lacking = [
        f"{url} has no model {model!r}; it has {shortened(', '.join(map(repr, names)), LONGEST_NAMES)}"
        for url, names in listing
        if model not in names
    ]
    if lacking and len(lacking) == len(listing):
        others = f" (nor has any of {len(lacking) - 1} other servers)" if lacking[1:] else ""
        raise ModelNotServed(f"{lacking[0]}{others}")
    for said in lacking:
        logger.warning("%s. Other servers have it; the run's requests fail at this one", said)


async def _models_of(url: str, connections: HttpSessions) -> list[str]:
    """Returns the names of a server's models, or none if it does not list them."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await served_models(connections, url)
    except (InferenceError, TimeoutError) as error:
        logger.debug("%s does not tell its models: %s", url, str(error) or "no answer in time")
        return []
