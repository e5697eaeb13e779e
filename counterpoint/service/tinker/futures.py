"""The results that clients fetch, bounded in number and in memory. Beyond these bounds they go to the disk, or are refused.

A result stays until it was fetched and many others were: a client that lost the answer asks again.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from counterpoint.transport.files.atomic import write_atomically

logger = logging.getLogger(__name__)

KEPT_FETCHED = 1024
"""Fetched results of one client's key that stay all the same."""

MOST_RESULTS = 65_536
"""Results of one key that stay at most, fetched or not. The oldest is dropped first."""

MOST_CLIENTS = 4096
"""Clients of one key's samplers that may poll for any of their results. The least recent one is dropped first."""

SPILLED_SHARE = 16
"""Bytes of results on the disk at most, for each byte that may be in memory. The oldest are dropped first."""

FULL_SECONDS = 5.0
"""While the disk takes no results and memory has no room, one further request is accepted in this many seconds, which tries the
disk again."""


@dataclass(frozen=True, slots=True)
class FutureResult:
    """The result that a client gets."""

    body: bytes
    is_protobuf: bool = False


@dataclass(frozen=True, slots=True)
class _Spilled:
    path: Path
    size: int


def failure(message: str, category: str = "user") -> FutureResult:
    """Returns the result of a request that failed, by `user` or `server`."""
    return FutureResult(orjson.dumps({"error": message, "category": category}))


def answer(**values: object) -> FutureResult:
    """Returns a result in JSON."""
    return FutureResult(orjson.dumps(values))


@dataclass(slots=True)
class _Log:
    """The answered requests of one sampler's client, in the order of their results."""

    newest: int
    """The number of the last result."""
    completed: dict[int, str] = field(default_factory=dict)
    """Requests by their numbers, without those that the client has seen."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class TooMany(RuntimeError):
    """Too many requests lack a result."""


class Futures:
    """The results by the ids of requests, for one client's key: no key pushes out another's."""

    def __init__(self, most_pending: int, memory_bytes: int, on_ended: Callable[[str], None] = lambda _: None) -> None:
        """Refuses more than `most_pending` requests without a result, and keeps at most `memory_bytes` of results in memory.

        Calls `on_ended` with each request that waits no more.
        """
        self._most_pending = most_pending
        self._on_ended = on_ended
        self._memory_bytes = memory_bytes
        self._pending: dict[str, asyncio.Event] = {}
        self._since: dict[str, float] = {}
        """When each of these began, in seconds since 1970, the oldest first."""
        self._held: OrderedDict[str, FutureResult] = OrderedDict()
        """Results in memory, the oldest first."""
        self._spilled: OrderedDict[str, _Spilled] = OrderedDict()
        """Results on the disk, which are older."""
        self._spilling = asyncio.Lock()
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self.bytes_held = 0
        """Bytes of the results in memory."""
        self.bytes_spilled = 0
        """Bytes of the results on the disk."""
        self._is_full = False
        """Whether the disk took no result the last time."""
        self._refused_until = 0.0
        self._logs: OrderedDict[tuple[str, int], _Log] = OrderedDict()
        self._first = time.time_ns() // 1000
        """The number before the first of a log. After a new start it is another one, which reveals clients of the former
        process."""
        self._directory = tempfile.TemporaryDirectory(prefix="counterpoint-results-")
        self._files = 0

    def close(self) -> None:
        """Removes the results on the disk."""
        self._directory.cleanup()

    @property
    def pending(self) -> int:
        """The number of requests without a result."""
        return len(self._pending)

    @property
    def oldest(self) -> tuple[float, str] | None:
        """When the oldest request without a result began, in seconds since 1970, and its id."""
        return next(((since, request_id) for request_id, since in self._since.items()), None)

    def begin(self, request_id: str, *, is_due: bool = False) -> bool:
        """Notes a request. Returns False if it is known already.

        Raises `TooMany`, but not for one that `is_due`: it was accepted before, or others wait for it.
        """
        if self.knows(request_id):
            return False
        if len(self._pending) >= self._most_pending and not is_due:
            raise TooMany(f"{len(self._pending)} requests have no result yet")
        if self._is_full and self.bytes_held > self._memory_bytes and not is_due:
            if time.monotonic() < self._refused_until:
                raise TooMany(f"results of {self.bytes_held} bytes are in memory, and the disk takes none: fetch them")
            self._refused_until = time.monotonic() + FULL_SECONDS
        self._pending[request_id] = asyncio.Event()
        self._since[request_id] = time.time()
        return True

    def waits_for(self, request_id: str) -> bool:
        """Whether a request has no result yet."""
        return request_id in self._pending

    def knows(self, request_id: str) -> bool:
        """Whether a request is pending, or has a result."""
        return request_id in self._pending or self._found(request_id) is not None

    def _found(self, request_id: str) -> FutureResult | _Spilled | None:
        return self._held.get(request_id) or self._spilled.get(request_id)

    def forget(self, prefix: str) -> None:
        """Drops the results of requests with this prefix of their ids, such as those of a session that has ended."""
        for request_id in [each for each in (*self._spilled, *self._held) if each.startswith(prefix)]:
            self._drop(request_id)
        for client in [each for each in self._logs if each[0].startswith(prefix)]:
            del self._logs[client]

    def cancel(self, request_id: str) -> None:
        """Forgets a request without a result."""
        self._since.pop(request_id, None)
        if (event := self._pending.pop(request_id, None)) is not None:
            event.set()
            self._on_ended(request_id)

    def cancel_all(self, model_id: str) -> None:
        """Forgets the numbered requests of a model without a result."""
        for request_id in list(self._pending):
            named, _, last = request_id.rpartition(":")
            if named == model_id and last.isdecimal():
                self.cancel(request_id)

    async def complete(self, request_id: str, result: FutureResult) -> None:
        """Notes the result of a request. Older results go to the disk if memory is short.

        If the disk takes none, they stay, fetched ones make room, and no new requests are accepted.
        """
        is_first = self._found(request_id) is None
        self._drop(request_id)  # a model that was opened again makes its results anew, and who cancels gets another one
        self._held[request_id] = result
        self.bytes_held += len(result.body)
        if is_first and self._logs and (log := self._logs.get(_client_of(request_id))) is not None:
            _note(log, request_id)
        self.cancel(request_id)
        while len(self._held) + len(self._spilled) > MOST_RESULTS:
            self._drop(next(iter(self._spilled or self._held)))
        await self._make_room()

    async def _make_room(self) -> None:
        try:
            async with self._spilling:
                await self._spill()
        except OSError as error:
            for request_id in list(self._fetched):
                if self.bytes_held > self._memory_bytes and request_id in self._held:
                    self._drop(request_id)
            if not self._is_full:
                logger.error("results cannot be kept on the disk; %d bytes stay in memory: %s", self.bytes_held, error)
            self._is_full = True
        else:
            self._is_full = False

    async def _spill(self) -> None:
        while self.bytes_held > self._memory_bytes:
            request_id, result = next(iter(self._held.items()))
            self._files += 1
            path = Path(self._directory.name, f"{self._files}.{'pb' if result.is_protobuf else 'json'}")
            await asyncio.to_thread(_write, path, result.body)
            if self._held.get(request_id) is result:
                self._spilled[request_id] = _Spilled(path, len(result.body))
                del self._held[request_id]
                self.bytes_held -= len(result.body)
                self.bytes_spilled += len(result.body)
            else:
                await asyncio.to_thread(path.unlink)
        while self.bytes_spilled > self._memory_bytes * SPILLED_SHARE:
            self._drop(next(iter(self._spilled)))

    async def fetch(self, request_id: str, seconds: float) -> FutureResult | None:
        """Returns the result of a request, or None if there is none after `seconds`. Raises `KeyError` if it is unknown."""
        if (event := self._pending.get(request_id)) is not None:
            try:
                async with asyncio.timeout(seconds):
                    await event.wait()
            except TimeoutError:
                return None
            if self._found(request_id) is None:
                return None  # its model was closed meanwhile, which the next poll opens again
        if (found := self._found(request_id)) is None:
            raise KeyError(request_id)
        if isinstance(found, _Spilled):
            try:
                found = FutureResult(await asyncio.to_thread(found.path.read_bytes), found.path.suffix == ".pb")
            except FileNotFoundError:
                raise KeyError(request_id) from None  # it was dropped meanwhile
        self._fetched[request_id] = None
        self._fetched.move_to_end(request_id)
        while len(self._fetched) > KEPT_FETCHED:
            self._drop(self._fetched.popitem(last=False)[0])
        if self._is_full:
            await self._make_room()
        return found

    async def completions(
        self, client: tuple[str, int], after: int, seconds: float
    ) -> tuple[list[tuple[str, int | None]], int]:
        """Returns which requests of a sampler's client got a result since `after`, and the number for the next call.

        A client is a sampler's id and a number. Each request comes with the bytes of its result, None for a failure. Returns
        after `seconds` if there is none, and at once if `after` is 0. Raises `KeyError` if `after` is of another process: its
        results are lost.
        """
        if (log := self._logs.get(client)) is None:
            log = self._logs[client] = _Log(self._first)
            for request_id in (*self._spilled, *self._held):
                if _client_of(request_id) == client:
                    _note(log, request_id)
        self._logs.move_to_end(client)
        while len(self._logs) > MOST_CLIENTS:
            self._logs.popitem(last=False)
        if after and not self._first <= after <= log.newest:
            raise KeyError(f"{client[0]}: {after}")
        for number in [each for each in log.completed if each <= after]:
            del log.completed[number]
        if after and not log.completed and seconds > 0:
            log.changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await log.changed.wait()
            except TimeoutError:
                pass
        found = [(each, self._size_of(each)) for each in log.completed.values()]
        return found, log.newest

    def retrieved(self, client: tuple[str, int], request_ids: Iterable[str]) -> None:
        """Drops results that a sampler's client has."""
        for request_id in request_ids:
            if _client_of(request_id) == client:
                self._drop(request_id)

    def _size_of(self, request_id: str) -> int | None:
        found = self._found(request_id)
        if isinstance(found, _Spilled):
            return found.size
        return len(found.body) if found is not None and found.is_protobuf else None

    def _drop(self, request_id: str) -> None:
        self._fetched.pop(request_id, None)
        if (held := self._held.pop(request_id, None)) is not None:
            self.bytes_held -= len(held.body)
        if (spilled := self._spilled.pop(request_id, None)) is not None:
            self.bytes_spilled -= spilled.size
            spilled.path.unlink(missing_ok=True)


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)  # who cleans the machine's temporary files may have removed it
    write_atomically(path, body, durable=False)


CLIENTS_SHARE = 1_000_000_000
"""The requests of a sampler's client have numbers from a multiple of this on."""


def _client_of(request_id: str) -> tuple[str, int]:
    sampler_id, _, last = request_id.rpartition(":")
    return sampler_id, int(last) // CLIENTS_SHARE if last.isdecimal() else -1


def _note(log: _Log, request_id: str) -> None:
    log.newest += 1
    log.completed[log.newest] = request_id
    if len(log.completed) > MOST_RESULTS:
        del log.completed[next(iter(log.completed))]
    log.changed.set()
