"""Tasks that keep a loop as busy as a daemon with many rollouts in flight: they compute a little and sleep a little.

The task is that of the reference figures (`docs/performance.md`): build a dict of 800 floats, sum it, sleep 0.5 to 2 ms.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_VALUES = 800
_SLEEP_SECONDS = (0.0005, 0.002)


@asynccontextmanager
async def synthetic_traffic(tasks: int, seed: int = 0) -> AsyncIterator[None]:
    """Runs `tasks` tasks on the running loop during the block."""
    generator = random.Random(seed)
    running = [asyncio.create_task(_work(generator), name=f"synthetic {index}") for index in range(tasks)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def one_round(generator: random.Random) -> None:
    """Runs one round of a task's work."""
    values = {str(index): generator.random() for index in range(_VALUES)}
    sum(values.values())
    await asyncio.sleep(generator.uniform(*_SLEEP_SECONDS))


async def _work(generator: random.Random) -> None:
    while True:
        await one_round(generator)
