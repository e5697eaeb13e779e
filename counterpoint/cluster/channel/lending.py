"""The decisions of a channel's host: which record is stored, lent, redelivered and forgotten. No clock, no I/O, no payloads.

`handle(event)` returns the instructions that follow. Its promises, which `tests/cluster/channel/test_lending.py` holds against
arbitrary events:

- A record that was stored stays until it is acknowledged or set aside, and keeps its sequence number.
- It is lent to at most one session at a time. When that session ends it is lent again: to any consumer, or, if it was lent to
  a sticky one, to the same name only. Records come in the order of their sequence numbers, those to be lent again first.
- A position of a stream is stored once, whoever puts it.
- Records and outstanding credit together are never more than `capacity`.
- A record is set aside when `max_deaths` processes have died without acknowledging any, and it was the first of what each held.
- The stream ends when all expected producers have ended and every record is acknowledged or set aside.

An event costs O(1), on the average over all events; a record that is lent again costs the logarithm of their number.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from counterpoint.cluster.channel import lending_events as events
from counterpoint.cluster.channel.lending_events import Instruction
from counterpoint.cluster.channel.positions import PositionSet

MAX_AHEAD = 2**16
"""How far a position may be ahead of the lowest one that is missing in its stream. Bounds what is remembered of a stream."""

MAX_ORIGINS = 2**12
"""How many streams may meet in one channel."""

MAX_WANTED = 2**20
"""How many records a producer may wait with."""

CREDIT_AT_ONCE = 16
"""Credit that one producer gets before it is the next one's turn."""


@dataclass(slots=True)
class _Producer:
    name: str
    wanted: int = 0
    granted: int = 0


@dataclass(slots=True)
class _Consumer:
    name: str
    process: int
    credit: int
    sticky: bool
    backlog: deque[int]
    """Records that belong to its name and were not lent to this session yet."""
    held: dict[int, None] = field(default_factory=dict)
    has_acknowledged: bool = False


@dataclass(slots=True)
class LendingState:
    """What must survive the host: the state without sessions."""

    next_sequence: int = 0
    positions: dict[str, PositionSet] = field(default_factory=dict)
    """What each stream has put or skipped."""
    ended: set[str] = field(default_factory=set)
    kept: dict[int, None] = field(default_factory=dict)
    """The records that are not acknowledged, by sequence number, ascending."""
    owners: dict[int, str] = field(default_factory=dict)
    """The sticky consumer of each record that was lent to one."""


class Lending:
    """The state machine of one channel."""

    def __init__(
        self,
        capacity: int,
        producers: Iterable[str],
        lease_seconds: float,
        max_deaths: int,
        state: LendingState | None = None,
    ) -> None:
        """Begins empty, or with the state of an earlier host. The stream ends once all of `producers` have ended."""
        self.state = state if state is not None else LendingState()
        self.capacity = capacity
        self._expected = frozenset(producers)
        self._missing_ends = self._expected - self.state.ended
        self._lease_seconds = lease_seconds
        self._max_deaths = max_deaths
        self._died: dict[int, set[int]] = {}
        """The processes that died while a record was the first that they held, by record. A host that is killed forgets them."""
        self._producers: dict[int, _Producer] = {}
        self._consumers: dict[int, _Consumer] = {}
        self._sessions: dict[tuple[type, str], int] = {}
        """The living session of each name, of either kind."""
        self._renewed: OrderedDict[int, float] = OrderedDict()
        self._granted = 0
        self._wanting: OrderedDict[int, None] = OrderedDict()
        """The producers that wait for credit, in line."""
        self._ready: OrderedDict[int, None] = OrderedDict()
        """The consumers with room, in line."""
        self._fresh: deque[int] = deque()
        """Records that were not lent yet."""
        self._returned: list[int] = []
        """A heap of records that were lent to sessions that have ended."""
        self._owned: dict[str, dict[int, None]] = {}
        """The records of each sticky consumer."""
        self._floor = 0
        for sequence in self.state.kept:
            owner = self.state.owners.get(sequence)
            if owner is None:
                self._fresh.append(sequence)
            else:
                self._owned.setdefault(owner, {})[sequence] = None

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return not self._missing_ends and not self.state.kept

    @property
    def floor(self) -> int:
        """Every record with a smaller sequence number is acknowledged or set aside."""
        while self._floor < self.state.next_sequence and self._floor not in self.state.kept:
            self._floor += 1
        return self._floor

    @property
    def outstanding(self) -> int:
        """Credit that producers have and did not use."""
        return self._granted

    def next_position(self, origin: str) -> int:
        """The lowest position of a stream that is missing."""
        positions = self.state.positions.get(origin)
        return positions.watermark if positions is not None else 0

    def handle(self, event: events.Event) -> list[Instruction]:
        """Changes the state and returns what is to be done, in this order."""
        match event:
            case events.ProducerJoined():
                return self._join_producer(event)
            case events.ConsumerJoined():
                return self._join_consumer(event)
            case events.Left():
                return [*self._leave(event.session, event.failed), *self._settle()]
            case events.Renewed():
                if event.session in self._renewed:
                    self._renewed[event.session] = event.now
                    self._renewed.move_to_end(event.session)
                return []
            case events.TimePassed():
                return self._expire(event.now)
            case events.Wanted():
                return self._want(event)
            case events.Put():
                return self._put(event)
            case events.Skipped():
                return self._skip(event)
            case events.ProducerEnded():
                return self._end(event)
            case events.Acknowledged():
                return self._acknowledge(event)

    # --- sessions ---

    def _join_producer(self, event: events.ProducerJoined) -> list[Instruction]:
        done = self._replace(_Producer, event.name, event.session, event.now)
        self._producers[event.session] = _Producer(event.name)
        return [*done, *self._settle()]

    def _join_consumer(self, event: events.ConsumerJoined) -> list[Instruction]:
        done = self._replace(_Consumer, event.name, event.session, event.now)
        backlog = deque(sorted(self._owned.get(event.name, ())))
        self._consumers[event.session] = _Consumer(event.name, event.process, event.credit, event.sticky, backlog)
        if self.finished:
            return [*done, events.Finish(event.session)]
        return [*done, *self._serve(event.session), *self._settle()]

    def _replace(self, kind: type, name: str, session: int, now: float) -> list[Instruction]:
        earlier = self._sessions.get((kind, name))
        done = [] if earlier is None else [*self._leave(earlier), events.Drop(earlier, replaced=True)]
        self._sessions[kind, name] = session
        self._renewed[session] = now
        return done

    def _leave(self, session: int, failed: bool = True) -> list[Instruction]:
        for line in (self._renewed, self._wanting, self._ready):
            line.pop(session, None)
        if (producer := self._producers.pop(session, None)) is not None:
            del self._sessions[_Producer, producer.name]
            self._granted -= producer.granted
        if (consumer := self._consumers.pop(session, None)) is not None:
            del self._sessions[_Consumer, consumer.name]
            done = self._blame(consumer) if failed else []
            owned = self._owned.get(consumer.name, {})
            for sequence in consumer.held:
                if sequence not in owned:
                    heapq.heappush(self._returned, sequence)
            return done
        return []

    def _blame(self, consumer: _Consumer) -> list[Instruction]:
        """Counts the death of a consumer against the record that it was at, and sets that aside after too many."""
        if consumer.has_acknowledged or not consumer.held:
            return []
        suspect = min(consumer.held)
        died = self._died.setdefault(suspect, set())
        died.add(consumer.process)
        if len(died) < self._max_deaths:
            return []
        del consumer.held[suspect]
        self._remove(suspect, consumer.name)
        return [events.SetAside(suspect, len(died)), *self._finish()]

    def _remove(self, sequence: int, consumer: str) -> None:
        """Frees a record that `consumer` held, or that belongs to its name."""
        self._owned.get(consumer, {}).pop(sequence, None)
        del self.state.kept[sequence]
        self.state.owners.pop(sequence, None)
        self._died.pop(sequence, None)

    def _expire(self, now: float) -> list[Instruction]:
        done: list[Instruction] = []
        while self._renewed:
            session, renewed = next(iter(self._renewed.items()))
            if now - renewed < self._lease_seconds:
                break
            done += [*self._leave(session), events.Drop(session, replaced=False)]
        return [*done, *self._settle()] if done else []

    # --- producers ---

    def _want(self, event: events.Wanted) -> list[Instruction]:
        producer = self._producers.get(event.session)
        if producer is None or event.count < 1:
            return []
        self._wanting.setdefault(event.session)
        producer.wanted = min(producer.wanted + event.count, MAX_WANTED)
        return self._settle()

    def _put(self, event: events.Put) -> list[Instruction]:
        producer = self._producers.get(event.session)
        if producer is None:
            return []
        if not producer.granted:
            return [events.Refuse(event.session, event.number, "the producer has no credit")]
        producer.granted -= 1
        self._granted -= 1
        if event.position in self.state.positions.get(event.origin, ()):
            return [events.Confirm(event.session, event.number), *self._settle()]
        if reason := self._obstacle(producer, event.origin, event.position):
            return [events.Refuse(event.session, event.number, reason), *self._settle()]
        sequence = self.state.next_sequence
        self.state.next_sequence += 1
        self.state.positions.setdefault(event.origin, PositionSet()).add(event.position)
        self.state.kept[sequence] = None
        self._fresh.append(sequence)
        stored = events.Store(sequence, event.origin, event.position)
        return [stored, events.Confirm(event.session, event.number), *self._settle()]

    def _skip(self, event: events.Skipped) -> list[Instruction]:
        producer = self._producers.get(event.session)
        if producer is None:
            return []
        if event.position in self.state.positions.get(event.origin, ()):
            return [events.Confirm(event.session, event.number)]
        if reason := self._obstacle(producer, event.origin, event.position):
            return [events.Refuse(event.session, event.number, reason)]
        self.state.positions.setdefault(event.origin, PositionSet()).add(event.position)
        return [events.NoteSkip(event.origin, event.position), events.Confirm(event.session, event.number)]

    def _obstacle(self, producer: _Producer, origin: str, position: int) -> str:
        """Why a position that is missing is not taken; empty if it is."""
        if self.finished:
            return "the stream has ended"
        if producer.name in self.state.ended:
            return f"producer {producer.name} has ended its part of the stream"
        if origin not in self.state.positions and len(self.state.positions) >= MAX_ORIGINS:
            return f"origin {origin} is one too many; at most {MAX_ORIGINS} streams meet in a channel"
        missing = self.next_position(origin)
        if position - missing > MAX_AHEAD:
            return (
                f"position {position} of origin {origin} is more than {MAX_AHEAD} ahead of position {missing}, which is "
                "missing; put or skip every position"
            )
        return ""

    def _end(self, event: events.ProducerEnded) -> list[Instruction]:
        producer = self._producers.get(event.session)
        if producer is None or producer.name in self.state.ended:
            return []
        self.state.ended.add(producer.name)
        self._missing_ends -= {producer.name}
        return [events.NoteEnd(producer.name), *self._finish()]

    # --- consumers ---

    def _acknowledge(self, event: events.Acknowledged) -> list[Instruction]:
        consumer = self._consumers.get(event.session)
        if consumer is None:
            return []
        if event.sequence not in consumer.held and event.sequence not in self._owned.get(consumer.name, {}):
            return []  # lent to another session since
        consumer.held.pop(event.sequence, None)
        consumer.has_acknowledged = True
        self._remove(event.sequence, consumer.name)
        return [events.Forget(event.sequence), *self._serve(event.session), *self._settle(), *self._finish()]

    def _serve(self, session: int) -> list[Instruction]:
        """Lends a consumer what belongs to its name, and lines it up for more if it has room."""
        consumer = self._consumers[session]
        done: list[Instruction] = []
        while consumer.backlog and len(consumer.held) < consumer.credit:
            sequence = consumer.backlog.popleft()
            if sequence in self.state.kept:
                consumer.held[sequence] = None
                done.append(events.Lend(session, sequence, None))
        if len(consumer.held) < consumer.credit:
            self._ready.setdefault(session)
        return done

    def _finish(self) -> list[Instruction]:
        return [events.Finish(session) for session in self._consumers] if self.finished else []

    # --- both ---

    def _settle(self) -> list[Instruction]:
        """Lends what can be lent, and grants what can be granted."""
        done: list[Instruction] = []
        while self._ready and (self._returned or self._fresh):
            session, _ = self._ready.popitem(last=False)
            consumer = self._consumers[session]
            sequence = heapq.heappop(self._returned) if self._returned else self._fresh.popleft()
            consumer.held[sequence] = None
            if consumer.sticky:
                self._owned.setdefault(consumer.name, {})[sequence] = None
                self.state.owners[sequence] = consumer.name
            done.append(events.Lend(session, sequence, consumer.name if consumer.sticky else None))
            done += self._serve(session)
        room = self.capacity - len(self.state.kept) - self._granted
        while room > 0 and self._wanting:
            session, _ = self._wanting.popitem(last=False)
            producer = self._producers[session]
            count = min(producer.wanted, room, CREDIT_AT_ONCE)
            producer.wanted -= count
            producer.granted += count
            self._granted += count
            room -= count
            if producer.wanted:
                self._wanting[session] = None
            done.append(events.Grant(session, count))
        return done
