"""One peer's session at the host of a channel: who it is, and what it is to be told at the end of a pass (`host.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.channel import protocol
from cluster.channel.journal import Record
from cluster.channel.protocol import Hello, RecordHead
from transport.files.atomic import Buffer


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
        records = []
        for sequence in self.lent:
            record = held.get(sequence)
            if record is not None:  # else acknowledged since
                origin, position, frames = record
                records.append((RecordHead(sequence, origin, position, len(frames)), frames))
        for start in range(0, len(records), protocol.RECORDS_AT_ONCE):
            delivered = records[start : start + protocol.RECORDS_AT_ONCE]
            messages.append(protocol.pack_records(protocol.DELIVER, delivered, floor))
        if self.finished:
            messages.append(protocol.pack(protocol.FINISH))
        self.welcome = self.finished = False
        self.confirmed, self.refused, self.granted, self.lent = [], [], 0, []
        return messages
