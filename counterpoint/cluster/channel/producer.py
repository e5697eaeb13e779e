"""The end that puts records into a channel: `ChannelProducer` for an event loop, its `blocking` side for plain threads.

A record is named by its origin and its position there. A source names its own (`source-0`, 0, 1, 2, ...) and goes on after a
restart from `next_position`; a stage between two channels passes on the name of the item that it made the record from
(`after=item`), so that the same record put twice, by whomever, is stored once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from pathlib import Path

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import Item
from counterpoint.cluster.channel.orders import ProducerLink, Stored

OPEN_SECONDS = 60.0


class ChannelProducer:
    """Puts records, on an event loop; `blocking` does the same for plain threads.

    An array that was put must not change any more: it is sent by reference, and sent again to a host that was restarted.
    """

    def __init__(
        self, config: ChannelConfig, job_directory: Path, name: str, incarnation: int = 0, window: int = 256
    ) -> None:
        """Takes its name, which must be among `config.producers`. At most `window` records are unconfirmed at a time."""
        self._link = ProducerLink(config, job_directory, name, incarnation, window)
        self.blocking = BlockingProducer(self._link)

    @property
    def next_position(self) -> int:
        """The position of the next record of its own: after `open`, the lowest that the channel lacks."""
        return self._link.next_position

    @property
    def has_ended(self) -> bool:
        """Whether its part of the stream has ended, as far as this process has done it."""
        return self._link.has_ended

    async def open(self, timeout: float = OPEN_SECONDS) -> None:
        """Connects. Raises `TimeoutError` if no host answers, `ChannelError` if it refuses this producer."""
        self._link.link.start()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._link.opened)), timeout)
        except TimeoutError:
            raise TimeoutError(self._link.link.silence(timeout)) from None

    async def put(self, value: object, after: Item | None = None) -> None:
        """Puts a record and returns once the host has stored it. `after` is the item that it was made from.

        Raises `TypeError` for a value that cannot travel, `ValueError` for one too large, `ChannelError` if it is refused.
        """
        await _wait(await self.send(value, after))

    async def send(self, value: object, after: Item | None = None) -> Stored:
        """The same, but returns once the record is on its way; the answer is done once it is stored."""
        frames = self._link.encoded(value)
        await self._room()
        return self._link.put(frames, after)

    async def skip(self, after: Item) -> None:
        """Says that nothing is made from an item, so that its position does not count as missing."""
        await self._room()
        await _wait(self._link.skip(after))

    async def flush(self) -> None:
        """Returns once everything sent is stored. Raises as `put`, for the first record that was refused."""
        for stored in self._link.pending():
            await _wait(stored)

    async def end(self) -> None:
        """Ends this producer's part of the stream, after everything that was sent before is stored."""
        await self._room()
        await _wait(self._link.end())

    async def close(self) -> None:
        """Disconnects. What was not confirmed may be lost."""
        await asyncio.to_thread(self._link.link.close)

    async def __aenter__(self) -> ChannelProducer:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _room(self) -> None:
        waiter = self._link.room()
        if waiter is not None:
            try:
                await _wait(waiter)
            except asyncio.CancelledError:
                waiter.add_done_callback(self._link.give_room_back)
                raise


async def _wait(future: concurrent.futures.Future[None]) -> None:
    await asyncio.wrap_future(future)


class BlockingProducer:
    """`ChannelProducer` for plain threads. `timeout` is in seconds; None waits for as long as it takes."""

    def __init__(self, link: ProducerLink) -> None:
        self._link = link

    @property
    def next_position(self) -> int:
        """See `ChannelProducer`."""
        return self._link.next_position

    def open(self, timeout: float = OPEN_SECONDS) -> None:
        """See `ChannelProducer`."""
        self._link.link.start()
        try:
            self._link.opened.result(timeout)
        except TimeoutError:
            raise TimeoutError(self._link.link.silence(timeout)) from None

    def put(self, value: object, after: Item | None = None, timeout: float | None = None) -> None:
        """See `ChannelProducer`. Raises `TimeoutError`, too; the record may be stored all the same, then or later."""
        self.send(value, after, timeout).result(timeout)

    def send(self, value: object, after: Item | None = None, timeout: float | None = None) -> Stored:
        """See `ChannelProducer`."""
        frames = self._link.encoded(value)
        self._room(timeout)
        return self._link.put(frames, after)

    def skip(self, after: Item, timeout: float | None = None) -> None:
        """See `ChannelProducer`."""
        self._room(timeout)
        self._link.skip(after).result(timeout)

    def flush(self, timeout: float | None = None) -> None:
        """See `ChannelProducer`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for stored in self._link.pending():
            stored.result(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def end(self, timeout: float | None = None) -> None:
        """See `ChannelProducer`."""
        self._room(timeout)
        self._link.end().result(timeout)

    def close(self) -> None:
        """See `ChannelProducer`."""
        self._link.link.close()

    def __enter__(self) -> BlockingProducer:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _room(self, timeout: float | None) -> None:
        waiter = self._link.room()
        if waiter is not None:
            try:
                waiter.result(timeout)
            except TimeoutError:
                waiter.add_done_callback(self._link.give_room_back)
                raise TimeoutError(f"no room for another record within {timeout} s: the channel is full") from None
