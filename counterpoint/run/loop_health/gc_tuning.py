"""Keeps Python's cyclic garbage collector from blocking the event loop, and runs it when memory has grown.

A full collection visits every object: 290 ms with 4,096 rollouts in flight (`docs/performance.md`). The daemon's own objects are
freed by reference counts alone, so it would free next to nothing. Objects of environments may form cycles, which only the
collector frees. Python collects when a quarter of the objects is new, however long they live. Here memory must have grown by half
of what the last collection left, since rollouts have ended: before that, those in flight hold what they made. Between two
collections only the youngest objects are visited, each once.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from counterpoint.transport.process.resident import resident_bytes

_LOOK_SECONDS = 0.1
_YOUNG_SECONDS = 0.01
_GROWTH = 0.5
"""A share of the memory after the last collection: what may be garbage until there is another one."""
_ENDED_SHARE = 0.1
_LARGEST_GROWTH = 3.0
"""Growth since the last collection that always causes one: an environment may leave garbage at every turn of a long rollout."""
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

    def has_grown_since(self, before: Memory, share: float, whole: Memory) -> bool:
        """Whether blocks or resident bytes are more than those of `before` by more than a share of those of `whole`."""
        return (
            self.blocks > before.blocks + share * whole.blocks
            or self.resident > before.resident + share * whole.resident
        )


@dataclass(slots=True)
class RolloutCounts:
    """How many rollouts began and ended in this life of the daemon. The dispatcher counts them."""

    begun: int = 0
    ended: int = 0


async def collect_as_memory_grows(rollouts: RolloutCounts) -> None:
    """Collects whenever memory may hold garbage of half of what the last collection left. Runs until it is cancelled.

    While fewer rollouts have ended since that collection than a tenth of those in flight, the growth is theirs and is no garbage,
    up to four times the memory after it.
    """
    collected = before = Memory.now()
    ended = rollouts.ended
    while True:
        await _collecting_the_young(_LOOK_SECONDS)
        now = Memory.now()
        few_ended = rollouts.ended - ended < _ENDED_SHARE * (rollouts.begun - rollouts.ended)
        has_garbage = not few_ended and now.has_grown_since(before, _GROWTH, collected)
        if has_garbage or now.has_grown_since(collected, _LARGEST_GROWTH, collected):
            gc.collect()
            collected = before = Memory.now()
            ended = rollouts.ended
        elif few_ended:
            before = now


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
