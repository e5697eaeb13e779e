"""Adapters that share too few slots: never too many at once, none starves, none is forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.plugin.adapter_slots import SLOT_SECONDS, AdapterSlots


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """One request that runs until it is told to end."""

    def __init__(self, slots: AdapterSlots, adapter: str) -> None:
        self.adapter = adapter
        self.runs = False
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(slots))

    async def _run(self, slots: AdapterSlots) -> None:
        async with slots.use(self.adapter):
            self.runs = True
            try:
                await self.end.wait()
            finally:
                self.runs = False


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_adapter_without_a_slot_waits_until_one_is_empty() -> None:
    slots = AdapterSlots(2, Clock())
    first, again, second, third = (Request(slots, name) for name in ("a", "a", "b", "c"))
    await settle()
    assert [request.runs for request in (first, again, second, third)] == [True, True, True, False]
    first.end.set()
    await settle()
    assert not third.runs, "the slot still has a request"
    again.end.set()
    await settle()
    assert third.runs
    second.end.set()
    third.end.set()
    await asyncio.gather(second.task, third.task)


async def test_a_steady_load_gives_its_slot_up_when_its_turn_is_over() -> None:
    clock = Clock()
    slots = AdapterSlots(1, clock)
    running = Request(slots, "steady")
    await settle()
    waiting = Request(slots, "waits")
    another = Request(slots, "steady")
    await settle()
    assert another.runs, "its turn is not over yet"
    clock.now = SLOT_SECONDS
    late = Request(slots, "steady")
    await settle()
    assert not late.runs
    running.end.set()
    another.end.set()
    await settle()
    assert waiting.runs
    assert not late.runs
    waiting.end.set()
    await settle()
    assert late.runs, "and comes again in its turn"
    late.end.set()
    await late.task


async def test_a_turn_that_nobody_waits_for_never_ends() -> None:
    clock = Clock()
    slots = AdapterSlots(1, clock)
    first = Request(slots, "a")
    await settle()
    given_up = Request(slots, "b")
    await settle()
    given_up.task.cancel()
    await settle()
    clock.now = 10 * SLOT_SECONDS
    second = Request(slots, "a")
    await settle()
    assert second.runs
    first.end.set()
    second.end.set()
    await asyncio.gather(first.task, second.task)


@pytest.mark.slow
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["start", "end", "cancel", "wait"])), max_size=60),
)
def test_no_history_fills_more_slots_than_there_are_or_leaves_one_waiting_for_ever(
    slots: int, history: list[tuple[str, str]]
) -> None:
    async def live() -> None:
        clock = Clock()
        shared = AdapterSlots(slots, clock)
        requests: list[Request] = []
        for adapter, action in history:
            mine = [request for request in requests if request.adapter == adapter and not request.task.done()]
            if action == "start":
                requests.append(Request(shared, adapter))
            elif action == "end" and mine:
                mine[0].end.set()
            elif action == "cancel" and mine:
                mine[-1].task.cancel()
            elif action == "wait":
                clock.now += SLOT_SECONDS
            if action != "cancel":  # so that a place may be given to one that is just being cancelled
                await settle()
            assert len(Counter(request.adapter for request in requests if request.runs)) <= slots
        for request in requests:
            request.end.set()
        await asyncio.wait_for(asyncio.gather(*(request.task for request in requests), return_exceptions=True), 60)
        assert not shared._used
        assert all(place.done() for queue in shared._queues.values() for place in queue)

    asyncio.run(live())
