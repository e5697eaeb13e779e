"""Garbage that refers to itself is found as memory grows, and nothing is looked for while it does not."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from counterpoint.run.loop_health import gc_tuning
from counterpoint.run.loop_health.gc_tuning import (
    Memory,
    RolloutCounts,
    collect_as_memory_grows,
    freeze_gc,
    infrequent_gc,
)


class Knot:
    """Only the collector finds one that nobody holds."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def long_collections() -> Iterator[list[int]]:
    """Generations of those that walk more than the youngest objects."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"]:
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize(
    ("now", "grown"),
    [
        (Memory(2500, 2000), False),
        (Memory(2501, 2000), True),
        (Memory(100, 2501), True),
        (Memory(100, 100), False),
    ],
)
def test_growth_counts_be_it_of_small_objects_or_of_buffers(now: Memory, grown: bool) -> None:
    assert now.has_grown_since(Memory(2000, 2000), 0.5, Memory(1000, 1000)) == grown


@pytest.mark.parametrize(
    ("looks", "collections"),
    [
        ([(100, 0), (149, 100), (150, 100), (151, 100)], 1),
        ([(190, 9), (239, 100), (240, 200), (241, 300)], 1),
        ([(190, 9), (239, 10), (240, 10)], 0),
        ([(390, 0), (400, 0)], 0),
        ([(390, 0), (401, 0)], 1),
    ],
    ids=["all may be garbage", "since some ended", "what those in flight hold", "few ended", "most"],
)
async def test_only_growth_since_rollouts_have_ended_may_be_garbage(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int]], collections: int
) -> None:
    """`looks` are, for 100 rollouts in flight, the memory and the number that have ended at each look; 100 before the first."""
    counts, found = RolloutCounts(begun=100), list[int]()
    memory = iter([100, *(blocks for blocks, _ in looks), 100])
    ends = iter([ended for _, ended in looks])

    async def wait(_: float) -> None:
        counts.ended = next(ends, -1)
        counts.begun = 100 + counts.ended
        if counts.ended < 0:
            raise TimeoutError

    monkeypatch.setattr(gc_tuning, "_collecting_the_young", wait)
    monkeypatch.setattr(Memory, "now", lambda: Memory(next(memory), 1))
    monkeypatch.setattr(gc, "collect", lambda: found.append(2))
    with pytest.raises(TimeoutError):
        await collect_as_memory_grows(counts)
    assert len(found) == collections


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little growth is enough, and is seen at once."""
    monkeypatch.setattr(gc_tuning, "_GROWTH", 0.02)
    monkeypatch.setattr(gc_tuning, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(gc_tuning, "_YOUNG_SECONDS", 0.001)


@asynccontextmanager
async def collecting(rollouts: RolloutCounts) -> AsyncIterator[list[int]]:
    """The collector at work, and the generations of its long collections."""
    with infrequent_gc(), long_collections() as seen:
        task = asyncio.create_task(collect_as_memory_grows(rollouts))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(60):
                yield seen
        finally:
            task.cancel()


def test_what_was_excluded_before_stays_so() -> None:
    """As all that the tests import (`tests/conftest.py`): each later collection in this process would visit it."""
    gc.freeze()
    before = gc.get_freeze_count()
    with infrequent_gc():
        freeze_gc()
    assert gc.get_freeze_count() >= 0.9 * before


@pytest.mark.usefixtures("prompt")
async def test_knots_are_collected_as_memory_grows() -> None:
    async with collecting(RolloutCounts()) as seen:
        knots = [Knot()]
        lost = weakref.ref(knots[0])
        while lost() is not None:
            gc.collect(0)  # those held now are too old for the short collections
            knots = [Knot() for _ in range(1000)]
            await asyncio.sleep(0.001)
    assert set(seen) == {2}
    assert all(knot.itself is knot for knot in knots)


@pytest.mark.slow
@pytest.mark.usefixtures("prompt")
async def test_what_rollouts_in_flight_hold_is_not_walked_until_some_have_ended() -> None:
    rollouts = RolloutCounts(begun=100)
    async with collecting(rollouts) as seen:
        held, before = [Knot()], Memory.now()
        while not Memory.now().has_grown_since(before, 0.5, before):
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
        rollouts.ended = 9
        for _ in range(20):
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
        assert seen == []
        rollouts.ended = 10
        while not seen:
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
    assert len(set(map(id, held))) == len(held)


@pytest.mark.slow
@pytest.mark.usefixtures("prompt")
async def test_what_rollouts_leave_at_each_turn_is_collected_in_the_end_though_none_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_tuning, "_LARGEST_GROWTH", 0.1)
    async with collecting(RolloutCounts(begun=100)) as seen:
        knots = [Knot()]
        lost = weakref.ref(knots[0])
        while lost() is not None:
            gc.collect(0)
            knots = [Knot() for _ in range(1000)]
            await asyncio.sleep(0.001)
    assert set(seen) == {2}


@pytest.mark.usefixtures("prompt")
async def test_young_objects_are_walked_often_though_no_more_are_made_than_freed() -> None:
    async with collecting(RolloutCounts()) as seen:
        freed = asyncio.Event()
        lost = weakref.ref(Knot(), lambda _: freed.set())
        await freed.wait()
        assert lost() is None
    assert seen == []


@pytest.mark.parametrize(("computed", "pauses"), [(0.0, [1, 9]), (0.004, [1, 2, 5, 2]), (0.02, [1] * 10)])
async def test_a_loop_that_computes_little_is_woken_less_often_to_walk_young_objects(
    monkeypatch: pytest.MonkeyPatch, computed: float, pauses: list[int]
) -> None:
    """`computed`: the CPU seconds of each pause; `pauses`: their lengths, in hundredths of a second."""
    slept, clock = list[float](), itertools.count()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "thread_time", lambda: computed * next(clock))
    await gc_tuning._collecting_the_young(0.1)
    assert [round(100 * seconds) for seconds in slept] == pauses


def test_only_young_objects_are_walked_while_memory_does_not_grow() -> None:
    with infrequent_gc(), long_collections() as seen:
        young = gc.get_stats()[0]["collections"]
        for _ in range(20):
            for _ in range(1000):
                Knot()
        assert gc.get_stats()[0]["collections"] > young
    assert seen == []
