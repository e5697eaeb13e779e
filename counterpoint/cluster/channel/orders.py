"""What both sides of a producer share: its records until the host has confirmed them, and their way there.

`producer.py` has the two sides. An order is sent once the host has granted credit for it, and sent again in each new session
until it is confirmed.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.codec import encode
from counterpoint.cluster.channel import protocol
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import Item
from counterpoint.cluster.channel.link import ChannelError, HostLink
from counterpoint.cluster.channel.protocol import Hello, RecordHead
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.unpacked import shown

Stored = concurrent.futures.Future[None]
"""Done once the host has stored a record; raises `ChannelError` if it refuses it."""


def _future() -> concurrent.futures.Future[None]:
    """Returns a future that its waiters cannot cancel."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class _Order:
    """One message of the producer's until the host confirms it."""

    kind: bytes
    number: int
    origin: str
    position: int
    frames: Sequence[Buffer]
    size: int
    stored: Stored


class ProducerLink:
    """The orders of one producer, in their order. From any thread."""

    def __init__(self, config: ChannelConfig, job_directory: Path, name: str, incarnation: int, window: int) -> None:
        address, keys = config.endpoint(job_directory)
        self._config = config
        self._name = name
        self._lock = threading.Lock()
        self._queued: deque[_Order] = deque()
        self._unconfirmed: dict[int, _Order] = {}
        self._waiting_for_room: deque[concurrent.futures.Future[None]] = deque()
        self._room = window
        self._number = 0
        self._credit = 0
        self._wanted = 0
        self.next_position = 0
        self.failure: BaseException | None = None
        self.has_ended = False
        """Whether the host has confirmed the end of this producer's part of the stream."""
        self.opened = _future()
        hello = Hello(protocol.PRODUCER, name, incarnation, time.time_ns(), 1, False)
        self.link = HostLink(address, keys, hello, self, config.max_record_bytes)

    # --- any thread ---

    def room(self) -> concurrent.futures.Future[None] | None:
        """Takes room for one order; returns what to wait for if there is none yet."""
        with self._lock:
            self._check()
            if self._room:
                self._room -= 1
                return None
            waiter = _future()
            self._waiting_for_room.append(waiter)
            return waiter

    def give_room_back(self, waiter: concurrent.futures.Future[None]) -> None:
        """Frees the room of a waiter that was given up."""
        if waiter.exception() is None:
            self._free()

    def put(self, frames: Sequence[Buffer], after: Item | None) -> Stored:
        """Queues a record, for which there is room."""
        with self._lock:
            origin, position = (after.origin, after.position) if after is not None else (self._name, self.next_position)
            stored = self._queue(protocol.PUT, origin, position, frames)
            if after is None:
                self.next_position += 1
            return stored

    def skip(self, after: Item) -> Stored:
        """Queues a skip, for which there is room."""
        with self._lock:
            return self._queue(protocol.SKIP, after.origin, after.position, [b""])

    def end(self) -> Stored:
        """Queues the end, for which there is room."""
        with self._lock:
            return self._queue(protocol.END, self._name, 0, ())

    def encoded(self, value: object) -> list[Buffer]:
        """Returns the frames of a record. Raises `TypeError` for what cannot travel, `ValueError` for what is too large."""
        frames = encode(value, "record")
        size = sum(as_bytes_view(frame).nbytes for frame in frames)
        if size > self._config.max_record_bytes:
            limit = self._config.max_record_bytes
            raise ValueError(f"a record of {size} bytes; max_record_bytes of channel {self._config.name} is {limit}")
        return frames

    def pending(self) -> list[Stored]:
        """What the host has not confirmed yet."""
        with self._lock:
            self._check()
            return [order.stored for order in (*self._unconfirmed.values(), *self._queued)]

    def _queue(self, kind: bytes, origin: str, position: int, frames: Sequence[Buffer]) -> Stored:
        self._check()
        size = sum(as_bytes_view(frame).nbytes for frame in frames)
        stored = _future()
        self._queued.append(_Order(kind, self._number, origin, position, frames, size, stored))
        self._number += 1
        self.link.wake()
        return stored

    def _check(self) -> None:
        if self.failure is not None:
            raise ChannelError(str(self.failure)) from self.failure

    # --- the link's thread ---

    def welcomed(self, generation: str, next_position: int) -> None:
        """See `Owner`."""
        with self._lock:
            self._queued.extendleft(reversed(self._unconfirmed.values()))
            self._unconfirmed = {}
            self._credit = self._wanted = 0
            if not self.opened.done():
                self.next_position = next_position
        if not self.opened.done():
            self.opened.set_result(None)

    def receive(self, kind: bytes, header: Any, frames: Sequence[Buffer]) -> None:
        """See `Owner`."""
        match kind, header:
            case protocol.CONFIRM, _:
                for number in protocol.numbers_of(header):
                    self._settle(number, None)
            case protocol.REFUSE, [int(number), str(reason)]:
                self._settle(number, reason)
            case protocol.GRANT, int(count) if protocol.number(count):
                with self._lock:
                    self._credit += count
                    self._wanted = max(0, self._wanted - count)
            case _:
                raise CodecError(f"kind {kind!r} with header {shown(header)} is not for a producer")

    def _settle(self, number: int, reason: str | None) -> None:
        with self._lock:
            order = self._unconfirmed.pop(number, None)
        if order is None:
            return
        if reason is None:
            self.has_ended |= order.kind == protocol.END
            order.stored.set_result(None)
        else:
            named = f"position {order.position} of {order.origin}"
            order.stored.set_exception(ChannelError(f"channel {self._config.name} refused {named}: {reason}"))
        self._free()

    def _free(self) -> None:
        with self._lock:
            waiter = self._waiting_for_room.popleft() if self._waiting_for_room else None
            if waiter is None:
                self._room += 1
        if waiter is not None:
            waiter.set_result(None)

    def pump(self) -> None:
        """See `Owner`."""
        while self._pump_one():
            pass

    def _pump_one(self) -> bool:
        """Sends one message, of as many orders of a kind as fit. Returns whether there may be another."""
        with self._lock:
            batch = self._take_batch()
            puts = sum(order.kind == protocol.PUT for order in self._queued)
            wanted = puts - self._credit - self._wanted
            self._wanted += max(0, wanted)
        if wanted > 0:
            self.link.send(protocol.pack(protocol.WANT, wanted))
        if not batch:
            return False
        if batch[0].kind == protocol.END:
            self.link.send(protocol.pack(protocol.END, batch[0].number))
        else:
            heads = [
                (RecordHead(each.number, each.origin, each.position, len(each.frames)), each.frames) for each in batch
            ]
            self.link.send(protocol.pack_records(batch[0].kind, heads))
        return True

    def _take_batch(self) -> list[_Order]:
        batch: list[_Order] = []
        size = 0
        while self._queued and len(batch) < protocol.RECORDS_AT_ONCE and size < protocol.BYTES_AT_ONCE:
            order = self._queued[0]
            if batch and (order.kind != batch[0].kind or order.kind == protocol.END):
                break
            if order.kind == protocol.PUT:
                if not self._credit:
                    break
                self._credit -= 1
            if order.kind == protocol.END and self._unconfirmed:
                break  # what was put before must be stored before the end counts
            batch.append(self._queued.popleft())
            self._unconfirmed[order.number] = order
            size += order.size
        return batch

    def fail(self, error: BaseException) -> None:
        """See `Owner`."""
        with self._lock:
            self.failure = error
            orders = [*self._unconfirmed.values(), *self._queued]
            futures = [*(order.stored for order in orders), *self._waiting_for_room]
            self._unconfirmed, self._queued, self._waiting_for_room = {}, deque(), deque()
        if not self.opened.done():
            futures.append(self.opened)
        for future in futures:
            future.set_exception(ChannelError(str(error)))
