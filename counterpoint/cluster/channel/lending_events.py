"""What happens to a channel, and what its host has to do then: the vocabulary of `lending.py`.

A session is one connection of one peer, numbered by the host. An event of a session that is over has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProducerJoined:
    """A producer said hello. An earlier session of the same name is over."""

    session: int
    name: str
    now: float


@dataclass(frozen=True, slots=True)
class ConsumerJoined:
    """A consumer said hello. An earlier session of the same name is over."""

    session: int
    name: str
    credit: int
    """How many unacknowledged records it holds at most."""
    sticky: bool
    """Whether records lent to it are kept for its name when it dies, instead of going to another consumer."""
    now: float
    process: int = 0
    """Tells the processes of a name apart: one that connects again is the same."""


@dataclass(frozen=True, slots=True)
class Left:
    """The peer of a session said goodbye, or its connection broke."""

    session: int
    failed: bool
    """Whether it died or ended by an error; if not, nothing that it holds is to blame."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A message of the session came; its lease counts from now."""

    session: int
    now: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The clock, at least a few times in a lease."""

    now: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """A producer has so many further records that wait for credit."""

    session: int
    count: int


@dataclass(frozen=True, slots=True)
class Put:
    """A producer sent a record. `number` is the producer's own count, for the answer."""

    session: int
    number: int
    origin: str
    position: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A producer has nothing for this position of a stream, and nobody ever will."""

    session: int
    number: int
    origin: str
    position: int


@dataclass(frozen=True, slots=True)
class ProducerEnded:
    """A producer will put nothing more."""

    session: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A consumer is done with a record."""

    session: int
    sequence: int


Event = (
    ProducerJoined
    | ConsumerJoined
    | Left
    | Renewed
    | TimePassed
    | Wanted
    | Put
    | Skipped
    | ProducerEnded
    | Acknowledged
)


@dataclass(frozen=True, slots=True)
class Grant:
    """Let the producer send so many further records."""

    session: int
    count: int


@dataclass(frozen=True, slots=True)
class Store:
    """Keep the record that was just put, under this sequence number."""

    sequence: int
    origin: str
    position: int


@dataclass(frozen=True, slots=True)
class NoteSkip:
    """Write down that a position was skipped."""

    origin: str
    position: int


@dataclass(frozen=True, slots=True)
class NoteEnd:
    """Write down that a producer has ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell the producer that its record is stored, now or before; after what was to be written down is."""

    session: int
    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the producer that its record is not taken."""

    session: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lend:
    """Send a record to the consumer."""

    session: int
    sequence: int
    note_for: str | None
    """The sticky consumer's name if it has to be written down first that the record belongs to it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Write down that a record is acknowledged, and free it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep a record apart, name it, and write down that it is done with: its consumers died, each time at this record."""

    sequence: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the consumer that the stream has ended."""

    session: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The session is over although its peer may think otherwise."""

    session: int
    replaced: bool
    """Whether a newer session has its name; else its lease ran out."""


Instruction = Grant | Store | NoteSkip | NoteEnd | Confirm | Refuse | Lend | Forget | SetAside | Finish | Drop
