"""Whether a server is there: health checks while it loads weights, and a request for one token after others were not answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from counterpoint.inference.base import (
    GenerateRequest,
    InferenceError,
    RequestRefused,
    SamplingParameters,
    ServerFailure,
    ServerUnreachable,
)
from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.pool.deadlines import end

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""How long a server may leave health checks unanswered while it loads or proves weights, or the request for one token."""

LONGEST_PAUSE_SECONDS = 5.0
"""Between two of these checks."""

_ROUNDING = 1e-6

ONE_TOKEN = SamplingParameters(max_tokens=1)


@asynccontextmanager
async def watched(
    client: ServerClient, interval: float, loading: asyncio.Timeout, on_lost: Callable[[str], None]
) -> AsyncIterator[None]:
    """Checks a server's health during the block, at most every `interval` seconds.

    If it answers none for `SILENT_SECONDS`, `on_lost` gets the reason and `loading` expires.
    """
    watch = asyncio.create_task(_watch(client, interval, loading, on_lost), name=f"watch of {client.url}")
    try:
        yield
    finally:
        watch.cancel()


async def _watch(
    client: ServerClient, interval: float, loading: asyncio.Timeout, on_lost: Callable[[str], None]
) -> None:
    pause = min(interval, LONGEST_PAUSE_SECONDS, SILENT_SECONDS / 4)
    silent = 0.0  # no longer than was planned to be waited: this process may have been stopped meanwhile
    while True:
        await asyncio.sleep(pause)
        silent += pause
        patience = max(0.0, min(SILENT_SECONDS - silent, SILENT_SECONDS / 3))
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                await client.identify()
            silent = 0.0
        except (InferenceError, TimeoutError) as error:
            silent += min(time.monotonic() - began, patience)
            if silent >= SILENT_SECONDS - _ROUNDING:
                last = f" (the last: {error})" if str(error) else ""
                on_lost(f"no health check was answered for {SILENT_SECONDS:g} s{last}")
                end(loading)
                return


async def ask_for_a_token(client: ServerClient, model: str) -> None:
    """Returns once the server has generated a token. Raises as `ServerClient`; `ServerUnreachable` if it does not answer."""
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
    """Does as `ask_for_a_token`, but a server that computes tokens for others meanwhile may leave the request waiting."""
    before = await observe()
    try:
        await ask_for_a_token(client, model)
    except ServerUnreachable:
        now = await observe()
        if before is None or now is None or now.tokens == before.tokens:
            raise


async def ask_for_an_answer(client: ServerClient, model: str) -> None:
    """Returns once the server has answered a request for one token, in whatever way. Else raises `ServerUnreachable`."""
    try:
        await ask_for_a_token(client, model)
    except ServerUnreachable:
        raise
    except (RequestRefused, ServerFailure) as error:  # as of a model that it has not loaded yet
        logger.debug("Inference server %s answers a request: %s", client.url, error)
