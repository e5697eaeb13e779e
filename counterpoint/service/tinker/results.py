"""The results of all owners, and work beside others that makes some of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from counterpoint.inference.base import InferenceError
from counterpoint.service.config import ServiceConfig
from counterpoint.service.runs import RunLost
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.futures import FutureResult, Futures, failure
from counterpoint.service.tinker.refusals import BadRequest, Gone, NoSuchThing

logger = logging.getLogger(__name__)


class FutureResults:
    """The results by owner, and the work that makes those of no model."""

    def __init__(self, config: ServiceConfig, tasks: Tasks, on_ended: Callable[[str, str], None]) -> None:
        """Works in `tasks`, within the bounds of `config`.

        Calls `on_ended` with owner and id of each request that waits no more.
        """
        self._config = config
        self._tasks = tasks
        self._on_ended = on_ended
        self._futures: dict[str, Futures] = {}

    def close(self) -> None:
        """Removes the results on the disk."""
        for futures in self._futures.values():
            futures.close()

    @property
    def pending(self) -> int:
        """The number of requests without a result, of all owners."""
        return sum(futures.pending for futures in self._futures.values())

    @property
    def oldest(self) -> tuple[float, str] | None:
        """When the oldest of these began, in seconds since 1970, and its id."""
        return min((each.oldest for each in self._futures.values() if each.oldest is not None), default=None)

    def of(self, owner: str) -> Futures:
        """Returns the results of an owner."""
        if owner not in self._futures:
            ended = partial(self._on_ended, owner)
            self._futures[owner] = Futures(self._config.max_pending, self._config.result_bytes, ended)
        return self._futures[owner]

    def begin(
        self, request_id: str, owner: str, work: Callable[[], Awaitable[FutureResult]]
    ) -> asyncio.Task[None] | None:
        """Begins work for the result of an id, or returns None if it began before. Raises `TooMany`."""
        if self.of(owner).begin(request_id):
            return self._tasks.spawn(self._complete(request_id, owner, work))
        return None

    async def _complete(self, request_id: str, owner: str, work: Callable[[], Awaitable[FutureResult]]) -> None:
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - it is logged there
            result = _failed(request_id, error)
        except asyncio.CancelledError:
            if not self._tasks.are_ending:  # else the service does it again after its start
                await self.of(owner).complete(request_id, failure("it was ended before it had a result", "server"))
            raise
        await self.of(owner).complete(request_id, result)


def _failed(request_id: str, error: Exception) -> FutureResult:
    """Returns the result of a request without one. Logs a fault of the service."""
    first: Exception = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, BadRequest | NoSuchThing | Gone):
        return failure(str(first))
    if not isinstance(first, RunLost | InferenceError | OSError | ValueError):
        logger.error("request %s has no result", request_id, exc_info=first)  # those beside it were only cancelled
        return failure(f"the service failed: {type(first).__name__}: {first}", "server")
    return failure(str(first), "server")
