"""The limiter: so many in a pass of the loop, in the order of coming."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from counterpoint.inference.per_tick_limiter import TICK_SECONDS, PerTickLimiter


async def one_pass() -> None:
    await asyncio.sleep(0)


async def test_a_few_go_through_at_once_and_again_in_the_next_pass() -> None:
    limiter = PerTickLimiter(2)
    assert [limiter.take() for _ in range(3)] == [True, True, False]
    await one_pass()
    assert [limiter.take() for _ in range(3)] == [True, True, False]


async def test_a_crowd_goes_through_in_order_so_many_a_pass() -> None:
    limiter = PerTickLimiter(2)
    assert limiter.take()
    assert limiter.take()
    through: list[int] = []
    for index in range(5):
        assert not limiter.take()
        limiter.wait(partial(through.append, index))
    seen = []
    for _ in range(3):
        await one_pass()
        seen.append(list(through))
    assert seen == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


async def test_who_comes_late_does_not_pass_those_who_wait() -> None:
    limiter = PerTickLimiter(1)
    assert limiter.take()
    through: list[str] = []
    for name in "ab":
        limiter.wait(partial(through.append, name))
    await one_pass()
    assert through == ["a"]
    assert not limiter.take()
    await one_pass()
    assert through == ["a", "b"]


async def test_a_turn_comes_in_order_and_who_gives_up_takes_none() -> None:
    limiter, through = PerTickLimiter(1), list[str]()

    async def come(name: str) -> None:
        await limiter.turn()
        through.append(name)

    tasks = [asyncio.create_task(come(name)) for name in "abc"]
    await one_pass()
    assert through == ["a"]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert through == ["a", "c"]


def compute() -> None:
    """Computes for longer than a tick should."""
    end = time.thread_time() + 1.5 * TICK_SECONDS
    while time.thread_time() < end:
        pass


async def in_three_passes(limiter: PerTickLimiter) -> list[int]:
    """How many go through in each of three passes that compute for long, and in three that do not."""
    seen = []
    for is_long in (True, True, True, False, False, False):
        count = 0
        while limiter.take():
            count += 1
        seen.append(count)
        if is_long:
            compute()
        await one_pass()
    return seen


async def test_fewer_go_through_after_a_pass_that_computes_for_long_and_more_again_after_others() -> None:
    assert await in_three_passes(PerTickLimiter(8)) == [8, 4, 2, 2, 3, 4]


async def test_at_least_one_goes_through() -> None:
    assert await in_three_passes(PerTickLimiter(1)) == [1] * 6


async def test_one_without_a_pace_lets_as_many_through() -> None:
    assert await in_three_passes(PerTickLimiter(8, paced=False)) == [8] * 6
