"""Whether a server is there: how long it leaves health checks unanswered, and a request for one token after failed requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np

from counterpoint.inference.base import (
    GenerateRequest,
    RequestRefused,
    SamplingParameters,
    ServerFailure,
    ServerUnreachable,
)
from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.client import ServerClient

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""Seconds that a server may leave health checks unanswered while it loads or proves weights, or the request for one token."""

LONGEST_PAUSE_SECONDS = 5.0
"""The longest time between two health checks of a server that loads or proves weights."""

_ROUNDING = 1e-6

ONE_TOKEN = SamplingParameters(max_tokens=1)


class Silence:
    """How long a server has answered no health check, without times when nobody asked: this process may have been stopped."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def patience(self) -> float:
        """Seconds to wait for the next answer while the server loads."""
        return max(0.0, min(SILENT_SECONDS - self._seconds, SILENT_SECONDS / 3))

    def ends(self) -> None:
        """Notes an answer."""
        self._seconds = 0.0

    def goes_on(self, seconds: float) -> None:
        """Adds `seconds` of waiting, no more than were planned."""
        self._seconds += seconds

    def described(self, last: str) -> str:
        """Returns the last error as a sentence, if the silence is too long even for a server that loads, else an empty text."""
        if self._seconds < SILENT_SECONDS - _ROUNDING:
            return ""
        return f"no health check was answered for {SILENT_SECONDS:g} s" + (f" (the last: {last})" if last else "")


async def ask_for_a_token(client: ServerClient, model: str) -> None:
    """Returns once the server has generated a token. Raises as `ServerClient`, and `ServerUnreachable` without an answer."""
    request = GenerateRequest(model, np.zeros(1, dtype=np.int32), ONE_TOKEN, 0)
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            completion = await client.generate(request)
    except TimeoutError:
        raise ServerUnreachable(
            f"{client.url} answers health checks, and did not answer a request for one token within {SILENT_SECONDS:g} s"
        ) from None
    completion.check(request)


async def ask_for_a_sign(
    client: ServerClient, model: str, observe: Callable[[], Awaitable[Observation | None]]
) -> None:
    """Does as `ask_for_a_token`, but lets the request wait while the server computes tokens for others."""
    before = await observe()
    try:
        await ask_for_a_token(client, model)
    except ServerUnreachable:
        now = await observe()
        if before is None or now is None or now.tokens == before.tokens:
            raise


async def ask_for_an_answer(client: ServerClient, model: str) -> None:
    """Returns once the server has answered a request for one token with any result. Else raises `ServerUnreachable`."""
    try:
        await ask_for_a_token(client, model)
    except ServerUnreachable:
        raise
    except (RequestRefused, ServerFailure) as error:  # as of a model that it has not loaded yet
        logger.debug("Inference server %s answers a request: %s", client.url, error)
