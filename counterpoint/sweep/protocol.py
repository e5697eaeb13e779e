"""The protocol of a lease as exchanges with a store: claim, heartbeat, end. No I/O: each is a generator of requests.

An exchange yields a `Read`, a `Write` or a `WaitRequest` and is sent the answer, or `Conflict` or `StoreError` is thrown into it.
`perform` carries one out; tests carry out many at once, a request at a time, in every order and with every fault.
`counterpoint/sweep/lease.py` has the rules.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from counterpoint.sweep import lease
from counterpoint.sweep.identity import Identity
from counterpoint.sweep.record import Record, RecordError, RecordState
from counterpoint.sweep.store import Conflict, Store, Stored, StoreError

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
_CHANCE = random.SystemRandom()
"""Not the global generator, which the worker's program may have seeded and counts on while heartbeats go on in a thread."""
CLAIM_SECONDS = 10.0
"""How long one claim is tried. There are many more chances, and a worker cannot be interrupted meanwhile."""


@dataclass(frozen=True, slots=True)
class Read:
    """A request to read an object, answered by `Stored` or None."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    """A request to write an object on a condition, answered by the new version. See `Store.write`."""

    key: str
    data: bytes
    version: str | None


@dataclass(frozen=True, slots=True)
class WaitRequest:
    """A request to wait, answered by None after so many seconds."""

    seconds: float


T = TypeVar("T")
Request = Read | Write | WaitRequest
Exchange = Generator[Request, Any, T]


class LeaseLost(Exception):
    """The target is, or may be, another worker's now. What its body did since does not count."""


class Superseded(Exception):
    """Another worker's write came first."""

    def __init__(self, stored: Stored | None) -> None:
        super().__init__("another's write came first")
        self.stored = stored


@dataclass(frozen=True, slots=True)
class Clocks:
    """The observer's own clock, by which it decides, and the wall clock, which is for people. Both in seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float] = time.time


def perform(store: Store, exchange: Exchange[T]) -> T:
    """Carries an exchange out, and returns or raises what the exchange does. Blocks."""
    try:
        request = next(exchange)
        while True:
            try:
                answer = answer_of(store, request)
            except (Conflict, StoreError) as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def answer_of(store: Store, request: Request) -> Any:
    """Carries one request out, and returns its answer."""
    match request:
        case Read(key):
            return store.read(key)
        case Write(key, data, version):
            return store.write(key, data, version)
        case WaitRequest(seconds):
            return time.sleep(seconds)


def pauses() -> Iterator[WaitRequest]:
    """Yields the pause before each further try, with jitter."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield WaitRequest(pause * _CHANCE.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def write_until_known(write: Write, now: Callable[[], float], give_up: float, place: str = "") -> Exchange[str]:
    """Writes an object, and repeats until it is known whether the object is written; returns its version.

    An error may mean that the answer was lost, and a conflict that a library sent the same request twice: so the object is
    read back. The very same bytes are sent again while nothing has changed, since a request that seemed lost may still
    arrive: one of the two then finds its condition broken. Raises `Superseded`; the last `StoreError` once `give_up` has
    passed.
    """
    for pause in pauses():
        trouble: Exception
        try:
            written: str = yield write
            return written
        except (Conflict, StoreError) as error:
            trouble = error
        try:
            stored: Stored | None = yield Read(write.key)
        except StoreError as error:
            trouble = error
        else:
            if stored is not None and stored.data == write.data:
                return stored.version
            if (stored and stored.version) != write.version:
                raise Superseded(stored)
        if now() >= give_up:
            raise StoreError(f"{place}{write.key} is not known to be written: {trouble}") from trouble
        yield pause
    raise AssertionError("unreachable")


@dataclass(slots=True)
class OwnedLease:
    """A lease as its owner knows it: with the last record that is known to be written.

    Its exchanges follow one another.
    """

    record: Record
    version: str
    confirmed_at: float
    """The time when the first request of the last confirmed write was begun, by the monotonic clock."""
    terms: lease.Terms
    clocks: Clocks

    @property
    def deadline(self) -> float:
        """The time by which the owner must have stopped, unless another write is confirmed by then."""
        return self.confirmed_at + self.terms.safe_seconds

    def beat(self) -> Exchange[None]:
        """Writes one heartbeat, tried until the next is due or the deadline has passed.

        Raises `LeaseLost`, `StoreError`.
        """
        give_up = min(self.deadline, self.clocks.monotonic() + self.terms.heartbeat)
        yield from self._write(lambda record: lease.with_heartbeat(record, self.clocks.wall()), give_up)

    def end(self, transition: Callable[[Record, float], Record], patience: float) -> Exchange[None]:
        """Makes the last write.

        Safe at any time: it is refused if a peer has taken over. Raises `LeaseLost`, and `StoreError` after `patience`
        seconds.
        """
        yield from self._write(
            lambda record: transition(record, self.clocks.wall()), self.clocks.monotonic() + patience
        )

    def _write(self, transition: Callable[[Record], Record], give_up: float) -> Exchange[None]:
        while True:
            record, started = transition(self.record), self.clocks.monotonic()
            try:
                write = Write(record.target_id, record.to_bytes(), self.version)
                version = yield from write_until_known(write, self.clocks.monotonic, give_up)
            except Superseded as superseded:
                # An earlier heartbeat, whose answer was lost, arrived after all.
                self._continue_from(superseded.stored)
                continue
            self.record, self.version, self.confirmed_at = record, version, started
            return

    def _continue_from(self, stored: Stored | None) -> None:
        if stored is None:
            raise LeaseLost(f"{self.record.target_id}: its record was deleted")
        found = Record.of_bytes(stored.data, self.record.target_id)
        if found.owner != self.record.owner or found.state is not RecordState.RUNNING:
            raise LeaseLost(
                f"{found.target_id}: attempt {self.record.attempts} (token {self.record.token}) was taken over: "
                f"it is {found.state} by process {found.pid} on {found.host} (token {found.token})"
            )
        self.record, self.version = found, stored.version


@dataclass(slots=True)
class Observer:
    """One worker's view of a root: its terms, its clocks, and for how long each record is unchanged."""

    terms: lease.Terms
    clocks: Clocks
    place: str = ""
    """The root, for messages."""
    record_ages: lease.RecordAges = field(default_factory=lease.RecordAges)

    def acquire(
        self, target_id: str, terms: lease.Terms | None = None, identity: Identity | None = None
    ) -> Exchange[OwnedLease | lease.TargetHeld | lease.Done | lease.StaysFailed]:
        """Claims a target if that is allowed (`lease.assess`), as a new owner each time.

        `terms` replace the observer's own. Raises `StoreError` when it cannot be known whether the target is claimed (it
        then has no owner, and its lease expires), `RecordError` for a record that cannot be read, and for one that reads SUCCESS
        with another `identity`. What has failed, or its worker left, is claimed with the identity that it has now.
        """
        terms = terms or self.terms
        stored: Stored | None = yield Read(target_id)
        unchanged = self.record_ages.unchanged_seconds(target_id, stored and stored.version, self.clocks.monotonic())
        record = self._record(target_id, stored)
        if (
            record is not None
            and identity is not None
            and record.state is RecordState.SUCCESS
            and not identity.is_that_of(record.config, record.field_names)
        ):
            raise RecordError(
                f"{self.place}: {target_id} is SUCCESS with another configuration than it has now; give the target another id, "
                "or move its record away to run it afresh"
            )
        assessment = lease.assess(record, unchanged, self.clocks.wall(), terms)
        owner, started = uuid.uuid4().hex, self.clocks.monotonic()
        version = stored and stored.version
        give_up = started + min(CLAIM_SECONDS, terms.safe_seconds)
        try:
            if isinstance(assessment, lease.Take):
                new = lease.claimed(
                    record, target_id, owner, socket.gethostname(), os.getpid(), terms, self.clocks.wall(), identity
                )
                version = yield from write_until_known(
                    Write(target_id, new.to_bytes(), version), self.clocks.monotonic, give_up
                )
                return (yield from self._in_time(OwnedLease(new, version, started, terms, self.clocks)))
            if isinstance(assessment, lease.TargetHeld | lease.Done | lease.StaysFailed):
                return assessment
            assert record is not None
            new = lease.marked_failed(record, owner, self.clocks.wall())
            yield from write_until_known(Write(target_id, new.to_bytes(), version), self.clocks.monotonic, give_up)
            return lease.StaysFailed(new)
        except Superseded as superseded:
            winner = self._record(target_id, superseded.stored)
            return lease.TargetHeld(0.0, winner or new)

    def _in_time(self, owned: OwnedLease) -> Exchange[OwnedLease | lease.TargetHeld]:
        """Gives a claim back that was confirmed so late that its owner would have to stop at once."""
        if self.clocks.monotonic() < owned.deadline:
            return owned
        try:
            yield from owned.end(lease.interrupted, min(CLAIM_SECONDS, owned.terms.safe_seconds))
        except LeaseLost:
            return lease.TargetHeld(0.0, owned.record)
        return lease.TargetHeld(owned.terms.heartbeat, owned.record)

    def _record(self, target_id: str, stored: Stored | None) -> Record | None:
        if stored is None:
            return None
        return Record.of_bytes(stored.data, target_id, self.place)
