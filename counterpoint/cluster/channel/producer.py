"""The end that puts records into a channel: `ChannelProducer`, for plain threads.

A record is named by its origin and its position there. A source names its own (`source-0`, 0, 1, 2, ...) and goes on after a
restart from `next_position`; a stage between two channels passes on the name of the item that it made the record from
(`after=item`), so that the same record put twice, by whomever, is stored once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from counterpoint.cluster.calls.codec import encode
from counterpoint.cluster.channel import messages
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import LentRecord
from counterpoint.cluster.channel.end import End, Patience, event
from counterpoint.cluster.channel.messages import ChannelError, Framed, Head, Told, Who
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.rpc.connection import size_of

Stored = Future[None]
"""Done once the host has stored a record; raises `ChannelError` if it refuses it."""


class ChannelProducer(End):
    """Puts records. Each `timeout` is in seconds; None waits for as long as it takes.

    An array that was put must not change any more: it is sent by reference, and sent again to a host that was restarted.
    """

    def __init__(
        self, config: ChannelConfig, job_directory: Path, name: str, incarnation: int = 0, window: int = 256
    ) -> None:
        """Takes its name, which must be among `config.producers`. At most `window` records are unconfirmed at a time."""
        super().__init__(config, job_directory, Who(messages.PRODUCER, name, incarnation, time.time_ns()))
        self._window = window
        self._orders: dict[int, tuple[Framed, Stored]] = {}
        """All that the host has not answered."""
        self._unsent: deque[Framed] = deque()
        self._bytes_ahead = self._count = 0
        self.next_position = 0
        """The position of the next record of its own: after `open`, the lowest that the channel lacks."""
        self.has_ended = False
        """Whether its part of the stream has ended, as far as this process has done it."""

    @property
    def blocking(self) -> ChannelProducer:
        """This producer itself."""
        return self

    def put(self, value: object, after: LentRecord | None = None, timeout: float | None = None) -> None:
        """Puts a record and returns once the host has stored it. `after` is the item that it was made from.

        Raises `TypeError` for a value that cannot travel, `ValueError` for one too large, `ChannelError` if it is refused, and
        `TimeoutError`; the record may then be stored all the same, now or later.
        """
        patience = _patience(timeout)
        _settle(self._send(value, after, patience), patience)

    def send(self, value: object, after: LentRecord | None = None, timeout: float | None = None) -> Stored:
        """The same, but returns once the record is on its way; the answer is done once it is stored."""
        return self._send(value, after, _patience(timeout))

    def skip(self, after: LentRecord, timeout: float | None = None) -> None:
        """Says that nothing is made from an item, so that its position does not count as missing."""
        patience = _patience(timeout)
        _settle(self._queue(messages.SKIP, after, patience), patience)

    def flush(self, timeout: float | None = None) -> None:
        """Returns once everything sent is stored. Raises as `put`, for the first record that was refused."""
        self._flush(_patience(timeout))

    def end(self, timeout: float | None = None) -> None:
        """Ends this producer's part of the stream, after everything that was sent before is stored."""
        patience = _patience(timeout)
        self._flush(patience)
        _settle(self._queue(messages.END, None, patience), patience)

    def close(self) -> None:
        """Disconnects. What was not confirmed may be lost."""
        self._end()

    def __enter__(self) -> ChannelProducer:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, value: object, after: LentRecord | None, patience: Patience) -> Stored:
        frames = encode(value, "record")
        if (size := size_of(frames)) > (limit := self._config.max_record_bytes):
            raise ValueError(f"a record of {size} bytes; max_record_bytes of channel {self._config.name} is {limit}")
        return self._queue(messages.PUT, after, patience, frames)

    def _flush(self, patience: Patience) -> None:
        with self._lock:
            self._check()
            pending = [stored for _, stored in self._orders.values()]
        for stored in pending:
            _settle(stored, patience)

    def _queue(
        self, kind: messages.Kind, after: LentRecord | None, patience: Patience, frames: Sequence[Buffer] = ()
    ) -> Stored:
        """Queues an order once fewer than `window` wait for an answer."""
        while True:
            with self._lock:
                self._check()
                if len(self._orders) < self._window:
                    name = (self._who.name, self.next_position) if after is None else (after.origin, after.position)
                    order, stored = (Head(kind, self._count, *name, len(frames)), frames), event()
                    self._orders[self._count] = order, stored
                    self._unsent.append(order)
                    self._count += 1
                    self.next_position += after is None and kind == messages.PUT
                    break
                oldest = next(iter(self._orders.values()))[1]
            patience.wait(oldest)
        self._wake()
        return stored

    # --- the conversation's thread ---

    def _welcomed(self, told: Told) -> None:
        with self._lock:
            self._unsent, self._bytes_ahead = deque(order for order, _ in self._orders.values()), 0
            if not self._opened.done():
                self.next_position = told.next_position

    def _turn(self) -> tuple[Sequence[Head], Sequence[int], Sequence[Buffer]] | None:
        with self._lock:
            ahead = len(self._orders) - len(self._unsent)
            if ahead >= messages.RECORDS_AHEAD or self._bytes_ahead >= messages.BYTES_AHEAD:
                return None
            heads, frames = messages.take_batch(self._unsent)
            self._bytes_ahead += size_of(frames)
        return (heads, (), frames) if heads else None

    def _told(self, told: Told, frames: Sequence[Buffer]) -> None:
        for number, reason in (*((number, "") for number in told.confirmed), *told.refused):
            with self._lock:
                (head, frames), stored = self._orders.pop(number, ((None, ()), None))
                self._bytes_ahead -= size_of(frames)
            if head is None or stored is None:
                continue
            if reason:
                named = f"position {head.position} of {head.origin}"
                stored.set_exception(ChannelError(f"channel {self._config.name} refused {named}: {reason}"))
            else:
                self.has_ended |= head.kind == messages.END
                stored.set_result(None)

    def _fail(self, error: ChannelError) -> None:
        super()._fail(error)
        with self._lock:
            pending, self._orders = [*self._orders.values()], {}
        for _, stored in pending:
            stored.set_exception(ChannelError(str(error)))


def _patience(timeout: float | None) -> Patience:
    return Patience(timeout, "no room for another record, as the channel is full or its host away,")


def _settle(stored: Stored, patience: Patience) -> None:
    patience.wait(stored)
    stored.result()
