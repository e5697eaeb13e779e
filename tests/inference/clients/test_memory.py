"""Mapped memory: as many bytes as asked for, and there."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from inference.clients.memory import AHEAD_BYTES, HUGE_PAGE_BYTES, LargeMemory


@pytest.mark.parametrize("length", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES - 1])
def test_bytes_of_zero_that_can_be_written_and_outlive_their_first_view(length: int) -> None:
    memory = LargeMemory(length)
    memory.extend()
    assert memory.view.nbytes == memory.ready == length
    array = np.frombuffer(memory.view, dtype=np.uint8)
    del memory
    assert array[:: mmap.PAGESIZE].max() == array[-1] == 0
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


def test_too_much_is_an_error_that_says_how_much() -> None:
    with pytest.raises(MemoryError, match=f"no room for {1 << 60} bytes"):
        LargeMemory(1 << 60).extend()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
