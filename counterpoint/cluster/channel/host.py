"""The host of a channel: a thread with a ROUTER, which stores what producers put and lends it to consumers.

`lending.py` decides; this module executes: it keeps the records' frames, writes the journal, and talks. One pass reads what
has come, decides, flushes the journal once, and only then answers, so that nobody is told of what a death could still undo. A
host may live in a worker of its own, or in any other, such as the only producer: records then reach it by reference.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from counterpoint.cluster.channel import lending_events as events
from counterpoint.cluster.channel import protocol
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.journal import Journal, Record
from counterpoint.cluster.channel.lending import Lending
from counterpoint.cluster.channel.link import ChannelError
from counterpoint.cluster.channel.protocol import Hello, RecordHead
from counterpoint.cluster.channel.sockets import RouterSocket
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.unpacked import shown
from counterpoint.transport.wires.listener_keys import listener_keys


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


logger = logging.getLogger(__name__)

MESSAGES_A_PASS = 256
PASS_SECONDS = 0.05
MAX_PEERS = 4096
DISK_RETRY_SECONDS = 0.5
DISK_PATIENCE_SECONDS = 600.0
"""How long a full disk may hold the channel up before the host gives up."""


class ChannelHost:
    """Hosts one channel from `start` to `close`."""

    def __init__(self, config: ChannelConfig, job_directory: Path) -> None:
        """Takes the address, and what an earlier host left in `config.directory`.

        Raises `ValueError` for a configuration that cannot be, `OSError` when another process hosts the channel,
        `JournalError` for a damaged journal.
        """
        self.config = config
        self.address, _ = config.endpoint(job_directory)
        self.garbage = 0
        """Messages that were dropped because they were not of the protocol."""
        self.failure: BaseException | None = None
        """Why the thread ended, if it did before `close`."""
        self.trouble = ""
        """What keeps the host from its work, such as a full disk; empty if nothing does."""
        self.ended = False
        """Whether the stream has ended."""
        self.set_aside: dict[int, Record] = {}
        """The records that were set aside since their consumers died, by sequence number."""
        self._over = threading.Event()
        self._socket = RouterSocket(self.address, listener_keys(config.transport()), config.max_record_bytes)
        try:
            self._journal = (
                Journal(job_directory / config.directory, config.sync) if config.directory is not None else None
            )
        except BaseException:
            self._socket.close()
            raise
        self._aside_directory = job_directory / (config.directory or "") / "set_aside"
        self._aside: Journal | None = None
        state = self._journal.state if self._journal is not None else None
        self._lending = Lending(config.capacity, config.producers, config.lease_seconds, config.max_deaths, state)
        self._generation = self._journal.generation if self._journal is not None else os.urandom(8).hex()
        self._records = self._journal.records if self._journal is not None else {}
        if config.directory is not None and self._aside_directory.is_dir():
            self._aside = Journal(self._aside_directory, config.sync)
            self.set_aside = {key: record for key, record in self._aside.records.items() if key not in self._records}
        self._sessions: dict[bytes, int] = {}
        self._peers: dict[int, Peer] = {}
        self._names: dict[tuple[str, str], int] = {}
        self._last_session = 0
        self._touched: dict[int, None] = {}
        self._forgotten: list[int] = []
        self._arriving: Sequence[Buffer] = ()
        self._rejections: list[tuple[bytes, list[Buffer]]] = []
        self._log = RateLimitedLog(logger)
        self._waker = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"channel-{config.name}", daemon=True)
        self._closing = self._closed = False

    def start(self) -> None:
        """Begins to serve. Once only."""
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees everything. With a journal, another host can go on. Safe to call twice."""
        if self._closed:
            return
        self._closing = self._closed = True
        os.eventfd_write(self._waker, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        for journal in (self._journal, self._aside):
            if journal is not None:
                journal.close()
        os.close(self._waker)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the stream has ended; returns whether it has. Raises `ChannelError` if the host has failed."""
        self._over.wait(timeout)
        if self.failure is not None:
            raise ChannelError(f"the host of channel {self.config.name} failed: {self.failure}") from self.failure
        return self.ended

    @property
    def unended(self) -> frozenset[str]:
        """The producers that have not ended their parts of the stream. From any thread."""
        return frozenset(self.config.producers) - self._lending.state.ended

    def status(self) -> str:
        """Returns one line for people. From any thread."""
        state = "ended" if self.ended else f"{len(self._records)} of {self.config.capacity} records"
        if not self.ended and not any(peer.hello.kind == protocol.CONSUMER for peer in [*self._peers.values()]):
            state += ", no consumer"
        if self.set_aside:
            state += f", {len(self.set_aside)} set aside, such as position {next(iter(self.set_aside.values()))[1]}"
        return f"{self.config.name}: {self.trouble or state}"

    def __enter__(self) -> ChannelHost:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for waited in (self._socket.socket, self._socket.monitor, self._waker):
                poller.register(waited, zmq.POLLIN)
            tick = min(0.5, self.config.lease_seconds / 4)
            ticked = time.monotonic()
            while not self._closing:
                poller.poll(0 if self._touched else int(tick * 1000))
                now = time.monotonic()
                self._read(now)
                if now - ticked >= tick:
                    ticked = now
                    self._do(self._lending.handle(events.TimePassed(now)))
                self._flush()
                self._answer()
        except BaseException as error:  # kept for the owner, and the thread ends
            self.failure = error
            self._over.set()
            logger.exception("the host of channel %s failed", self.config.name)

    def _read(self, now: float) -> None:
        for _ in range(MESSAGES_A_PASS):
            received = self._socket.receive()
            if received is None or time.monotonic() - now > PASS_SECONDS:
                if received is not None:
                    self._take(*received, now)
                break
            self._take(*received, now)
        for routing_id in self._socket.broken():
            self._leave(routing_id)

    def _take(self, routing_id: bytes, frames: Sequence[Buffer], now: float) -> None:
        session = self._sessions.get(routing_id)
        try:
            kind, header, rest = protocol.unpack(frames)
            if kind == protocol.HELLO:
                self._welcome(routing_id, protocol.hello_of(header), now)
            elif session is None:
                self._rejections.append((routing_id, protocol.pack(protocol.RESET)))
            else:
                self._lending.handle(events.Renewed(session, now))
                self._take_from(session, kind, header, rest)
        except CodecError as error:
            self.garbage += 1
            sender = self._peers[session] if session is not None else f"peer {routing_id.hex()}, which is unknown"
            self._log.note(logging.WARNING, f"channel {self.config.name}: dropped a message of {sender}: {error}")

    def _take_from(self, session: int, kind: bytes, header: object, frames: Sequence[Buffer]) -> None:
        is_producer = self._peers[session].hello.kind == protocol.PRODUCER
        match kind:
            case protocol.PUT if is_producer:
                for head, own in protocol.records_of(header, frames)[1]:
                    self._arriving = own
                    if reason := self._too_large(own):
                        self._refuse(session, head.number, reason)
                        continue
                    self._do(self._lending.handle(events.Put(session, head.number, head.origin, head.position)))
            case protocol.WANT if is_producer and protocol.number(header):
                assert isinstance(header, int)
                self._do(self._lending.handle(events.Wanted(session, header)))
            case protocol.SKIP if is_producer:
                for head, _ in protocol.records_of(header, frames)[1]:
                    self._do(self._lending.handle(events.Skipped(session, head.number, head.origin, head.position)))
            case protocol.END if is_producer and protocol.number(header):
                assert isinstance(header, int)
                self._do(self._lending.handle(events.ProducerEnded(session)))
                self._do([events.Confirm(session, header)])
            case protocol.ACKNOWLEDGE if not is_producer:
                for sequence in protocol.numbers_of(header):
                    self._do(self._lending.handle(events.Acknowledged(session, sequence)))
            case protocol.PING:
                self._rejections.append((self._peers[session].routing_id, protocol.pack(protocol.PONG)))
            case protocol.BYE:
                self._leave(self._peers[session].routing_id, failed=header is True)
            case protocol.PROBE:
                pass
            case _:
                raise CodecError(f"kind {kind!r} with header {shown(header)} is not for a host")

    def _too_large(self, frames: Sequence[Buffer]) -> str:
        size = sum(as_bytes_view(frame).nbytes for frame in frames)
        limit = self.config.max_record_bytes
        return (
            f"a record of {size} bytes; max_record_bytes of channel {self.config.name} is {limit}"
            if size > limit
            else ""
        )

    # --- sessions ---

    def _welcome(self, routing_id: bytes, hello: Hello, now: float) -> None:
        if reason := self._objection(hello):
            self._log.note(
                logging.WARNING, f"channel {self.config.name}: refused {hello.kind} {hello.name!r}: {reason}"
            )
            self._rejections.append((routing_id, protocol.pack(protocol.REJECTED, reason[: protocol.MAX_REASON])))
            return
        self._leave(routing_id, failed=False)
        self._last_session += 1
        session = self._last_session
        earlier = self._names.get((hello.kind, hello.name))
        if earlier is not None and self._peers[earlier].hello.started == hello.started:
            self._leave(self._peers[earlier].routing_id, failed=False)  # the same end, which has connected again
        self._sessions[routing_id] = self._names[hello.kind, hello.name] = session
        self._peers[session] = Peer(routing_id, hello)
        self._touched[session] = None
        if hello.kind == protocol.PRODUCER:
            self._do(self._lending.handle(events.ProducerJoined(session, hello.name, now)))
        else:
            joined = events.ConsumerJoined(session, hello.name, hello.credit, hello.sticky, now, hello.started)
            self._do(self._lending.handle(joined))

    def _objection(self, hello: Hello) -> str:
        if hello.kind == protocol.PRODUCER and hello.name not in self.config.producers:
            return f"{hello.name} is not among the channel's producers: {', '.join(self.config.producers)}"
        current = self._names.get((hello.kind, hello.name))
        if current is not None and hello.age < self._peers[current].hello.age:
            return f"a later process of the name {hello.name} is connected; this one is out of date and must end"
        if current is None and len(self._peers) >= MAX_PEERS:
            return f"{len(self._peers)} peers are connected; at most {MAX_PEERS} are served"
        return ""

    def _leave(self, routing_id: bytes, failed: bool = True) -> None:
        session = self._sessions.get(routing_id)
        if session is not None:
            self._forget_peer(session)
            self._do(self._lending.handle(events.Left(session, failed)))

    def _forget_peer(self, session: int) -> Peer:
        peer = self._peers.pop(session)
        self._touched.pop(session, None)
        del self._sessions[peer.routing_id]
        if self._names.get((peer.hello.kind, peer.hello.name)) == session:
            del self._names[peer.hello.kind, peer.hello.name]
        return peer

    # --- instructions ---

    def _do(self, instructions: Sequence[events.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case events.Store(sequence, origin, position):
                    self._records[sequence] = (origin, position, self._arriving)
                    if self._journal is not None:
                        self._journal.put(sequence, origin, position, self._arriving)
                case events.Forget(sequence):
                    self._records.pop(sequence, None)
                    self._forgotten.append(sequence)
                case events.SetAside(sequence, deaths):
                    self._set_aside(sequence, deaths)
                case events.NoteSkip(origin, position):
                    if self._journal is not None:
                        self._journal.skip(origin, position)
                case events.NoteEnd(name):
                    if self._journal is not None:
                        self._journal.end(name)
                case events.Confirm(session, number):
                    self._told(session).confirmed.append(number)
                case events.Refuse(session, number, reason):
                    self._refuse(session, number, reason)
                case events.Grant(session, count):
                    self._told(session).granted += count
                case events.Lend(session, sequence, note_for):
                    if note_for is not None and self._journal is not None:
                        self._journal.own(note_for, sequence)
                    self._told(session).lent.append(sequence)
                case events.Finish(session):
                    self._told(session).finished = True
                case events.Drop(session, replaced):
                    peer = self._forget_peer(session)
                    if replaced:
                        reason = f"a later process of the name {peer.hello.name} has connected"
                        rejection = protocol.pack(protocol.REJECTED, reason[: protocol.MAX_REASON])
                        self._rejections.append((peer.routing_id, rejection))
                    else:
                        self._log.note(logging.WARNING, f"channel {self.config.name}: {peer} was silent for its lease")

    def _set_aside(self, sequence: int, deaths: int) -> None:
        origin, position, frames = self.set_aside[sequence] = self._records.pop(sequence)
        self._forgotten.append(sequence)
        where = "in memory; with `directory` it would outlive this host"
        if self.config.directory is not None:
            if self._aside is None:
                self._aside = Journal(self._aside_directory, self.config.sync)
            self._aside.put(sequence, origin, position, frames)
            where = str(self._aside_directory)
        logger.error(
            "channel %s: position %d of %s (record %d) is set aside, since %d processes died at it without acknowledging any "
            "record; the stream goes on without it, and it is kept %s",
            *(self.config.name, position, origin, sequence, deaths, where),
        )

    def _refuse(self, session: int, number: int, reason: str) -> None:
        self._told(session).refused.append((number, reason[: protocol.MAX_REASON]))
        self._log.note(
            logging.WARNING, f"channel {self.config.name}: refused a record of {self._peers[session]}: {reason}"
        )

    def _told(self, session: int) -> Peer:
        self._touched[session] = None
        return self._peers[session]

    # --- the end of a pass ---

    def _flush(self) -> None:
        """Writes the journal; waits while the disk is full, and the channel with it."""
        if self._journal is None:
            self._forgotten.clear()
            return
        if self._forgotten:
            self._journal.acknowledge(self._forgotten)
            self._forgotten = []
        deadline = time.monotonic() + DISK_PATIENCE_SECONDS
        while True:
            try:
                if self._aside is not None:
                    self._aside.flush()  # first: a record is in one of the two, whenever the host dies
                self._journal.flush()
            except OSError as error:
                self.trouble = (
                    f"cannot write the journal in {self.config.directory}: {error.strerror}; free space there"
                )
                self._log.note(logging.ERROR, f"channel {self.config.name}: {self.trouble}")
                if self._closing or time.monotonic() > deadline:
                    raise
                time.sleep(DISK_RETRY_SECONDS)
                continue
            self.trouble = ""
            return

    def _answer(self) -> None:
        for routing_id, frames in self._rejections:
            self._socket.send(routing_id, frames)
        self._rejections.clear()
        touched, self._touched = self._touched, {}
        lost = []
        for session in touched:
            peer = self._peers[session]
            if not all(self._socket.send(peer.routing_id, frames) for frames in self._told_to(peer)):
                lost.append(peer.routing_id)
        for routing_id in lost:  # afterwards: what follows from it has to be written down before it is told
            self._leave(routing_id)
        if self._lending.finished and not self.ended:
            self.ended = True
            self._over.set()

    def _told_to(self, peer: Peer) -> list[list[Buffer]]:
        welcome = [self._generation, self._lending.next_position(peer.hello.name), self.config.lease_seconds]
        return peer.take_messages(welcome, self._records, self._lending.floor)
