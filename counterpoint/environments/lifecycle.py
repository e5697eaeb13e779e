"""The optional methods of an environment: `start` and `close`, for one that holds resources, and `take_metrics`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from counterpoint.environments.base import Environment, EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.describe_error import describe_error, place_in
from counterpoint.transport.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

START_SECONDS = 300.0
CLOSE_SECONDS = 30.0


def check_chat(name: str, environment: Environment, chat: Chat) -> None:
    """Raises `ValueError`, naming the environment, if no rollout of it could be played with the model's chat template."""
    try:
        chat.check(calls=bool(getattr(environment, "needs_tool_parser", False)))
    except ValueError as error:
        raise ValueError(f"environment {name!r}: {error}") from error


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
                async with asyncio.timeout(START_SECONDS) as deadline:
                    await start(context)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an operator's class may fail in any way
                late = f"it took more than {START_SECONDS:g} s (in {place_in(error.__cause__ or error)})"
                what = late if deadline.expired() else describe_error(error)
                raise ValueError(f"environment {context.name!r}: its start failed: {what}") from error
        yield
    finally:
        if close is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - likewise
                logger.warning("environment %r was not closed in order: %r", context.name, error)


def metrics_of(environments: Iterable[Environment]) -> dict[str, float]:
    """Returns what the environments that have processes of their own say of these since the last call, by metric.

    An operator's class may have a method of that name, too. One that raises has no metrics, and only finite numbers are taken.
    """
    metrics: dict[str, float] = {}
    for environment in environments:
        take = getattr(environment, "take_metrics", None)
        try:
            if callable(take) and isinstance(taken := take(), Mapping):
                metrics |= {name: value for name, value in taken.items() if isinstance(name, str) and _is_number(value)}
        except BaseException as error:  # noqa: BLE001 - likewise
            _log.note(logging.WARNING, f"{type(environment).__name__}.take_metrics failed: {describe_error(error)}")
    return metrics


def _is_number(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)
