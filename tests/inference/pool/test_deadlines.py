"""Deadlines by one timer: each block that is due ends, in the order in which they are due, and no other."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.pool.deadlines import BlockDeadlines, DeadlineBlock

FAR = 3600.0


async def ended(deadlines: BlockDeadlines, due: float, entered: asyncio.Event | None = None) -> bool:
    """Waits in a block until it is ended; returns whether its deadline has ended it."""
    block = deadlines.until(due)
    try:
        with block:
            if entered is not None:
                entered.set()
            await asyncio.sleep(FAR)
    except TimeoutError:
        return block.was_due
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


async def test_a_block_that_is_left_does_not_end_and_does_not_keep_others_from_it() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    for _ in range(3):
        with deadlines.until(clock() + 0.005) as block:
            pass
        assert await ended(deadlines, clock() + 0.01)
        assert not block.was_due


async def test_a_block_that_something_else_ends_was_not_ended_by_its_deadline() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    block = deadlines.until(clock() + FAR)
    with pytest.raises(TimeoutError), block:  # noqa: PT012 - the block's end raises
        asyncio.get_running_loop().call_soon(block.end)
        await asyncio.sleep(FAR)
    assert not block.was_due


async def test_a_block_that_is_ended_as_its_work_is_done_ends_all_the_same_and_cancels_nothing_later() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    block = deadlines.until(clock() + FAR)
    with pytest.raises(TimeoutError), block:
        block.end()
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_an_error_in_a_block_that_is_ended_stays_the_error() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    block = deadlines.until(clock() + FAR)
    with pytest.raises(ValueError, match="its own"), block:  # noqa: PT012 - what it awaits turns its end into an error
        block.end()
        try:
            await asyncio.sleep(FAR)
        except asyncio.CancelledError:
            raise ValueError("its own") from None
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_cancelled_block_stays_cancelled() -> None:
    deadlines, entered = BlockDeadlines(), asyncio.Event()
    waiting = asyncio.create_task(ended(deadlines, asyncio.get_running_loop().time() + FAR, entered))
    await entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_block_that_is_cancelled_and_ended_at_once_stays_cancelled() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    blocks: list[DeadlineBlock] = []

    async def waits() -> None:
        with deadlines.until(clock() + FAR) as block:
            blocks.append(block)
            await asyncio.sleep(FAR)

    for first in ("end", "cancel"):
        waiting = asyncio.create_task(waits())
        await asyncio.sleep(0)
        block = blocks.pop()
        if first == "end":
            block.end()
        waiting.cancel()
        block.end()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_deadlines_hold_on_the_next_loop_too() -> None:
    deadlines = BlockDeadlines()

    async def left_behind() -> None:
        await asyncio.wait({asyncio.create_task(ended(deadlines, asyncio.get_running_loop().time() + 0.02))}, timeout=0)

    async def due() -> None:
        assert await ended(deadlines, asyncio.get_running_loop().time() + 0.01)

    asyncio.run(left_behind())
    asyncio.run(due())


async def test_a_block_that_takes_a_while_to_end_keeps_no_other_from_its_deadline() -> None:
    deadlines, clock = BlockDeadlines(), asyncio.get_running_loop().time
    blocks: list[DeadlineBlock] = []
    closed = asyncio.Event()

    async def slow(due: float) -> bool:
        try:
            with deadlines.until(due) as block:
                blocks.append(block)
                try:
                    await asyncio.sleep(FAR)
                finally:
                    await closed.wait()
        except TimeoutError:
            return block.was_due
        raise AssertionError("it was ended by nothing")

    began = clock()
    both = [asyncio.create_task(slow(due)) for due in (began + 0.01, began + FAR)]
    other = asyncio.create_task(ended(deadlines, began + 0.01))
    await asyncio.sleep(0)
    blocks[1].end()  # by something else, before it is due
    try:
        async with asyncio.timeout(60):
            assert await other
        for block in blocks:  # the first one is ending
            block.end()
    finally:
        closed.set()
    assert await asyncio.gather(*both) == [True, False]


def test_loops_of_several_threads_end_their_own_blocks() -> None:
    deadlines, entered, other_is_over = BlockDeadlines(), threading.Event(), threading.Event()
    found: list[bool] = []

    async def first() -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(ended(deadlines, loop.time() + 0.05))
        await asyncio.sleep(0)
        entered.set()
        await asyncio.to_thread(other_is_over.wait, FAR)
        found.append(await asyncio.wait_for(waiting, 10.0))

    async def other() -> bool:
        return await ended(deadlines, asyncio.get_running_loop().time() + 0.01)

    thread = threading.Thread(target=asyncio.run, args=(first(),))
    thread.start()
    assert entered.wait(10.0)
    assert asyncio.run(other())
    other_is_over.set()
    thread.join()
    assert found == [True]
