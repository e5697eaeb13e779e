"""The end that takes records from a channel: `ChannelConsumer`, for plain threads.

An item stays lent to this consumer until it is acknowledged, and is lent again if this consumer dies first. A consumer that
must not count a record twice is `sticky`, so that its records come back to its own name only, and gives the positions that it
has committed (`exactly_once.py`): those are acknowledged without being shown again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.codec import decode
from counterpoint.cluster.channel import messages
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.end import End, Patience, event
from counterpoint.cluster.channel.exactly_once import CommittedPositions
from counterpoint.cluster.channel.messages import ChannelError, Head, Told, Who, with_frames
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LentRecord:
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


class ChannelConsumer(End):
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
        who = Who(messages.CONSUMER, name, incarnation, time.time_ns(), credit, sticky)
        super().__init__(config, job_directory, who)
        self._committed = CommittedPositions() if committed is None else committed
        """What was acknowledged, too: a host that was killed before it was told lends it again."""
        self._items: deque[LentRecord] = deque()
        self._changed = event()
        """Done, and another, when there is something for whoever waits."""
        self._held: set[int] = set()
        """Records that this end was given and has not acknowledged."""
        self._generation = ""
        """The host's generation that numbered these records."""
        self._done: list[int] = []
        """Acknowledgements to be sent."""
        self._finished = False
        self.poisoned = 0
        """Records that could not be decoded; they were logged, acknowledged and dropped."""

    def acknowledge(self, sequence: int, generation: str) -> None:
        """See `LentRecord.acknowledge`. A host of another `generation` has not lent this record, and gets nothing."""
        with self._lock:
            if generation == self._generation and sequence in self._held:
                self._committed.add(self._config.name, generation, sequence)
                self._held.discard(sequence)
                self._done.append(sequence)
        self._wake()

    def get(self, timeout: float | None = None) -> LentRecord | None:
        """Waits for the next item; None at the end of the stream. Raises `TimeoutError`, `ChannelError`."""
        patience = Patience(timeout, f"no record came from channel {self._config.name}")
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._check()
                if self._finished:
                    return None
                changed = self._changed
            patience.wait(changed)

    def take_ready(self, count: int) -> list[LentRecord]:
        """Returns at most `count` items that are there already, without waiting, such as the rest of a batch."""
        with self._lock:
            return [self._items.popleft() for _ in range(min(count, len(self._items)))]

    def close(self) -> None:
        """Disconnects, after the acknowledgements were sent. What is not acknowledged is lent again."""
        self._end()

    def __iter__(self) -> Iterator[LentRecord]:
        while (item := self.get()) is not None:
            yield item

    def __enter__(self) -> ChannelConsumer:
        self.start()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        # An error ends the consumer as its death does, since the record that it was at may be the reason.
        self._end(failed=raised is not None and issubclass(raised, Exception))

    # --- the conversation's thread ---

    def _welcomed(self, told: Told) -> None:
        with self._lock:
            if told.generation != self._generation:
                self._generation = told.generation
                self._held.clear()
                self._done.clear()
            self._committed.begin(self._config.name, told.generation)

    def _turn(self) -> tuple[Sequence[Head], Sequence[int], Sequence[Buffer]] | None:
        with self._lock:
            done, self._done = self._done[: messages.MAX_RECORDS], self._done[messages.MAX_RECORDS :]
        return ((), done, ()) if done else None

    def _told(self, told: Told, frames: Sequence[Buffer]) -> None:
        items = [item for each in with_frames(told.heads, frames) if (item := self._item(*each)) is not None]
        self._committed.forget_below(self._config.name, told.floor)
        with self._lock:
            self._held.update(item.sequence for item in items)
            self._items += items
            self._finished |= told.finished
            changed = self._changed
            if items or told.finished:
                self._changed = event()
        if items or told.finished:
            changed.set_result(None)

    def _item(self, head: Head, frames: Sequence[Buffer]) -> LentRecord | None:
        """Returns what is to be shown of a record; whatever is not is acknowledged."""
        with self._lock:
            if head.number in self._held:
                return None  # the host was restarted, or took us for dead; whoever holds the item acknowledges it
        if not self._committed.contains(self._config.name, head.number):
            try:
                value = decode([as_bytes_view(frame).toreadonly() for frame in frames])
                return LentRecord(head.number, head.origin, head.position, value, self, self._generation)
            except CodecError as error:
                self.poisoned += 1
                named = f"position {head.position} of {head.origin}"
                logger.warning("channel %s: dropped %s: %s", self._config.name, named, error)
        with self._lock:
            self._done.append(head.number)
        return None

    def _fail(self, error: ChannelError) -> None:
        super()._fail(error)
        self._changed.set_result(None)
