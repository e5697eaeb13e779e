"""Mapped memory: as many bytes as asked for, mapped, and used again once nothing refers to it."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from counterpoint.inference.clients import memory as module
from counterpoint.inference.clients.memory import AHEAD_BYTES, HUGE_PAGE_BYTES, LargeMemory


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()  # an earlier test's answer within a cycle would be kept among this one's
    monkeypatch.setattr(module, "_kept", [])
    yield
    module._kept.clear()


@pytest.mark.parametrize("length", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES - 1])
def test_bytes_that_can_be_written_and_outlive_their_first_view(length: int) -> None:
    memory = LargeMemory(length)
    memory.extend()
    assert memory.view.nbytes == memory.ready == length
    array = np.frombuffer(memory.view, dtype=np.uint8)
    del memory
    array.data[length - 1 :] = b"\x07"
    assert array[-1] == 7
    assert array.ctypes.data % mmap.PAGESIZE == 0


def test_what_is_announced_takes_memory_only_as_it_comes() -> None:
    memory = LargeMemory(1 << 30)
    before = _resident_bytes()
    memory.extend()
    assert memory.ready == AHEAD_BYTES
    memory.view[: memory.ready] = b"\x07" * memory.ready
    memory.extend()
    assert memory.ready == 2 * AHEAD_BYTES
    assert _resident_bytes() - before < 4 * AHEAD_BYTES
    array = np.frombuffer(memory.view, dtype=np.uint8)
    assert array[:AHEAD_BYTES].min() == 7, "what has come stays"
    assert array[AHEAD_BYTES : memory.ready].max() == 0


@pytest.mark.parametrize("length", [HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES // 4, 2 * HUGE_PAGE_BYTES + 1])
def test_memory_that_nothing_refers_to_is_ready_for_the_next_answer_of_its_size(length: int) -> None:
    first = _whole(length)
    address, part = _address(first.view), first.view[5:9]
    del first
    assert LargeMemory(length).ready == 0, "a part of the first is referred to"
    del part
    again = LargeMemory(length - 1000)
    assert again.ready == again.view.nbytes == length - 1000
    assert _address(again.view) == address


def test_a_kept_region_that_is_too_small_or_much_too_large_is_not_used() -> None:
    """One byte more is on a page that is not mapped, although the region ends with a whole huge page."""
    _whole(4 * HUGE_PAGE_BYTES + 1)
    assert LargeMemory(4 * HUGE_PAGE_BYTES + 2).ready == 0
    assert LargeMemory(3 * HUGE_PAGE_BYTES).ready == 0
    assert LargeMemory(4 * HUGE_PAGE_BYTES).ready == 4 * HUGE_PAGE_BYTES


def test_what_is_kept_is_bounded_and_the_oldest_is_freed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 4 * HUGE_PAGE_BYTES)
    held = [_whole(HUGE_PAGE_BYTES + number) for number in range(6)]
    held.clear()
    assert sum(region.mapped for region in module._kept) <= 4 * HUGE_PAGE_BYTES
    assert len(module._kept) == 3
    _whole(3 * HUGE_PAGE_BYTES)
    assert [region.mapped for region in module._kept][-1] == 3 * HUGE_PAGE_BYTES
    _whole(5 * HUGE_PAGE_BYTES)
    assert [region.mapped for region in module._kept][-1] == 3 * HUGE_PAGE_BYTES, "more than the bound is not kept"


def test_garbage_that_is_collected_while_a_region_is_kept_harms_nothing() -> None:
    cycles: list[list[object]] = []
    for _ in range(50):
        cycle: list[object] = [_whole(HUGE_PAGE_BYTES)]
        cycle.append(cycle)
        cycles.append(cycle)
    del cycle
    thresholds = gc.get_threshold()
    cycles.clear()
    gc.set_threshold(1)  # at each object
    try:
        _whole(HUGE_PAGE_BYTES + 1)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(module._kept) == 51


def test_memory_that_is_not_wholly_mapped_is_freed() -> None:
    memory = LargeMemory(2 * AHEAD_BYTES)
    memory.extend()
    del memory
    assert not module._kept


def test_too_much_is_an_error_that_says_how_much() -> None:
    with pytest.raises(MemoryError, match=f"no room for {1 << 60} bytes"):
        LargeMemory(1 << 60).extend()


def _whole(length: int) -> LargeMemory:
    memory = LargeMemory(length)
    while memory.ready < length:
        memory.extend()
    return memory


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
