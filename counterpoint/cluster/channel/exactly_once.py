"""What makes at-least-once delivery exactly once: a consumer stores which records it has committed together with its state.

`CommittedPositions` is a value to be kept in the consumer's own checkpoint, if that is written atomically; `CommitFile` is such
a checkpoint for consumers that have none. `docs/cluster.md` has the argument.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.files.untrusted import read_bytes

MAX_COMMIT_BYTES = 2**30


class PositionSet:
    """Whole numbers that fill up from below: all under a watermark, and few above. An operation costs O(1) on average."""

    def __init__(self, watermark: int = 0, above: Iterable[int] = ()) -> None:
        self.watermark = watermark
        """The lowest number that is missing."""
        self._above = set(above)
        self.fill_below(watermark)

    @property
    def above(self) -> list[int]:
        """The numbers above the watermark, ascending."""
        return sorted(self._above)

    def __contains__(self, position: int) -> bool:
        return position < self.watermark or position in self._above

    def add(self, position: int) -> bool:
        """Adds a number. Returns whether it was missing."""
        if position in self:
            return False
        self._above.add(position)
        self.fill_below(self.watermark)
        return True

    def fill_below(self, floor: int) -> None:
        """Adds every number below `floor`."""
        if not self._above:
            self.watermark = max(self.watermark, floor)
        while self.watermark < floor or self.watermark in self._above:
            self._above.discard(self.watermark)
            self.watermark += 1


class CommittedPositions:
    """The sequence numbers that one consumer has committed, of each channel that it reads. Usable from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[str, PositionSet]] = {}
        """Channels, each with its generation, and the numbers."""

    def begin(self, channel: str, generation: str) -> None:
        """Is told which generation of a channel is read. Numbers of another one mean other records, and are forgotten."""
        with self._lock:
            if channel not in self._channels or self._channels[channel][0] != generation:
                self._channels[channel] = (generation, PositionSet())

    def contains(self, channel: str, sequence: int) -> bool:
        """Whether a record is committed."""
        with self._lock:
            return channel in self._channels and sequence in self._channels[channel][1]

    def add(self, channel: str, generation: str, sequence: int) -> bool:
        """Adds a record (`LentRecord`) to what the next commit contains. Returns whether it was missing.

        A record of another generation than the one that is read is left out: its number means another record by now.
        """
        with self._lock:
            current, numbers = self._channels[channel]
            return generation == current and numbers.add(sequence)

    def forget_below(self, channel: str, floor: int) -> None:
        """Is told that no record below `floor` will come again, so that nothing is kept for each of them."""
        with self._lock:
            self._channels[channel][1].fill_below(floor)

    def as_dict(self) -> dict[str, list[Any]]:
        """Returns plain values for a checkpoint."""
        with self._lock:
            return {
                name: [generation, each.watermark, each.above] for name, (generation, each) in self._channels.items()
            }

    @classmethod
    def of_dict(cls, values: Mapping[str, list[Any]]) -> CommittedPositions:
        """Returns what `as_dict` returned."""
        positions = cls()
        for name, (generation, *numbers) in values.items():
            positions._channels[name] = (generation, PositionSet(*numbers))
        return positions


class CommitFile:
    """One file with a consumer's state and its committed positions, replaced as a whole by each commit.

    Held by one process at a time, so that one that was stopped and replaced cannot commit beside its successor.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises `OSError` while another process holds the file."""
        self._path = path
        taken = f"another process commits to {path}; it must end first"
        self._lock = take_lock(path.with_name(path.name + ".lock"), taken)
        self.state: Any = None
        """What was committed last; None before."""
        self.positions = CommittedPositions()
        try:
            if path.exists():
                content = msgpack.unpackb(read_bytes(path, MAX_COMMIT_BYTES), strict_map_key=False)
                self.state, self.positions = content["state"], CommittedPositions.of_dict(content["positions"])
        except BaseException:
            self.close()
            raise

    def commit(self, state: Any, durable: bool = True) -> None:
        """Replaces the file by `state` (msgpack values) and `positions` as they are. Acknowledge afterwards.

        Without `durable` the commit survives the death of the process, but not the machine's. Raises `OSError`; the file is
        then as it was.
        """
        packed: bytes = msgpack.packb({"state": state, "positions": self.positions.as_dict()})
        write_atomically(self._path, packed, durable=durable)
        self.state = state

    def close(self) -> None:
        """Lets another process hold the file."""
        os.close(self._lock)
