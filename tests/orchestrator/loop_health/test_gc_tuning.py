"""Garbage that refers to itself is found as memory grows, and nothing is looked for while it does not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.loop_health import gc_tuning
from orchestrator.loop_health.gc_tuning import Memory, collect_as_memory_grows, infrequent_gc


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
        (Memory(1500, 1000), False),
        (Memory(1501, 1000), True),
        (Memory(100, 1501), True),
        (Memory(100, 100), False),
    ],
)
def test_growth_by_half_counts_be_it_of_small_objects_or_of_buffers(now: Memory, grown: bool) -> None:
    assert now.has_grown_since(Memory(1000, 1000)) == grown


async def test_knots_are_collected_as_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "_GROWTH", 1.02)
    monkeypatch.setattr(gc_tuning, "_LOOK_SECONDS", 0.001)
    with infrequent_gc(), long_collections() as seen:
        task = asyncio.create_task(collect_as_memory_grows())
        await asyncio.sleep(0)
        knots = [Knot()]
        lost = weakref.ref(knots[0])
        async with asyncio.timeout(30):
            while lost() is not None:
                gc.collect(0)  # those held now are too old for the short collections
                knots = [Knot() for _ in range(1000)]
                await asyncio.sleep(0.001)
        task.cancel()
    assert set(seen) == {2}
    assert all(knot.itself is knot for knot in knots)


def test_only_young_objects_are_walked_while_memory_does_not_grow() -> None:
    with infrequent_gc(), long_collections() as seen:
        young = gc.get_stats()[0]["collections"]
        for _ in range(20):
            for _ in range(1000):
                Knot()
        assert gc.get_stats()[0]["collections"] > young
    assert seen == []
