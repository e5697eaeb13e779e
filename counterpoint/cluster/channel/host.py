"""The host of a channel: a thread that stores what producers put, and lends it to consumers.

`queue.py` decides; this module keeps the journal and talks. What has come is decided, the journal is written once, and only then
is anybody answered, so that nobody is told of what a death could still undo. A host may live in any worker. A role that only
hosts says `worker = "counterpoint.cluster:HostWorker"`, with the channels as tables in its `config`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from counterpoint.cluster.channel import messages
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.end import CLOSE_SECONDS, MAX_ASKS
from counterpoint.cluster.channel.journal import StateJournal
from counterpoint.cluster.channel.messages import ChannelError, ChannelTurn, Framed, Head, Told, Who, pack, unpack
from counterpoint.cluster.channel.queue import ChannelSession, Queue, QueuedRecord, QueueState
from counterpoint.cluster.member import Stage
from counterpoint.cluster.spec import role_of
from counterpoint.cluster.worker import Context, Worker
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.config import Config
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.permanent_errors import DISK_FULL, is_disk_full
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.rpc.connection import Connection, PeerAsk, size_of
from counterpoint.transport.rpc.curve import CurveListener
from counterpoint.transport.rpc.loop_thread import LoopThread
from counterpoint.transport.rpc.stream import UnixListener
from counterpoint.transport.wires.endpoint import IPC
from counterpoint.transport.wires.listener_keys import listener_keys

logger = logging.getLogger(__name__)

MAX_PEERS = 4096
STOP_POLL_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Peer(ChannelSession):
    """A session with its number and the turns that are open."""

    number: int = 0
    connection: Connection | None = None
    """The one by which it was begun: each has one session at a time, so that no end takes the places of others."""
    heard: float = 0.0
    turns: deque[PeerAsk] = field(default_factory=deque)
    is_new: bool = True
    """Whether it has not been told its number."""

    def has_news(self) -> bool:
        """Whether there is something to tell, and a turn to be answered: another one stays open."""
        is_news = self.is_new or self.finished or bool(self.confirmed or self.refused or self.lent)
        return is_news and len(self.turns) > (not self.is_new)


class ChannelHost:
    """Hosts one channel from `start` to `close`."""

    def __init__(self, config: ChannelConfig, job_directory: Path) -> None:
        """Takes the address, and what an earlier host left in `config.directory`.

        Raises `ValueError` for a configuration that cannot be, `OSError` when another process hosts the channel,
        `DamagedJournal`.
        """
        self.config = config
        self.address, _ = config.endpoint(job_directory)
        self._keys = listener_keys(config.transport())
        self.garbage = 0
        """Asks that were refused because they made no sense."""
        self.failure: BaseException | None = None
        """Why it ended, if it did before `close`."""
        self._over = threading.Event()
        self._lock = -1
        self._journal: StateJournal | None = None
        try:
            if self.address.startswith(IPC):  # a socket file that is there is replaced, be it stale or not
                taken = f"cannot listen at {self.address}: another host of the channel does"
                self._lock = take_lock(Path(f"{self.address.removeprefix(IPC)}.lock"), taken)
            if config.directory is not None:
                self._journal = StateJournal(job_directory / config.directory, config.sync)
        except BaseException:
            self._free()
            raise
        state = self._journal.state if self._journal is not None else QueueState(secrets.token_hex(8))
        self._queue = Queue(config.capacity, config.producers, config.max_deaths, state)
        self._numbers = itertools.count(secrets.randbits(60))
        self._log = RateLimitedLog(logger)
        self._loop: LoopThread | None = None
        self._listener: UnixListener | CurveListener | None = None
        self._has_pass = False

    def start(self) -> None:
        """Begins to serve. Once only. Raises `OSError` if it cannot listen."""
        self._loop = LoopThread(f"channel-{self.config.name}")
        try:
            self._loop.run(self._listen()).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops serving and frees everything. With a journal, another host can go on. Safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self._end()).result()
            loop.close(CLOSE_SECONDS)
        self._free()

    def _free(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the stream has ended; returns whether it has. Raises `ChannelError` if the host has failed."""
        self._over.wait(timeout)
        if self.failure is not None:
            raise ChannelError(f"the host of channel {self.config.name} failed: {self.failure}") from self.failure
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""
        return self._over.is_set() and self.failure is None

    @property
    def set_aside(self) -> dict[int, QueuedRecord]:
        """The records that were set aside since their consumers died, by sequence number."""
        return self._queue.state.aside

    @property
    def unended(self) -> frozenset[str]:
        """The producers that have not ended their parts of the stream. From any thread."""
        return self._queue.producers - self._queue.state.ended

    def status(self) -> str:
        """Returns one line for people. From any thread."""
        state = "ended" if self.ended else f"{len(self._queue.state.kept)} of {self.config.capacity} records"
        if not self.ended and not any(kind == messages.CONSUMER for kind, _ in [*self._queue.sessions]):
            state += ", no consumer"
        for record in [*self.set_aside.values()][:1]:
            state += f", {len(self.set_aside)} set aside, such as position {record.position}"
        return f"{self.config.name}: {state}"

    def __enter__(self) -> ChannelHost:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    async def _listen(self) -> None:
        limits = MAX_ASKS, self.config.max_record_bytes
        if self._keys is None:
            self._listener = listener = UnixListener(self._on_ask, *limits)
            await listener.start(self.address.removeprefix(IPC))
        else:
            self._listener = CurveListener(self.address, self._keys.value.own, self._on_ask, *limits)
            self._listener.authorize([*self._keys.value.authorized])
        self._tick()
        self._plan_pass()

    async def _end(self) -> None:
        for peer in self._peers:
            self._end_turns(peer)
        if self._listener is not None:
            self._listener.close()

    @property
    def _peers(self) -> list[_Peer]:
        return [peer for peer in self._queue.sessions.values() if isinstance(peer, _Peer)]

    def _tick(self) -> None:
        """Answers a turn of who was not heard for a while, and drops who was not heard for its lease."""
        now, lease = time.monotonic(), self.config.lease_seconds
        for peer in self._peers:
            if now - peer.heard > lease:
                self._log.note(logging.WARNING, f"channel {self.config.name}: {peer} was silent for its lease")
                self._leave(peer, failed=True)
            elif now - peer.heard > lease / 4 and len(peer.turns) > 1:
                peer.turns.popleft().answer(pack(self._told(peer)))
        if self._keys is not None and self._keys.refresh() and isinstance(self._listener, CurveListener):
            self._listener.authorize([*self._keys.value.authorized])
        asyncio.get_running_loop().call_later(min(0.5, lease / 8), self._tick)

    # --- what ends ask ---

    def _on_ask(self, ask: PeerAsk) -> None:
        try:
            turn, frames = unpack(ask.frames, ChannelTurn)
            self._take(ask, turn, messages.with_frames(turn.heads, frames))
        except CodecError as error:
            self.garbage += 1
            ask.fail("garbage", str(error))
            self._log.note(logging.WARNING, f"channel {self.config.name}: refused an ask: {error}")
        except Exception as error:  # noqa: BLE001 - kept for the owner, and the host ends
            self._fail(error)

    def _take(self, ask: PeerAsk, turn: ChannelTurn, orders: Sequence[Framed]) -> None:
        peer = self._queue.sessions.get((turn.who.kind, turn.who.name))
        assert peer is None or isinstance(peer, _Peer)
        if not turn.session:
            if reason := self._objection(turn.who, peer, ask.connection):
                self._log.note(logging.WARNING, f"channel {self.config.name}: refused {turn.who.name!r}: {reason}")
                ask.fail(messages.REJECTED, reason)
                return
            if peer is not None and peer.who.started == turn.who.started:
                self._end_turns(peer)  # the same end has connected again
            elif peer is not None:
                self._end_turns(peer, messages.REJECTED, f"a later process of the name {turn.who.name} has connected")
            peer = _Peer(turn.who, number=next(self._numbers), connection=ask.connection)
            self._queue.join(peer)
        elif peer is None or peer.number != turn.session:
            ask.fail("unknown", "the session is over")
            return
        elif turn.who.kind == messages.CONSUMER:
            self._queue.acknowledge(peer, turn.done)
        else:
            self._order(peer, orders)
        if turn.leaving:
            ask.answer(pack(self._told(peer)))
            self._leave(peer, turn.leaving == "failed")
            return
        peer.heard, ask.on_cancel = time.monotonic(), partial(self._leave, peer, failed=True)
        peer.turns.append(ask)
        self._queue.told[peer] = None
        self._plan_pass()

    def _objection(self, who: Who, present: ChannelSession | None, connection: Connection) -> str:
        if who.kind == messages.PRODUCER and who.name not in self._queue.producers:
            return f"{who.name} is not among the channel's producers: {', '.join(self.config.producers)}"
        if present is not None and (who.incarnation, who.started) < (present.who.incarnation, present.who.started):
            return f"a later process of the name {who.name} is connected; this one is out of date and must end"
        if present is None and len(self._queue.sessions) >= MAX_PEERS:
            return f"{MAX_PEERS} ends are connected, which is the most"
        others = (peer for peer in self._peers if peer.connection is connection and peer is not present)
        if (other := next(others, None)) is not None:
            return f"its connection has a session of {other} already"
        return ""

    def _order(self, peer: _Peer, orders: Sequence[Framed]) -> None:
        limit, ahead = self.config.max_record_bytes, sum(size_of(frames) for _, frames in [*peer.waiting, *orders])
        if len(peer.waiting) + len(orders) > 2 * messages.RECORDS_AHEAD or ahead > 2 * messages.BYTES_AHEAD + limit:
            raise CodecError(f"{peer} sends {ahead} bytes ahead of the answers")
        for head, frames in orders:
            if (size := size_of(frames)) > limit:
                reason = f"{size} bytes; max_record_bytes of channel {self.config.name} is {limit}"
                peer.refused.append((head.number, reason))
            else:
                self._queue.order(peer, head, frames)

    def _leave(self, peer: _Peer, failed: bool) -> None:
        if self._queue.sessions.get((peer.who.kind, peer.who.name)) is peer:
            self._end_turns(peer)
            self._queue.leave(peer, failed)
            self._plan_pass()

    def _end_turns(self, peer: _Peer, kind: str = "unknown", reason: str = "the session is over") -> None:
        while peer.turns:
            ask = peer.turns.popleft()
            ask.on_cancel = None
            ask.fail(kind, reason)

    # --- a pass: written down, and then told ---

    def _plan_pass(self) -> None:
        if not self._has_pass:
            self._has_pass = True
            asyncio.get_running_loop().call_later(0.0, self._pass)

    def _pass(self) -> None:
        self._has_pass = False
        if self.failure is not None:
            return  # nothing may follow what was not written
        try:
            self._write()
            told, self._queue.told = self._queue.told, {}
            for peer in told:
                assert isinstance(peer, _Peer)
                self._tell(peer)
            if self._queue.finished:
                self._over.set()
        except Exception as error:  # noqa: BLE001 - likewise
            self._fail(error)

    def _write(self) -> None:
        """Writes down what has changed. Raises `OSError` if the disk does not take it."""
        notes, self._queue.notes = self._queue.notes, []
        if self._journal is not None:
            try:
                self._journal.append(notes)
            except OSError as error:
                where = f"cannot write the journal in {self.config.directory}"
                raise OSError(error.errno, f"{where}: {error.strerror}; free space there") from error
        for change, _ in notes:
            if change[0] == "aside":
                record = self.set_aside[change[1]]
                logger.error(
                    "channel %s: position %d of %s (record %d) is set aside, since %d processes died at it without acknowledging "
                    "any record; the stream goes on without it, and it is kept in %s",
                    *(self.config.name, record.position, record.origin, change[1], self.config.max_deaths),
                    self.config.directory or "memory: with `directory` it would outlive this host",
                )

    def _tell(self, peer: _Peer) -> None:
        """Answers the session's turns while there is something to tell."""
        kept = self._queue.state.kept
        lent = deque(
            (Head(messages.PUT, number, record.origin, record.position, len(record.frames)), record.frames)
            for number in peer.lent
            if (record := kept.get(number)) is not None  # not acknowledged since
        )
        while peer.has_news():
            heads, frames = messages.take_batch(lent)
            told = self._told(peer, peer.confirmed, peer.refused, heads, self._queue.floor, peer.finished and not lent)
            peer.turns.popleft().answer(pack(told, frames))
            peer.confirmed, peer.refused, peer.lent = [], [], [head.number for head, _ in lent]
            peer.is_new, peer.finished = False, peer.finished and bool(lent)
        while len(peer.turns) > messages.TURNS:
            peer.turns.popleft().answer(pack(self._told(peer)))

    def _told(self, peer: _Peer, *news: Any) -> Told:
        return Told(peer.number, self._queue.state.generation, self._queue.next_position(peer.who.name), *news)

    def _fail(self, error: Exception) -> None:
        logger.error("the host of channel %s failed", self.config.name, exc_info=error)
        self.failure = error
        self._over.set()
        self._ending = asyncio.get_running_loop().create_task(self._end())


class HostConfig(Config):
    """The `config` of a role that hosts channels."""

    channels: tuple[ChannelConfig, ...] = Field(min_length=1)
    """The channels, spread over the role's workers: the first one's host is rank 0, and so on, beginning again at rank 0."""


class HostWorker(Worker):
    """Hosts its share of the channels until the job stops. A service: peers may come back after a stream has ended."""

    def __init__(self, context: Context) -> None:
        """Reads the configuration."""
        super().__init__(context)
        channels = HostConfig.model_validate(dict(context.config)).channels
        self._channels = channels[context.rank :: context.count]
        self._hosts: list[ChannelHost] = []

    def setup(self) -> None:
        """Takes the addresses and what an earlier incarnation left in the journals."""
        for config in self._channels:
            self._hosts.append(ChannelHost(config, Path(self.context.directory)))
            self._hosts[-1].start()

    def status(self) -> str:
        """Returns each channel's records, and what keeps it from its work."""
        return ", ".join(host.status() for host in self._hosts)

    def start(self) -> None:
        """Serves until the job stops. When a host fails, the worker is created again; at no cost after a full disk.

        Stops the job when a stream can never end: its consumers would wait for ever.
        """
        try:
            self._serve()
        except ChannelError as error:
            if is_disk_full(error):
                sys.exit(DISK_FULL)
            raise

    def _serve(self) -> None:
        while not self.context.stop.wait(STOP_POLL_SECONDS):
            for host in self._hosts:
                if not host.wait(0.0) and (gone := self._gone(host.unended)) is not None:
                    self.context.stop_job(
                        f"channel {host.config.name} never ends: its producer {gone} has finished, and its host has not been "
                        "told of its `end`, or has lost it, as one without `directory` does when it dies",
                        code=1,
                    )

    def _gone(self, missing: frozenset[str]) -> str | None:
        """Returns a producer that will not end its part of a stream any more."""
        members = [each for role in {*map(role_of, missing)} for each in self.context.get_nodes_by_role(role)]
        return next((each.worker for each in members if each.worker in missing and each.stage is Stage.FINISH), None)

    def stop(self) -> None:
        """Frees the addresses and the journals."""
        for host in self._hosts:
            host.close()
