"""One peer's session at the host of a channel: who it is, and what it is to be told at the end of a pass (`host.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from counterpoint.cluster.channel import protocol
from counterpoint.cluster.channel.journal import Record
from counterpoint.cluster.channel.protocol import Hello, RecordHead
from counterpoint.transport.files.atomic import Buffer, as_bytes_view


@dataclass(slots=True)
class Peer:
    """One session: who it is, and what it is to be told at the end of the pass."""

    routing_id: bytes
    hello: Hello
    welcome: bool = True
    confirmed: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    granted: int = 0
    lent: list[int] = field(default_factory=list)
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.hello.kind} {self.hello.name!r}"

    def take_messages(self, welcome: Sequence[object], held: Mapping[int, Record], floor: int) -> list[list[Buffer]]:
        """Returns the messages of this pass, and begins the next with none. `held` are the records that are still there."""
        messages: list[list[Buffer]] = []
        if self.welcome:
            messages.append(protocol.pack(protocol.WELCOME, welcome))
        for start in range(0, len(self.confirmed), protocol.MAX_RECORDS):
            part = self.confirmed[start : start + protocol.MAX_RECORDS]
            messages.append(protocol.pack(protocol.CONFIRM, part))
        messages += [protocol.pack(protocol.REFUSE, [number, reason]) for number, reason in self.refused]
        if self.granted:
            messages.append(protocol.pack(protocol.GRANT, self.granted))
        messages += self._deliveries(held, floor)
        if self.finished:
            messages.append(protocol.pack(protocol.FINISH))
        self.welcome = self.finished = False
        self.confirmed, self.refused, self.granted, self.lent = [], [], 0, []
        return messages

    def _deliveries(self, held: Mapping[int, Record], floor: int) -> Iterator[list[Buffer]]:
        """Yields messages of few bytes each, as the other end sees a message only when all of it has come."""
        records: list[tuple[RecordHead, Sequence[Buffer]]] = []
        size = 0
        for sequence in self.lent:
            record = held.get(sequence)
            if record is None:
                continue  # acknowledged since
            origin, position, frames = record
            records.append((RecordHead(sequence, origin, position, len(frames)), frames))
            size += sum(map(len, map(as_bytes_view, frames)))
            if len(records) == protocol.RECORDS_AT_ONCE or size >= protocol.BYTES_AT_ONCE:
                yield protocol.pack_records(protocol.DELIVER, records, floor)
                records, size = [], 0
        if records:
            yield protocol.pack_records(protocol.DELIVER, records, floor)
