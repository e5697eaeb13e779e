"""Deadlines by one timer: each block that is due ends, in the order in which they are due, and no other."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.pool.deadlines import BlockDeadlines, end

FAR = 3600.0


async def ended(deadlines: BlockDeadlines, due: float, entered: asyncio.Event | None = None) -> bool:
    """Waits in a block until it is ended; returns whether its deadline has ended it."""
    block = asyncio.timeout(None)
    try:
        async with block:
            deadlines.watch(block, due)
            if entered is not None:
                entered.set()
            await asyncio.sleep(FAR)
    except TimeoutError:
        return deadlines.has_ended(block)
    finally:
        deadlines.forget(block)
    raise AssertionError("it was ended by nothing")


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_blocks_end_in_the_order_in_which_they_are_due(milliseconds: list[int]) -> None:
    order: list[int] = []

    async def one(deadlines: BlockDeadlines, began: float, after: int) -> None:
        assert await ended(deadlines, began + after / 1000)
        order.append(after)

    async def run() -> None:
        deadlines, began = BlockDeadlines(), asyncio.get_running_loop().time()
        await asyncio.gather(*(one(deadlines, began, each) for each in milliseconds))

    asyncio.run(run())
    assert order == sorted(milliseconds)


async def test_a_block_that_is_forgotten_does_not_end_and_does_not_keep_others_from_it() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    for _ in range(3):
        async with asyncio.timeout(None) as block:
            deadlines.watch(block, clock() + 0.005)
            deadlines.forget(block)
            assert await ended(deadlines, clock() + 0.01)
        assert block.when() is None


async def test_a_block_that_something_else_ends_was_not_ended_by_its_deadline() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    with pytest.raises(TimeoutError):  # noqa: PT012 - the block's end raises
        async with asyncio.timeout(0) as block:
            deadlines.watch(block, clock() + FAR)
            await asyncio.sleep(FAR)
    assert not deadlines.has_ended(block)


async def test_a_cancelled_block_stays_cancelled() -> None:
    deadlines, entered = BlockDeadlines(), asyncio.Event()
    waiting = asyncio.create_task(ended(deadlines, asyncio.get_running_loop().time() + FAR, entered))
    await entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_block_that_takes_a_while_to_end_keeps_no_other_from_its_deadline() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    blocks: list[asyncio.Timeout] = []
    closed = asyncio.Event()

    async def slow(due: float) -> bool:
        try:
            async with asyncio.timeout(None) as block:
                blocks.append(block)
                deadlines.watch(block, due)
                try:
                    await asyncio.sleep(FAR)
                finally:
                    await closed.wait()
        except TimeoutError:
            return deadlines.has_ended(block)
        raise AssertionError("it was ended by nothing")

    began = clock()
    both = [asyncio.create_task(slow(due)) for due in (began + 0.01, began + FAR)]
    other = asyncio.create_task(ended(deadlines, began + 0.01))
    await asyncio.sleep(0)
    end(blocks[0])  # by something else, before it is due
    try:
        async with asyncio.timeout(60):
            assert await other
        for block in blocks:  # the first one is ending
            end(block)
    finally:
        closed.set()
    assert await asyncio.gather(*both) == [True, False]
