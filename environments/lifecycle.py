"""The optional methods of an environment: `start` and `close`, for one that holds resources, and `take_metrics`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from environments.base import Environment, EnvironmentContext

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
CLOSE_SECONDS = 30.0


@asynccontextmanager
async def started(environment: Environment, context: EnvironmentContext) -> AsyncIterator[None]:
    """Starts the environment for the duration of the block, and closes it.

    Raises `ValueError`, naming the environment, if it does not start within `START_SECONDS`, or raises. A failure to close is
    logged only: the environment's work is done.
    """
    start, close = getattr(environment, "start", None), getattr(environment, "close", None)
    try:
        if start is not None:
            try:
                async with asyncio.timeout(START_SECONDS):
                    await start(context)
            except (Exception, SystemExit) as error:  # an operator's class may fail in any way
                what = f"took more than {START_SECONDS:g} s" if isinstance(error, TimeoutError) else repr(error)
                raise ValueError(f"environment {context.name!r}: its start failed: {what}") from error
        yield
    finally:
        if close is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise
                logger.warning("environment %r was not closed in order: %r", context.name, error)


def metrics_of(environments: Iterable[Environment]) -> dict[str, float]:
    """Returns what the environments that have processes of their own say of these since the last call, by metric."""
    metrics: dict[str, float] = {}
    for environment in environments:
        take = getattr(environment, "take_metrics", None)
        if isinstance(taken := take() if take is not None else None, Mapping):
            metrics |= taken
    return metrics
