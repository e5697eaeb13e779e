"""Keeps Python's cyclic garbage collector from holding the event loop, and runs it when memory has grown.

A full collection walks every object there is: 290 ms with 4,096 rollouts in flight (`docs/performance.md`). What the daemon
makes is freed by reference counts alone, so it would find next to nothing. What environments make may refer to itself, and then
only the collector frees it. Python collects when a quarter of the objects is new, however long they live. Here memory must have
grown by half since the last collection. Between two of them only the youngest objects are walked, each once.
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
_GROWTH = 1.5
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

    def has_grown_since(self, before: Memory) -> bool:
        """Whether either has grown by half, which may be garbage."""
        return self.blocks > _GROWTH * before.blocks or self.resident > _GROWTH * before.resident


async def collect_as_memory_grows() -> None:
    """Collects whenever memory has grown by half since the last time. Runs until it is cancelled."""
    before = Memory.now()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if Memory.now().has_grown_since(before):
            gc.collect()
            before = Memory.now()
