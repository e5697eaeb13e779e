"""Keeps Python's cyclic garbage collector from holding the event loop, and runs it when memory has grown.

A full collection walks every object there is: 290 ms with 4,096 rollouts in flight (`docs/performance.md`). What the daemon
makes is freed by reference counts alone, so it would find next to nothing. What environments make may refer to itself, and then
only the collector frees it. Python collects when a quarter of the objects is new, however long they live. Here memory must have
grown by half since the last collection, and rollouts must have ended, for those that are played hold what they made. Between two
collections only the youngest objects are walked, each once.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.loop_health.resident import resident_bytes

_LOOK_SECONDS = 0.1
_YOUNG_SECONDS = 0.01
_GROWTH = 1.5
_ENDED_SHARE = 0.1
_LARGEST_GROWTH = 4.0
"""Since the last collection, whatever else is known: an environment may leave garbage at every turn of a rollout that goes on."""
_NEVER = 2**31 - 1


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Leaves only the short collections automatic during the block. `collect_as_memory_grows` makes the others."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
        gc.unfreeze()


def freeze_gc() -> None:
    """Keeps all that lives now out of every collection until that block ends: what lives when rollouts begin lives long."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Memory:
    """How much is held."""

    blocks: int
    """Python's own, of at most 512 bytes: what small objects are made of. Counting them takes 0.1 ms a million."""
    resident: int
    """Bytes, large buffers included. Freed memory in between may still count."""

    @classmethod
    def now(cls) -> Memory:
        """Of this process."""
        return cls(sys.getallocatedblocks(), resident_bytes())

    def has_grown_since(self, before: Memory, times: float) -> bool:
        """Whether either is more than `times` what it was."""
        return self.blocks > times * before.blocks or self.resident > times * before.resident


@dataclass(slots=True)
class RolloutCounts:
    """How many rollouts began and ended in this life of the daemon. The dispatcher counts them."""

    begun: int = 0
    ended: int = 0


async def collect_as_memory_grows(rollouts: RolloutCounts) -> None:
    """Collects whenever memory has grown by half and may hold garbage. Runs until it is cancelled.

    While fewer rollouts have ended since the last collection than a tenth of those in flight, what has grown is theirs, so it is
    what later growth is compared with, up to four times what the last collection left.
    """
    collected = before = Memory.now()
    ended = rollouts.ended
    while True:
        await _collecting_the_young(_LOOK_SECONDS)
        now = Memory.now()
        if not now.has_grown_since(before, _GROWTH):
            continue
        few_ended = rollouts.ended - ended < _ENDED_SHARE * (rollouts.begun - rollouts.ended)
        if few_ended and not now.has_grown_since(collected, _LARGEST_GROWTH):
            before = now
        else:
            gc.collect()
            collected = before = Memory.now()
            ended = rollouts.ended


async def _collecting_the_young(seconds: float) -> None:
    """Waits, and has the youngest objects walked often enough that there are few of them.

    Python does it once 700 more objects were made than freed. While old rollouts are freed as fast as new ones are made, that
    takes seconds, and then a hundred thousand are walked at once.
    """
    for _ in range(round(seconds / _YOUNG_SECONDS)):
        await asyncio.sleep(_YOUNG_SECONDS)
        gc.collect(0)
