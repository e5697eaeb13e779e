"""How long a full batch waits for stragglers."""

from __future__ import annotations

import asyncio

from counterpoint.orchestrator.step.patience import Patience


async def test_a_wait_is_so_many_steps_of_those_before_without_their_waits() -> None:
    now, loop = 0.0, asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    patience = Patience(ended.set_result, lambda: now)
    for seconds in (2.0, 4.0):
        now += seconds
        patience.shipped()
    now += 3.0
    patience.wait(3, 5)
    assert patience._wait is not None
    assert 0 < patience._wait.when() - loop.time() <= 15.0
    now += 1000.0
    patience.shipped()
    now += 3.0
    patience.wait(4, 0)
    assert await ended == 4, "the wait of step 3 ended as its batch shipped"
