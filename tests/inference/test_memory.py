"""Mapped memory: as many bytes as asked for, and there."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from inference.memory import HUGE_PAGE_BYTES, mapped


@pytest.mark.parametrize("length", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES - 1])
def test_bytes_of_zero_that_can_be_written_and_outlive_their_first_view(length: int) -> None:
    memory = mapped(length)
    assert memory.nbytes == length
    array = np.frombuffer(memory, dtype=np.uint8)
    del memory
    assert array[:: mmap.PAGESIZE].max() == array[-1] == 0
    array.data[length - 1 :] = b"\x07"
    assert array[-1] == 7
    assert array.ctypes.data % mmap.PAGESIZE == 0
