"""Memory for large answers, mapped before anything is read into it, so that the event loop never waits for a page.

The first touch of a page makes the kernel find and clear it, and where it must first move others out of the way that takes
most of a second (`docs/performance.md`). So a thread touches them all. Whole huge pages at addresses that are multiples of
their size are cleared in a third of the time of small ones, and given back in a fifth.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

HUGE_PAGE_BYTES = 1 << 21

LARGE_BYTES = HUGE_PAGE_BYTES
"""What is smaller comes from `malloc`, which has most of its pages already."""


def mapped(length: int) -> memoryview:
    """`length` bytes of zeros, every page of which is there; given back to the system with the last view of them.

    Blocks for a millisecond for every 20 MB, or longer; without the GIL.
    """
    # The kernel aligns what is a multiple of a huge page. The last part of one stays in small pages, so no memory is wasted.
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    reserved = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that knows no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    array = np.frombuffer(memory, dtype=np.uint8, count=length)
    array[:: mmap.PAGESIZE] = 0
    return array.data
