"""What a channel's host decides: which record is stored, lent, lent again and forgotten. No clock, no I/O; no frame is read.

Its promises, which `tests/cluster/channel/test_queue.py` holds against arbitrary events:

- A record that was stored stays until it is acknowledged or set aside, and keeps its sequence number.
- It is lent to at most one session at a time. When that session ends it is lent again: to any consumer, or, if it was lent to
  a sticky one, to the same name only. Records come in the order of their sequence numbers, those to be lent again first.
- A position of a stream is stored once, whoever puts it. There are never more than `capacity` records; orders wait for room.
- A record is set aside when `max_deaths` processes have died without acknowledging any, and it was the first of what each held.
- The stream ends when all expected producers have ended and every record is acknowledged or set aside.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.cluster.channel.exactly_once import PositionSet
from counterpoint.cluster.channel.messages import CONSUMER, END, PUT, Framed, Head, Who
from counterpoint.transport.files.atomic import Buffer

MAX_AHEAD = 2**16
"""How far a position may be ahead of the lowest one that is missing in its stream. Bounds what is remembered of a stream."""

MAX_ORIGINS = 2**12
"""How many streams may meet in one channel."""

Note = tuple[list[Any], Sequence[Buffer]]
"""A change of the state, in msgpack values, with the frames of a record that is put."""


@dataclass(slots=True, eq=False)
class ChannelSession:
    """A living end, and what it is to be told."""

    who: Who
    waiting: deque[Framed] = field(default_factory=deque)
    """A producer's records for which there was no room yet."""
    held: set[int] = field(default_factory=set)
    """What a consumer was lent and has not acknowledged."""
    backlog: deque[int] = field(default_factory=deque)
    """Records that belong to its name and were not lent to this session yet."""
    has_acknowledged: bool = False
    confirmed: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.who.kind} {self.who.name!r}"


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """A record that is not acknowledged."""

    origin: str
    position: int
    frames: Sequence[Buffer]
    owner: str = ""
    """The sticky consumer to which it was lent."""
    holder: ChannelSession | None = None
    died: set[int] = field(default_factory=set)
    """The processes that died while it was the first that they held. A host that is killed forgets them."""


class QueueState:
    """What must survive the host. It changes by notes alone, so that whoever has read them has the same."""

    def __init__(self, generation: str = "") -> None:
        self.generation = generation
        """Sequence numbers of another one mean other records."""
        self.next_sequence = 0
        self.positions: dict[str, PositionSet] = {}
        """What each stream has put or skipped."""
        self.ended: set[str] = set()
        self.kept: dict[int, QueuedRecord] = {}
        """The stored records by their sequence number, ascending."""
        self.aside: dict[int, QueuedRecord] = {}

    def apply(self, change: list[Any], frames: Sequence[Buffer] = ()) -> None:
        """Makes one change."""
        match change:
            case ["put", sequence, origin, position]:
                self.next_sequence = max(self.next_sequence, sequence + 1)
                self.positions.setdefault(origin, PositionSet()).add(position)
                self.kept[sequence] = QueuedRecord(origin, position, frames)
            case ["done", numbers]:
                for sequence in numbers:
                    del self.kept[sequence]
            case ["own", sequence, name]:
                self.kept[sequence].owner = name
            case ["skip", origin, position]:
                self.positions.setdefault(origin, PositionSet()).add(position)
            case ["end", name]:
                self.ended.add(name)
            case ["aside", sequence]:
                self.aside[sequence] = self.kept.pop(sequence)
            case ["begin", generation, next_sequence, positions, ended]:
                self.generation, self.next_sequence, self.ended = generation, next_sequence, set(ended)
                self.positions = {origin: PositionSet(*numbers) for origin, numbers in positions.items()}
            case _:
                raise ValueError(f"{change!r:.80} is no change of a channel of this version")

    def notes(self) -> Iterator[Note]:
        """Yields the fewest notes that make the state."""
        positions = {origin: [each.watermark, each.above] for origin, each in self.positions.items()}
        yield ["begin", self.generation, self.next_sequence, positions, sorted(self.ended)], ()
        for sequence, record in sorted([*self.kept.items(), *self.aside.items()]):
            yield ["put", sequence, record.origin, record.position], record.frames
            if sequence in self.aside:
                yield ["aside", sequence], ()
            elif record.owner:
                yield ["own", sequence, record.owner], ()


class Queue:
    """The state machine of one channel. What follows from an event is in `notes`, and at the sessions in `told`."""

    def __init__(
        self, capacity: int, producers: Iterable[str], max_deaths: int, state: QueueState | None = None
    ) -> None:
        """Begins empty, or with the state of an earlier host. The stream ends once all of `producers` have ended."""
        self.state = state if state is not None else QueueState()
        self.capacity = capacity
        self.producers = frozenset(producers)
        self._max_deaths = max_deaths
        self.sessions: dict[tuple[str, str], ChannelSession] = {}
        """The ends by their kind and name."""
        self.notes: list[Note] = []
        """The notes that the host writes down before it tells anybody anything."""
        self.told: dict[ChannelSession, None] = {}
        self._line: OrderedDict[ChannelSession, None] = OrderedDict()
        """The producers that wait for room."""
        self._ready: OrderedDict[ChannelSession, None] = OrderedDict()
        """The consumers with room, in line."""
        self._free = [sequence for sequence, record in self.state.kept.items() if not record.owner]
        """A heap of the records that may be lent to anybody."""

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return not self.state.kept and self.producers <= self.state.ended

    @property
    def floor(self) -> int:
        """Every record with a smaller sequence number is acknowledged or set aside."""
        return next(iter(self.state.kept), self.state.next_sequence)

    def next_position(self, origin: str) -> int:
        """The lowest position of a stream that is missing."""
        return self.state.positions[origin].watermark if origin in self.state.positions else 0

    def join(self, session: ChannelSession) -> ChannelSession | None:
        """Begins a session; returns the earlier one of the same name, which is over. Another process than its own has died."""
        who = session.who
        earlier = self.sessions.get((who.kind, who.name))
        if earlier is not None:
            self.leave(earlier, failed=earlier.who.started != who.started)
        self.sessions[who.kind, who.name] = session
        if who.kind == CONSUMER:
            session.backlog += [number for number, record in self.state.kept.items() if record.owner == who.name]
            self._serve(session)
            self._finish()
        self._settle()
        return earlier

    def leave(self, session: ChannelSession, failed: bool) -> None:
        """Ends a session; `failed` if its process died or ended by an error: if not, nothing that it holds is to blame."""
        del self.sessions[session.who.kind, session.who.name]
        for sessions in (self.told, self._line, self._ready):
            sessions.pop(session, None)
        if failed and session.held and not session.has_acknowledged:
            suspect = min(session.held)
            died = self.state.kept[suspect].died
            died.add(session.who.started)
            if len(died) >= self._max_deaths:
                session.held.discard(suspect)
                self._note(["aside", suspect])
                self._finish()
        for sequence in session.held:
            record = self.state.kept[sequence]
            record.holder = None
            if not record.owner:
                heapq.heappush(self._free, sequence)
        session.held = set()
        self._settle()

    def order(self, session: ChannelSession, head: Head, frames: Sequence[Buffer] = ()) -> None:
        """Takes a producer's order: at once, or when there is room for its record."""
        if head.kind == PUT:
            session.waiting.append((head, frames))
            self._line[session] = None
            self._settle()
        else:
            self._take(session, head, frames)

    def acknowledge(self, session: ChannelSession, numbers: Iterable[int]) -> None:
        """Forgets those of the records that are lent to this session."""
        done = sorted(session.held.intersection(numbers))
        if done:
            session.held.difference_update(done)
            session.has_acknowledged = True
            self._note(["done", done])
            self._serve(session)
            self._settle()
            self._finish()

    def _take(self, session: ChannelSession, head: Head, frames: Sequence[Buffer]) -> None:
        name = session.who.name
        if head.kind == END:
            if name not in self.state.ended:
                self._note(["end", name])
                self._finish()
        elif head.position not in self.state.positions.get(head.origin, ()):
            if reason := self._obstacle(name, head):
                self._tell(session).refused.append((head.number, reason))
                return
            if head.kind == PUT:
                sequence = self.state.next_sequence
                self._note(["put", sequence, head.origin, head.position], frames)
                heapq.heappush(self._free, sequence)
            else:
                self._note(["skip", head.origin, head.position])
        self._tell(session).confirmed.append(head.number)

    def _obstacle(self, name: str, head: Head) -> str:
        """Why a position that is missing is not taken; empty if it is."""
        if self.finished or name in self.state.ended:
            return f"producer {name} has ended its part of the stream, or the stream has ended"
        if head.origin not in self.state.positions and len(self.state.positions) >= MAX_ORIGINS:
            return f"origin {head.origin} is one too many; at most {MAX_ORIGINS} streams meet in a channel"
        missing = self.next_position(head.origin)
        if head.position - missing > MAX_AHEAD:
            return (
                f"position {head.position} of origin {head.origin} is more than {MAX_AHEAD} ahead of position {missing}, "
                "which is missing; put or skip every position"
            )
        return ""

    def _settle(self) -> None:
        """Stores what there is room for, and lends what can be lent."""
        while self._line and len(self.state.kept) < self.capacity:
            producer, _ = self._line.popitem(last=False)
            self._take(producer, *producer.waiting.popleft())
            if producer.waiting:
                self._line[producer] = None
        while self._ready and self._free:
            consumer, _ = self._ready.popitem(last=False)
            sequence = heapq.heappop(self._free)
            if consumer.who.sticky:
                self._note(["own", sequence, consumer.who.name])
            self._lend(consumer, sequence)
            self._serve(consumer)

    def _serve(self, consumer: ChannelSession) -> None:
        """Lends a consumer what belongs to its name, and lines it up for more if it has room."""
        while consumer.backlog and len(consumer.held) < consumer.who.credit:
            self._lend(consumer, consumer.backlog.popleft())
        if len(consumer.held) < consumer.who.credit:
            self._ready[consumer] = None

    def _lend(self, consumer: ChannelSession, sequence: int) -> None:
        self.state.kept[sequence].holder = consumer
        consumer.held.add(sequence)
        self._tell(consumer).lent.append(sequence)

    def _finish(self) -> None:
        if self.finished:
            for session in self.sessions.values():
                self._tell(session).finished = session.who.kind == CONSUMER

    def _tell(self, session: ChannelSession) -> ChannelSession:
        self.told[session] = None
        return session

    def _note(self, change: list[Any], frames: Sequence[Buffer] = ()) -> None:
        self.state.apply(change, frames)
        self.notes.append((change, frames))
