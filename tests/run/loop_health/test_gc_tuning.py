"""Garbage that refers to itself is found as memory grows, and nothing is looked for while it does not."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from counterpoint.run.loop_health import gc_tuning
from counterpoint.run.loop_health.gc_tuning import (
    Memory,
    RolloutCounts,
    collect_as_memory_grows,
    freeze_gc,
    infrequent_gc,
)
from counterpoint.transport.process.resident import allowed_bytes


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
        (Memory(3000, 3000), False),
        (Memory(3001, 3000), True),
        (Memory(100, 3001), True),
        (Memory(100, 100), False),
    ],
)
def test_growth_counts_be_it_of_small_objects_or_of_buffers(now: Memory, grown: bool) -> None:
    assert now.has_grown_since(Memory(2000, 2000)) == grown


@pytest.mark.parametrize(
    ("looks", "collections"),
    [
        ([(100, 0, 0), (149, 0, 0), (150, 0, 0), (151, 0, 0)], 1),
        ([(300, 100, 0), (400, 150, 50), (500, 199, 99), (600, 200, 100), (750, 300, 200), (751, 400, 300)], 1),
        ([(300, 100, 0), (400, 200, 100), (601, 250, 149), (902, 450, 348), (1300, 550, 448)], 0),
        ([(300, 100, 0), (400, 200, 100), (601, 250, 149), (902, 450, 349)], 1),
        ([(300, 100, 0), (400, 100, 0), (10_100, 100, 0)], 0),
        ([(300, 100, 0), (400, 100, 0), (10_101, 100, 0)], 1),
    ],
    ids=[
        "none is held",
        "all were let go once",
        "more are held",
        "as many are held",
        "turns",
        "most of what is available",
    ],
)
async def test_only_growth_that_held_rollouts_do_not_explain_may_be_garbage(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int, int]], collections: int
) -> None:
    """`looks`: memory, and the numbers of rollouts that have begun and were let go, at each look; 100 before the first."""
    counts, found = RolloutCounts(), list[int]()
    memory = iter([100, *(bytes_ for bytes_, _, _ in looks), 100])
    numbers = iter([(begun, let_go) for _, begun, let_go in looks])

    async def wait(_: float) -> None:
        if (look := next(numbers, None)) is None:
            raise TimeoutError
        counts.begun, counts.let_go = look

    monkeypatch.setattr(gc_tuning, "allowed_bytes", lambda: 80_000)
    monkeypatch.setattr(gc_tuning, "_collecting_the_young", wait)
    monkeypatch.setattr(Memory, "now", lambda: Memory(1, next(memory)))
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
async def test_what_held_rollouts_hold_is_not_walked_until_as_many_were_let_go() -> None:
    rollouts = RolloutCounts(begun=100)
    async with collecting(rollouts) as seen:
        held, before = [Knot()], Memory.now()
        while not Memory.now().blocks > 1.5 * before.blocks:
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
        rollouts.begun, rollouts.let_go = 199, 99
        for _ in range(20):
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
        assert seen == []
        rollouts.begun, rollouts.let_go = 200, 100
        while not seen:
            held += [Knot() for _ in range(1000)]
            await asyncio.sleep(0.002)
    assert len(set(map(id, held))) == len(held)


@pytest.mark.slow
@pytest.mark.usefixtures("prompt")
async def test_what_rollouts_leave_at_each_turn_is_collected_in_the_end_though_none_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_tuning, "allowed_bytes", lambda: 64 << 20)
    async with collecting(RolloutCounts(begun=100)) as seen:
        knots = [Knot()]
        lost = weakref.ref(knots[0])
        while lost() is not None:
            gc.collect(0)
            knots = [Knot() for _ in range(1000)]
            await asyncio.sleep(0.001)
    assert set(seen) == {2}


def test_a_container_whose_files_are_cached_is_allowed_all_that_it_is_given(tmp_path: Path) -> None:
    """Else its loop would collect ten times a second: the cache fills a container that reads models."""
    machine = allowed_bytes(tmp_path)
    (tmp_path / "memory.current").write_text("1000000\n")
    for said, allowed in (("max", machine), ("1000000", 1_000_000), (str(2 * machine), machine)):
        (tmp_path / "memory.max").write_text(f"{said}\n")
        assert allowed_bytes(tmp_path) == allowed


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
