"""The ledger: the use of each account, day by day, in the service's database, each request once.

It has the sums, with the numbers of the requests that they count, in memory and in the database. It has one writer.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import json

from counterpoint.service.records.database import Change, Database

logger = logging.getLogger(__name__)

KEPT_DAYS = 100
"""The number of newest days that stay."""

MOST_STRETCHES = 1024
"""Stretches of counted numbers for one source. Only a client that leaves numbers out has more, and the lowest are forgotten."""

MOST_PROJECTS = 100
"""Projects of an owner on one day. Use of further ones counts in none."""

MOST_OWED = 65_536
"""Results that have not reached their clients and do not count yet. Beyond this number, the oldest counts."""


class Used(msgspec.Struct, omit_defaults=True):
    """The use of tokens and time."""

    trained: int = 0
    """Tokens of `forward_backward`."""
    forward: int = 0
    """Tokens of `forward`, which changes no weights."""
    prompt: int = 0
    """Tokens of sampled prompts, each once however many samples it has."""
    sampled: int = 0
    """Tokens of completions."""
    seconds: float = 0.0
    """Seconds of the trainer's accelerators."""

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.trained + self.forward + self.prompt + self.sampled

    def add(self, other: Used) -> None:
        """Adds another use."""
        for name in Used.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LedgerLine(Used, omit_defaults=True, kw_only=True):
    """The use of one request."""

    day: str
    account: str
    request: str = ""
    """Empty for one that counts each time it is carried out."""


class Sums(msgspec.Struct):
    """The use of all requests."""

    days: dict[str, dict[str, Used]] = {}
    """By day in UTC, such as `2026-11-28`, and by account."""
    counted: dict[str, list[list[int]]] = {}
    """Maps a source to the first and last numbers of each stretch of counted requests, ascending."""

    def add(self, line: LedgerLine) -> bool:
        """Counts a line. Returns False if its request has been counted already."""
        source, _, number = line.request.rpartition(":")
        if source and not _insert(self.counted.setdefault(source, []), int(number)):
            return False
        day = self.days.setdefault(line.day, {})
        while len(self.days) > KEPT_DAYS:
            del self.days[min(self.days)]
        if line.account not in day and sum(map(owner_of(line.account).__eq__, map(owner_of, day))) > MOST_PROJECTS:
            line.account = owner_of(line.account)
        day.setdefault(line.account, Used()).add(line)
        return True

    def writing(self, accounts: Collection[tuple[str, str]], sources: Collection[str]) -> Change[None]:
        """Returns the change that writes these accounts of a day, and sources, as they are now, and removes ended sources."""
        rows = [
            (day, account, *msgspec.structs.astuple(self.days[day][account]))
            for day, account in accounts
            if day in self.days
        ]
        counted = [(each, json.encode(self.counted[each]).decode()) for each in sources if each in self.counted]
        gone = [(each,) for each in sources if each not in self.counted]
        first_day = min(self.days, default="")

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.executemany("INSERT OR REPLACE INTO counted VALUES (?, ?)", counted)
            connection.executemany("DELETE FROM counted WHERE source = ?", gone)
            connection.execute("DELETE FROM used WHERE day < ?", (first_day,))

        return write


class Ledger:
    """The ledger of one service. An id of a request is that of its source, a colon and a number, such as `chat-1f:3`."""

    def __init__(self, database: Database) -> None:
        """Reads the database. Blocks. Raises `OSError`."""
        self._database = database
        counted = {source: json.decode(text) for source, text in database.rows("SELECT * FROM counted")}
        self._sums = Sums(used_by_day(database.rows), counted)
        self._projects: dict[str, str] = {}
        """The projects of sessions that have one."""
        self._accounts, self._sources = set[tuple[str, str]](), set[str]()
        """The changed accounts and sources that are not written."""
        self._is_durable = False
        """Whether somebody waits until they are on the disk."""
        self._writing = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        """The last flush."""
        self._owed: OrderedDict[str, LedgerLine] = OrderedDict()
        """Use that has not reached its client yet, by the ids of requests."""
        self._owed_tokens = Counter[tuple[str, str]]()
        """The tokens of these by day and owner."""

    def assign(self, session_id: str, project: str) -> None:
        """Counts a session's use from now on in a project of its owner, or in none."""
        self._projects[session_id] = project
        if not project:
            del self._projects[session_id]

    async def count(self, owner: str, request_id: str, used: Used, *, is_journalled: bool = False) -> None:
        """Counts a request once, and has it on the disk, or with `is_journalled` after the next `flush`."""
        self._note(self._line(owner, request_id, used))
        await self._write(durable=not is_journalled)

    def flush(self) -> None:
        """Returns once all that was counted is on the disk. Blocks: call it in a thread. Raises `OSError`."""
        if self._database.has_unflushed:
            self._database.write(lambda connection: connection.execute("UPDATE counted SET stretches = stretches"))

    def owe(self, owner: str, request_id: str, used: Used) -> None:
        """Notes a request's use, which counts once its client is `told`. A kill before loses both.

        A request that was carried out before counts again. Otherwise a client that asks for it again and again would pay once.
        """
        self._note(self._paid(request_id))
        self._owed[request_id] = line = self._line(owner, request_id, used)
        line.request = ""
        self._owed_tokens[line.day, owner] += line.tokens
        if len(self._owed) > MOST_OWED:
            self._note(self._paid(next(iter(self._owed))))

    def _paid(self, request_id: str) -> LedgerLine | None:
        if (line := self._owed.pop(request_id, None)) is not None:
            place = line.day, owner_of(line.account)
            self._owed_tokens[place] -= line.tokens
            if not self._owed_tokens[place]:
                del self._owed_tokens[place]
        return line

    async def told(self, request_id: str) -> None:
        """Counts a request before its client gets the result."""
        if (line := self._paid(request_id)) is not None:
            self._note(line)
            await self._write()

    async def end(self, prefix: str = "") -> None:
        """Counts unreported requests with ids that begin so, and forgets their numbers: none comes again."""
        for request_id in [each for each in self._owed if each.startswith(prefix)]:
            self._note(self._paid(request_id))
        if prefix:
            self._projects.pop(prefix.rstrip(":"), None)
            ended = {each for each in self._sums.counted if f"{each}:".startswith(prefix)}
            self._sources |= ended
            for source in ended:
                del self._sums.counted[source]
        await self._write()

    def sources(self) -> list[str]:
        """Returns the sources of counted requests."""
        return list(self._sums.counted)

    def today(self, owner: str) -> int:
        """Returns an owner's tokens of today, in all its accounts, including results that have not reached it yet."""
        day = day_now()
        told = (used.tokens for account, used in self._sums.days.get(day, {}).items() if owner_of(account) == owner)
        return sum(told) + self._owed_tokens[day, owner]

    def days(self) -> Mapping[str, Mapping[str, Used]]:
        """Returns the use by day and account."""
        return self._sums.days

    def _line(self, owner: str, request_id: str, used: Used) -> LedgerLine:
        account = account_of(owner, self._projects.get(request_id.partition(":")[0], ""))
        return LedgerLine(**msgspec.to_builtins(used), day=day_now(), account=account, request=request_id)

    def _note(self, line: LedgerLine | None) -> None:
        if line is not None and self._sums.add(line):
            self._accounts.add((line.day, line.account))
            self._sources |= {line.request.rpartition(":")[0]} - {""}

    async def _write(self, *, durable: bool = True) -> None:
        """Writes the changes, with those that others note meanwhile. It goes on if its caller no longer waits."""
        self._is_durable |= durable
        async with self._writing:
            if self._accounts or self._sources:
                self._flushing = asyncio.create_task(self._flush(), name="the ledger's flush")
            if self._flushing is not None:
                await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        accounts, sources, durable = self._accounts, self._sources, self._is_durable
        self._accounts, self._sources, self._is_durable = set(), set(), False
        try:
            await asyncio.wrap_future(self._database.submit(self._sums.writing(accounts, sources), durable=durable))
        except OSError as error:  # no client loses its result by it
            self._accounts |= accounts
            self._sources |= sources
            logger.error("the ledger lacks requests of %d accounts until it can be written: %s", len(accounts), error)


def used_by_day(query: Callable[[str], Iterable[sqlite3.Row]]) -> dict[str, dict[str, Used]]:
    """Returns a ledger's use by day and account, by a function that carries out a query. Blocks."""
    found: dict[str, dict[str, Used]] = {}
    for day, account, *used in query("SELECT * FROM used"):
        found.setdefault(day, {})[account] = Used(*used)
    return found


def _insert(stretches: list[list[int]], number: int) -> bool:
    """Adds a number to ascending stretches, and returns whether it was in none."""
    place = bisect_right(stretches, number, key=lambda each: each[0])
    if place and number <= stretches[place - 1][1]:
        return False
    stretches.insert(place, [number, number])
    for first in (place, place - 1):
        if 0 <= first < len(stretches) - 1 and stretches[first][1] + 1 == stretches[first + 1][0]:
            stretches[first][1] = stretches.pop(first + 1)[1]
    if len(stretches) > MOST_STRETCHES:
        del stretches[0]
    return True


def account_of(owner: str, project: str = "") -> str:
    """Returns the account of an owner's project, or of the owner without a project."""
    return f"{owner}/{project}" if project else owner


def owner_of(account: str) -> str:
    """Returns the owner of an account."""
    return account.partition("/")[0]


def project_of(account: str) -> str:
    """Returns the project of an account, or an empty text if it has none."""
    return account.partition("/")[2]


def day_now() -> str:
    """Returns today in UTC."""
    return datetime.now(UTC).date().isoformat()
