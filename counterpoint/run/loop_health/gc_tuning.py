"""Keeps Python's cyclic garbage collector from blocking the event loop, and runs it when memory holds garbage.

A full collection visits every object: 290 to 660 ms with 4,096 rollouts in flight (`docs/performance.md`). The daemon's own
objects are freed by reference counts alone, so it would free next to nothing. Objects of environments may form cycles, which
only the collector frees. Python collects when a quarter of the objects is new, however long they live. Here memory must have
grown by half while no more rollouts were held than before: else those make it grow, be they in flight or waiting for their step.
Between two collections only the youngest objects are visited, each once.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from counterpoint.transport.process.resident import allowed_bytes, resident_bytes

_LOOK_SECONDS = 0.1
_YOUNG_SECONDS = 0.01
_GROWTH = 0.5
"""A share of the memory that held rollouts explain: what may be garbage until there is a collection."""
_LARGEST_SHARE = 0.125
"""A share of the memory that machine and cgroup allow. Growth by it since a collection always causes another,
since an environment may leave garbage at every turn of a long rollout."""
_NEVER = 2**31 - 1


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Disables all automatic collections but the short ones during the block. `collect_as_memory_grows` runs the others.

    What was excluded from collections before stays so, and with it what `freeze_gc` adds: Python cannot tell them apart.
    """
    excluded = gc.get_freeze_count() > 0
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
        if not excluded:
            gc.unfreeze()


def freeze_gc() -> None:
    """Excludes all present objects from collections until that block ends: objects older than the rollouts live long."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use."""

    blocks: int
    """Python's blocks of at most 512 bytes, which hold small objects. Counting them takes 0.1 ms per million."""
    resident: int
    """Resident bytes, large buffers included. May include freed memory."""

    @classmethod
    def now(cls) -> Memory:
        """Measures this process."""
        return cls(sys.getallocatedblocks(), resident_bytes())

    def has_grown_since(self, before: Memory) -> bool:
        """Whether blocks or resident bytes are more than those of `before` by more than a share of `_GROWTH`."""
        return self.blocks > (1 + _GROWTH) * before.blocks or self.resident > (1 + _GROWTH) * before.resident


@dataclass(slots=True)
class RolloutCounts:
    """How many rollouts began in this life of the daemon, and how many of them it let go. The dispatcher counts them."""

    begun: int = 0
    let_go: int = 0
    """Those whose step is recorded, or whose group was dropped. One that has only ended is held, with all its turns."""

    @property
    def held(self) -> int:
        """Those in flight, and those that wait for their step."""
        return self.begun - self.let_go


async def collect_as_memory_grows(rollouts: RolloutCounts) -> None:
    """Collects whenever memory may hold garbage of half of what it held without any. Runs until it is cancelled.

    While fewer rollouts were let go since the last collection than are held, or more are held than ever since then, the growth is
    theirs and is no garbage, up to `_LARGEST_SHARE` of the memory that is allowed.
    """
    largest = _LARGEST_SHARE * allowed_bytes()
    collected = before = Memory.now()
    let_go, most = rollouts.let_go, rollouts.held
    while True:
        await _collecting_the_young(_LOOK_SECONDS)
        now, held = Memory.now(), rollouts.held
        theirs = rollouts.let_go - let_go < held or held > most
        if now.resident > collected.resident + largest or (not theirs and now.has_grown_since(before)):
            gc.collect()
            collected = before = Memory.now()
            let_go, most = rollouts.let_go, held
        elif theirs:
            before, most = now, max(most, held)


async def _collecting_the_young(seconds: float) -> None:
    """Waits, and collects the youngest objects so often that they are few.

    Python does so once 700 more objects were made than freed. While old rollouts are freed as fast as new ones are made, that
    takes seconds, and then a hundred thousand objects are visited at once. Only a loop that computes makes objects, and one that
    idles is not to be woken for nothing: each pause is as long as the loop computes for `_YOUNG_SECONDS`, by the last pause.
    """
    left, pause = round(seconds / _YOUNG_SECONDS), 1
    while left:
        before = time.thread_time()
        await asyncio.sleep(pause * _YOUNG_SECONDS)
        gc.collect(0)
        computed = max(time.thread_time() - before, 1e-9)
        left -= pause
        pause = min(max(1, int(pause * _YOUNG_SECONDS / computed)), left)
