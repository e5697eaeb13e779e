"""Answers to reading requests: computed in threads, once for all viewers, and kept as bytes for a moment.

A hundred viewers that ask the same cost one computation each `fresh_seconds`: those that ask meanwhile wait for it, or get its
bytes. A computation that hangs, as on a dead network disk, holds one thread; those that wait for it get an error in time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from counterpoint.job.admin.ask import NotAnswered, NotThere
from counterpoint.job.admin.ask import Refused as RefusedByJob
from counterpoint.serve.audit import ApiCaller, AuditLog
from counterpoint.serve.endpoint import Endpoint
from counterpoint.serve.errors import (
    ApiError,
    BadParameter,
    ChangeForbidden,
    NotFound,
    Overdue,
    Overloaded,
    StorageFull,
    Unexpected,
    is_full,
)
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.errors import Obstructed, UserError

logger = logging.getLogger(__name__)

THREADS = {"read": 4, "records": 4, "checks": 1, "change": 16, "urgent": 16}
"""Apart, so that a disk that hangs under readers keeps nobody from a change, lists of rollouts and searches keep nobody from the
other views, and changes of other kinds keep nobody from pausing or ending a run. Most changes wait for a run's answer."""

MOST_WAITING = dict.fromkeys(THREADS, 64) | {"checks": 0}
"""Computations that may wait for a thread; further ones are refused at once. A check takes a core for many seconds."""

MOST_ANSWERS = 512
MOST_BYTES = 64 * 2**20
"""The size of all answers that are kept."""

MOST_BYTES_EACH = 16 * 2**20
"""The size of one answer."""

COMPRESSED_FROM = 1024
"""Least size of an answer that is compressed, in bytes."""


@dataclass(frozen=True, slots=True)
class AnswerBytes:
    """An answer's bytes."""

    body: bytes
    compressed: bytes | None
    """The same by gzip; None for a short one."""
    tag: str
    """The value of `ETag`: weak, since both forms have it."""


@dataclass(slots=True)
class _Kept:
    task: asyncio.Task[AnswerBytes | ApiError]
    ended: float = 0.0


class KeptAnswers:
    """Computes and keeps answers. Belongs to one event loop; `close` it."""

    def __init__(self, jobs: Jobs, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        """`audit` records the changes. Their threads start here, with the niceness of the caller, since a guest inherits it."""
        self._jobs, self._audit, self._clock = jobs, audit, clock
        self._threads = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"serve-{name}") for name, count in THREADS.items()
        }
        for name in ("change", "urgent"):
            _start_all(self._threads[name], THREADS[name])
        self._waiting = dict.fromkeys(THREADS, 0)
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    async def read(self, endpoint: Endpoint[Any, Any], parameters: Config) -> AnswerBytes:
        """Returns the answer, perhaps one that was computed a moment ago. Raises `ApiError`."""
        key = (endpoint.operation, parameters.model_dump_json())
        kept = self._kept.get(key)
        if kept is None or (kept.task.done() and self._clock() - kept.ended >= endpoint.fresh_seconds):
            self._kept.pop(key, None)
            task = asyncio.create_task(self._compute(endpoint, _answer, endpoint, self._jobs, parameters))
            kept = self._kept[key] = _Kept(task)
            task.add_done_callback(lambda _: self._on_end(kept))
        return await self._within(endpoint, kept.task)

    async def change(self, endpoint: Endpoint[Any, Any], parameters: Config, caller: ApiCaller) -> AnswerBytes:
        """Carries a change out and returns its answer. Then every kept answer is out of date. Raises `ApiError`."""
        arguments = (endpoint, self._jobs, parameters, self._audit, caller)
        task = asyncio.create_task(self._compute(endpoint, _carry_out, *arguments))
        try:
            return await self._within(endpoint, task)
        finally:
            self._kept.clear()

    def close(self) -> bool:
        """Lets no further computation begin. Returns whether all have ended; one that hangs is left behind."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        return not any(self._waiting.values())

    async def _within(self, endpoint: Endpoint[Any, Any], task: asyncio.Task[AnswerBytes | ApiError]) -> AnswerBytes:
        await asyncio.wait({task}, timeout=endpoint.seconds)
        if not task.done():
            raise Overdue(endpoint.operation, endpoint.seconds)
        outcome = task.result()
        if isinstance(outcome, ApiError):
            raise outcome.with_traceback(None)
        return outcome

    async def _compute(
        self, endpoint: Endpoint[Any, Any], function: Callable[..., AnswerBytes | ApiError], *arguments: Any
    ) -> AnswerBytes | ApiError:
        """Calls a function in a thread. Returns errors, so that one that nobody waits for any more is no unseen exception."""
        threads = endpoint.threads
        if self._waiting[threads] >= THREADS[threads] + MOST_WAITING[threads]:
            return Overloaded()
        self._waiting[threads] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[threads], function, *arguments)
        finally:
            self._waiting[threads] -= 1

    def _on_end(self, kept: _Kept) -> None:
        kept.ended = self._clock()
        while self._kept and (len(self._kept) > MOST_ANSWERS or self._bytes() > MOST_BYTES):
            self._kept.popitem(last=False)

    def _bytes(self) -> int:
        done = [kept.task.result() for kept in self._kept.values() if kept.task.done() and not kept.task.cancelled()]
        return sum(len(one.body) + len(one.compressed or b"") for one in done if isinstance(one, AnswerBytes))


def _start_all(threads: ThreadPoolExecutor, count: int) -> None:
    together = threading.Barrier(count + 1)
    for _ in range(count):
        threads.submit(together.wait)
    together.wait()


def _answer(endpoint: Endpoint[Any, Any], jobs: Jobs, parameters: Config) -> AnswerBytes | ApiError:
    """Runs in a thread."""
    try:
        body = endpoint.answer(jobs, parameters).model_dump_json().encode()
        if len(body) > MOST_BYTES_EACH:
            raise BadParameter(f"the answer would have {len(body)} bytes", expected=f"at most {MOST_BYTES_EACH}")
        compressed = zlib.compress(body, 1, wbits=31) if len(body) >= COMPRESSED_FROM else None
        return AnswerBytes(body, compressed, f'W/"{hashlib.sha256(body).hexdigest()[:32]}"')
    except ApiError as error:
        return error.with_traceback(None)
    except NotThere as error:
        return NotFound(str(error))
    except (Obstructed, RefusedByJob, NotAnswered) as error:
        return ChangeForbidden(str(error))
    except UserError as error:
        return BadParameter(str(error))
    except OSError as error:
        if is_full(error):
            return StorageFull(str(error))
        logger.exception("%s failed", endpoint.operation)
        return Unexpected()
    except Exception:
        logger.exception("%s failed", endpoint.operation)
        return Unexpected()


def _carry_out(
    endpoint: Endpoint[Any, Any], jobs: Jobs, parameters: Config, audit: AuditLog, caller: ApiCaller
) -> AnswerBytes | ApiError:
    """Runs in a thread: a change begins only once the audit log has it."""
    try:
        number = audit.begin(caller, endpoint.operation, parameters.model_dump(mode="json"))
    except ApiError as error:
        return error.with_traceback(None)
    outcome = _answer(endpoint, jobs, parameters)
    if isinstance(outcome, ApiError):
        audit.end(number, outcome.status, outcome.problem.what)
    else:
        audit.end(number, 200, "done")
    return outcome
