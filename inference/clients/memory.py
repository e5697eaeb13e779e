"""Memory for large answers, mapped before bytes are read into it, so that the event loop never waits for a page.

The first access to a page makes the kernel find and clear it. If the kernel must first move other pages away, that takes
most of a second (`docs/performance.md`). So a thread accesses the pages first, some way ahead of the bytes that have
arrived: the announced length of an answer reserves addresses, no memory. Whole huge pages at addresses that are multiples of
their size are cleared in a third of the time of small ones, and freed in a fifth.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

HUGE_PAGE_BYTES = 1 << 21

LARGE_BYTES = HUGE_PAGE_BYTES
"""Smaller bodies come from `malloc`, which has most of its pages already."""

AHEAD_BYTES = 8 * HUGE_PAGE_BYTES
"""Mapped at a time. An answer of usual size is mapped at once, since each further part waits for a thread."""


class LargeMemory:
    """`length` bytes of zeros, of which the first `ready` are mapped: none before the first `extend`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ready = 0
        self.view: memoryview
        """All `length` bytes, from the first `extend` on; freed with the last view of them."""

    def extend(self) -> None:
        """Maps the next `AHEAD_BYTES`. Raises `MemoryError` if the system has no room for `length` bytes.

        Blocks for a millisecond for every 20 MB, or longer; without the GIL.
        """
        if not self.ready:
            self.view = _reserve(self.length)
        ready = min(self.ready + AHEAD_BYTES, self.length)
        np.frombuffer(self.view, dtype=np.uint8)[self.ready : ready : mmap.PAGESIZE] = 0
        self.ready = ready


def _reserve(length: int) -> memoryview:
    # The kernel aligns a multiple of a huge page. The last part of one stays in small pages, so no memory is wasted.
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    reserved = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"this machine has no room for {length} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return memoryview(memory)[:length]
