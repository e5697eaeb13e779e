"""The turnstile: so many in a pass of the loop, in the order of coming."""

from __future__ import annotations

import asyncio
from functools import partial

from inference.per_tick_limiter import Turnstile


async def one_pass() -> None:
    await asyncio.sleep(0)


async def test_a_few_go_through_at_once_and_again_in_the_next_pass() -> None:
    turnstile = Turnstile(2)
    assert [turnstile.take() for _ in range(3)] == [True, True, False]
    await one_pass()
    assert [turnstile.take() for _ in range(3)] == [True, True, False]


async def test_a_crowd_goes_through_in_order_so_many_a_pass() -> None:
    turnstile = Turnstile(2)
    assert turnstile.take()
    assert turnstile.take()
    through: list[int] = []
    for index in range(5):
        assert not turnstile.take()
        turnstile.wait(partial(through.append, index))
    seen = []
    for _ in range(3):
        await one_pass()
        seen.append(list(through))
    assert seen == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


async def test_who_comes_late_does_not_pass_those_who_wait() -> None:
    turnstile = Turnstile(1)
    assert turnstile.take()
    through: list[str] = []
    for name in "ab":
        turnstile.wait(partial(through.append, name))
    await one_pass()
    assert through == ["a"]
    assert not turnstile.take()
    await one_pass()
    assert through == ["a", "b"]
