"""The end that takes records from a channel: `ChannelConsumer`, for an event loop (`async for`) and for plain threads (`for`).

An item stays lent to this consumer until it is acknowledged, and is lent again if this consumer dies first. A consumer that
must not count a record twice is `sticky`, so that its records come back to its own name only, and gives the positions that it
has committed (`exactly_once.py`): those are acknowledged without being shown again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.codec import decode
from counterpoint.cluster.channel import protocol
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.exactly_once import CommittedPositions
from counterpoint.cluster.channel.link import ChannelError, HostLink
from counterpoint.cluster.channel.protocol import Hello
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.unpacked import shown

logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A record that is lent to this consumer."""

    sequence: int
    """The channel's number for it, the same whenever it comes again."""
    origin: str
    """The producer whose record it is, or was made from."""
    position: int
    """Its place among those of its origin."""
    value: Any
    """The record. Arrays are views of what was received, and cannot be written to."""
    _consumer: ChannelConsumer = field(repr=False)
    generation: str = field(repr=False)
    """The channel's generation: another one gives the same numbers to other records."""

    def acknowledge(self) -> None:
        """Tells the host that the record is done with; from any thread. Call it after the record's effect is stored."""
        self._consumer.acknowledge(self.sequence, self.generation)


class ChannelConsumer:
    """Takes records. Iteration ends with the stream: when all producers have ended and every record is acknowledged.

    An iterator therefore waits while other consumers, or this one, hold records: acknowledge what you have before you ask for
    more than `credit` records.
    """

    def __init__(
        self,
        config: ChannelConfig,
        job_directory: Path,
        name: str,
        incarnation: int = 0,
        credit: int = 16,
        sticky: bool = False,
        committed: CommittedPositions | None = None,
    ) -> None:
        """Takes its name, unique among the channel's consumers. It holds at most `credit` records at a time."""
        address, keys = config.endpoint(job_directory)
        self._channel = config.name
        self._committed = committed
        self._condition = threading.Condition()
        self._items: deque[Item] = deque()
        self._waiters: deque[concurrent.futures.Future[None]] = deque()
        self._held: set[int] = set()
        """Records that this end was given and has not acknowledged."""
        self._acknowledged: set[int] = set()
        """Records that a restarted host may give again, since it did not get their acknowledgement: those above its floor."""
        self._floor = 0
        self._generation = ""
        """The host's generation that numbered these records."""
        self._done: list[int] = []
        """Acknowledgements to be sent."""
        self._finished = False
        self._failure: BaseException | None = None
        self.poisoned = 0
        """Records that could not be decoded; they were logged, acknowledged and dropped."""
        hello = Hello(protocol.CONSUMER, name, incarnation, time.time_ns(), credit, sticky)
        self._link = HostLink(address, keys, hello, self, config.max_record_bytes)

    # --- any thread ---

    def open(self, timeout: float = OPEN_SECONDS) -> None:
        """Connects and waits for the host. `start` alone need not wait. Raises `TimeoutError` or `ChannelError`."""
        self.start()
        if not self._link.opened.wait(timeout):
            raise TimeoutError(self._link.silence(timeout))
        self._check()

    def start(self) -> None:
        """Begins to connect. Once only."""
        self._link.start()

    def acknowledge(self, sequence: int, generation: str) -> None:
        """See `Item.acknowledge`. A host of another `generation` has not lent this record, and gets nothing."""
        with self._condition:
            if generation == self._generation and sequence in self._held:
                self._acknowledged.add(sequence)  # first: the link's thread looks at both
                self._held.discard(sequence)
                self._done.append(sequence)
        self._link.wake()

    def get(self, timeout: float | None = None) -> Item | None:
        """Waits for the next item, in a plain thread; None at the end of the stream. Raises `TimeoutError`, `ChannelError`."""
        with self._condition:
            if not self._condition.wait_for(self._is_decided, timeout):
                raise TimeoutError(f"no record came from channel {self._channel} within {timeout} s")
            return self._next()

    def take_ready(self, count: int) -> list[Item]:
        """Returns at most `count` items that are there already, without waiting, such as the rest of a batch."""
        with self._condition:
            return [self._items.popleft() for _ in range(min(count, len(self._items)))]

    async def get_async(self) -> Item | None:
        """Waits for the next item, on an event loop; None at the end of the stream. Raises `ChannelError`."""
        while True:
            with self._condition:
                if self._is_decided():
                    return self._next()
                waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
                self._waiters.append(waiter)
            try:
                await asyncio.wrap_future(waiter)
            except asyncio.CancelledError:
                with self._condition:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                raise

    def __iter__(self) -> Iterator[Item]:
        while (item := self.get()) is not None:
            yield item

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self.get_async()) is not None:
            yield item

    def close(self) -> None:
        """Disconnects, after the acknowledgements were sent. What is not acknowledged is lent again."""
        self._link.close()

    def _exit(self, raised: type[BaseException] | None) -> None:
        # An error ends the consumer as its death does, since the record that it was at may be the reason.
        self._link.close(failed=raised is not None and issubclass(raised, Exception))

    def __enter__(self) -> ChannelConsumer:
        self.start()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self._exit(raised)

    async def __aenter__(self) -> ChannelConsumer:
        self.start()
        return self

    async def __aexit__(self, raised: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self._exit, raised)

    def _is_decided(self) -> bool:
        return bool(self._items) or self._finished or self._failure is not None

    def _next(self) -> Item | None:
        if self._items:
            return self._items.popleft()
        self._check()
        return None

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelError(str(self._failure)) from self._failure

    # --- the link's thread ---

    def welcomed(self, generation: str, next_position: int) -> None:
        """See `Owner`."""
        with self._condition:
            if generation != self._generation:
                self._generation, self._floor = generation, 0
                self._held.clear()
                self._acknowledged.clear()
                self._done.clear()
        if self._committed is not None:
            self._committed.begin(self._channel, generation)

    def receive(self, kind: bytes, header: Any, frames: Sequence[Buffer]) -> None:
        """See `Owner`."""
        match kind:
            case protocol.DELIVER:
                floor, records = protocol.records_of(header, frames)
                self._take(records, floor)
            case protocol.FINISH:
                with self._condition:
                    self._finished = True
                    self._notify()
            case _:
                raise CodecError(f"kind {kind!r} with header {shown(header)} is not for a consumer")

    def _take(self, records: Sequence[tuple[protocol.RecordHead, Sequence[Buffer]]], floor: int) -> None:
        items = []
        for head, frames in records:
            if head.number in self._held:
                continue  # the host was restarted, or took us for dead; whoever holds the item acknowledges it
            if head.number in self._acknowledged:
                self._done.append(head.number)  # the host was restarted before it came
                continue
            if self._committed is not None and self._committed.contains(self._channel, head.number):
                self._done.append(head.number)  # committed before this process died, and not acknowledged
                continue
            try:
                value = decode(frames)
            except CodecError as error:
                self.poisoned += 1
                self._done.append(head.number)
                logger.warning(
                    "channel %s: dropped position %d of %s: %s", self._channel, head.position, head.origin, error
                )
                continue
            items.append(Item(head.number, head.origin, head.position, value, self, self._generation))
        with self._condition:
            if self._committed is not None:
                self._committed.forget_below(self._channel, floor)
            if floor > self._floor:
                self._floor = floor
                self._acknowledged = {number for number in self._acknowledged if number >= floor}
            self._held.update(item.sequence for item in items)
            self._items += items
            self._notify()

    def _notify(self) -> None:
        self._condition.notify_all()
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def pump(self) -> None:
        """See `Owner`."""
        with self._condition:
            done, self._done = self._done, []
        for start in range(0, len(done), protocol.MAX_RECORDS):
            self._link.send(protocol.pack(protocol.ACKNOWLEDGE, done[start : start + protocol.MAX_RECORDS]))

    def fail(self, error: BaseException) -> None:
        """See `Owner`."""
        with self._condition:
            self._failure = error
            self._notify()
        self._link.opened.set()
