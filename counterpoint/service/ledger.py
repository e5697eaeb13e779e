"""The ledger: what each account has used, day by day, on the disk, each request once.

It is a journal (`transport/files/journal.py`) of JSON: first what all former lines add up to, with the numbers of the requests
that they count; then a line for each request, flushed before its client is told of the result. It has one writer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from counterpoint.service.tasks import Tasks
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.journal import Body, DamagedJournal, Journal
from counterpoint.transport.files.json_lines import read_lines

logger = logging.getLogger(__name__)

MOST_LINE_BYTES = 2**20
"""The bytes of lines at which they are added up."""

KEPT_DAYS = 100
"""The newest days that are kept."""

MOST_STRETCHES = 1024
"""Stretches of counted numbers that are kept of one source. Only who leaves numbers out has more; the lowest are forgotten."""

MOST_PROJECTS = 100
"""Projects of an owner on one day; what is of further ones counts in none."""

MOST_WAITING = 16
"""Requests that wait for one flush: the loop wakes all of them at once, and each then answers its client."""

MOST_OWED = 65_536
"""Results that are not told yet and that do not count yet; of more, the oldest counts."""


class Used(msgspec.Struct, omit_defaults=True):
    """What was used."""

    trained: int = 0
    """Tokens of `forward_backward`."""
    forward: int = 0
    """Tokens of `forward`, which changes no weights."""
    prompt: int = 0
    """Tokens of prompts that were sampled from, each once however many samples it has."""
    sampled: int = 0
    """Tokens of completions."""
    seconds: float = 0.0
    """Seconds of the trainer's accelerators."""

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.trained + self.forward + self.prompt + self.sampled

    def add(self, other: Used) -> None:
        """Adds what another has."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _Line(Used, omit_defaults=True, kw_only=True):
    day: str
    account: str
    request: str


class _Sum(msgspec.Struct):
    days: dict[str, dict[str, Used]] = {}
    """By day in UTC, such as `2026-11-28`, and by account."""
    counted: dict[str, list[list[int]]] = {}
    """By source, the first and last numbers of the stretches of requests that are counted, ascending."""


class Ledger:
    """The ledger in one directory. An id of a request is that of its source, a colon and a number."""

    def __init__(self, directory: Path) -> None:
        """Reads what is there. Blocks. Raises `OSError`, and `UserError` for a damaged file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "ledger.journal"
        former = [each for each in directory.glob("*.json*") if each.stem.isdecimal()]
        self._journal = Journal(path, MOST_LINE_BYTES, () if path.exists() else _of_files(former))
        try:
            total, *lines = self._journal.replay()
            self._sum = msgspec.json.decode(total, type=_Sum)
            for line in lines:
                self._add(msgspec.json.decode(line, type=_Line))
        except DamagedJournal as error:
            raise UserError(str(error)) from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise UserError(f"{path} is no ledger: {error}; move it away to begin another") from error
        for each in former:
            each.unlink()
        self._projects: dict[str, str] = {}
        """The projects of sessions that have one."""
        self._unwritten: list[_Line] = []
        self._owed: OrderedDict[str, _Line] = OrderedDict()
        """What is not told yet, by the ids of requests."""
        self._owed_tokens = Counter[tuple[str, str]]()
        """The tokens of these by day and owner."""
        self._again, self._numbers = f"again-{secrets.token_hex(8)}", itertools.count()
        """What requests are called that count again: none of these comes again."""
        self._writing = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        """The flush that will write what is noted now."""
        self._waiting = 0
        """How many wait for it."""
        self._tasks = Tasks("the ledger")

    def assign(self, session_id: str, project: str) -> None:
        """Has what a session uses from now on counted in a project of its owner, or in none."""
        self._projects[session_id] = project
        if not project:
            del self._projects[session_id]

    async def count(self, owner: str, request_id: str, used: Used) -> None:
        """Counts a request, unless it is counted; it is on the disk then."""
        self._note(self._line(owner, request_id, used))
        await self._write()

    def owe(self, owner: str, request_id: str, used: Used) -> None:
        """Notes what a request has used: it counts once its client is `told`. A kill before loses both.

        One that was carried out before counts again: else a client that asks for it again and again would pay once.
        """
        self._note(self._paid(request_id))
        line = self._line(owner, request_id, used)
        if self._counts(request_id):
            line.request = f"{request_id.partition(':')[0]}:{self._again}:{next(self._numbers)}"
        self._owed[request_id] = line
        self._owed_tokens[line.day, owner] += line.tokens
        if len(self._owed) > MOST_OWED:
            self._note(self._paid(next(iter(self._owed))))

    def _paid(self, request_id: str) -> _Line | None:
        if (line := self._owed.pop(request_id, None)) is not None:
            place = line.day, owner_of(line.account)
            self._owed_tokens[place] -= line.tokens
            if not self._owed_tokens[place]:
                del self._owed_tokens[place]
        return line

    async def told(self, request_id: str) -> None:
        """Counts a request whose client is about to be told of its result."""
        if (line := self._paid(request_id)) is not None:
            self._note(line)
            await self._write()

    async def end(self, prefix: str = "") -> None:
        """Counts what nobody was told of the requests whose ids begin so, and forgets their numbers: none comes again."""
        for request_id in [each for each in self._owed if each.startswith(prefix)]:
            self._note(self._paid(request_id))
        await self._write()
        if prefix:
            self._projects.pop(prefix.rstrip(":"), None)
            for source in [each for each in self._sum.counted if f"{each}:".startswith(prefix)]:
                del self._sum.counted[source]

    def sources(self) -> list[str]:
        """Returns the sources of which requests are counted."""
        return list(self._sum.counted)

    def today(self, owner: str) -> int:
        """Returns the tokens of today of an owner, in all its accounts, also those of results that are not told yet."""
        day = day_now()
        told = (used.tokens for account, used in self._sum.days.get(day, {}).items() if owner_of(account) == owner)
        return sum(told) + self._owed_tokens[day, owner]

    def days(self) -> Mapping[str, Mapping[str, Used]]:
        """Returns what counts by day and account."""
        return self._sum.days

    def _line(self, owner: str, request_id: str, used: Used) -> _Line:
        account = account_of(owner, self._projects.get(request_id.partition(":")[0], ""))
        return _Line(**msgspec.to_builtins(used), day=day_now(), account=account, request=request_id)

    def _counts(self, request_id: str) -> bool:
        source, _, number = request_id.rpartition(":")
        return any(first <= int(number) <= last for first, last in self._sum.counted.get(source, []))

    def _note(self, line: _Line | None) -> None:
        if line is not None and self._add(line):
            self._unwritten.append(line)

    def _add(self, line: _Line) -> bool:
        source, _, number = line.request.rpartition(":")
        if not _insert(self._sum.counted.setdefault(source, []), int(number)):
            return False
        day = self._sum.days.setdefault(line.day, {})
        if line.account not in day and sum(map(owner_of(line.account).__eq__, map(owner_of, day))) > MOST_PROJECTS:
            line.account = owner_of(line.account)
        day.setdefault(line.account, Used()).add(line)
        return True

    async def _write(self) -> None:
        """Flushes what was noted, with what others have noted meanwhile. Who does not wait for it any more leaves it as it is."""
        if self._flushing is None or self._waiting >= MOST_WAITING:
            self._flushing, self._waiting = self._tasks.spawn(self._flush()), 0
        self._waiting += 1
        await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        async with self._writing:
            if self._flushing is asyncio.current_task():
                self._flushing = None  # what is noted from now on needs another
            if not self._unwritten:
                return
            lines, self._unwritten = self._unwritten, []
            try:
                await asyncio.to_thread(self._append, lines)
            except OSError as error:  # no client loses its result by it
                self._unwritten = lines + self._unwritten
                logger.error("the ledger lacks %d requests until it can be written: %s", len(self._unwritten), error)
                return
            if self._journal.has_grown:
                await self._add_up()

    def _append(self, lines: list[_Line]) -> None:
        self._journal.append([[msgspec.json.encode(line)] for line in lines], durable=True)

    async def _add_up(self) -> None:
        for day in sorted(self._sum.days)[:-KEPT_DAYS]:
            del self._sum.days[day]
        total = msgspec.json.encode(self._sum)
        unwritten, self._unwritten = self._unwritten, []  # the sum has them
        try:
            await asyncio.to_thread(self._journal.compact, [[total]])
        except OSError as error:
            self._unwritten = unwritten + self._unwritten
            logger.warning("%s grows: the ledger cannot be added up: %s", self._journal.path, error)


def _of_files(former: Sequence[Path]) -> list[Body]:
    """Returns what a ledger of before has: `N.json`, a sum, and `N.jsonl`, the lines after it. N grew with each sum."""
    number = max((int(path.stem) for path in former if path.suffix == ".json"), default=0)
    parts = {path.suffix: path for path in former if int(path.stem) == number}
    total = parts[".json"].read_bytes() if ".json" in parts else msgspec.json.encode(_Sum())
    return [[total], *([raw] for raw, _ in (read_lines(parts[".jsonl"]) if ".jsonl" in parts else ()))]


def _insert(stretches: list[list[int]], number: int) -> bool:
    """Adds a number to ascending stretches; returns whether it was in none."""
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
    """Returns the account of an owner's project, or of what has none."""
    return f"{owner}/{project}" if project else owner


def owner_of(account: str) -> str:
    """Returns whose account it is."""
    return account.partition("/")[0]


def project_of(account: str) -> str:
    """Returns the project of an account; empty if it is of none."""
    return account.partition("/")[2]


def day_now() -> str:
    """Returns today in UTC."""
    return datetime.now(UTC).date().isoformat()
