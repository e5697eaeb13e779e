"""Memory for large answers, mapped before bytes are read into it, so that the event loop never waits for a page.

The first access to a page makes the kernel find and clear it. If the kernel must first move other pages away, that takes
most of a second (`docs/performance.md`). So a thread accesses the pages first, some way ahead of the bytes that have
arrived: the announced length of an answer reserves addresses, no memory. Whole huge pages at addresses that are multiples of
their size are cleared in a third of the time of small ones, and freed in a fifth.

While a thread maps pages, the loop waits for the kernel's lock on the address space whenever it reserves or frees memory. So
the memory of answers that nobody holds any more is kept, up to a bound, and serves the answers to come.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np

HUGE_PAGE_BYTES = 1 << 21

LARGE_BYTES = HUGE_PAGE_BYTES
"""Smaller bodies come from `malloc`, which has most of its pages already."""

AHEAD_BYTES = 8 * HUGE_PAGE_BYTES
"""Mapped at a time. An answer of usual size is mapped at once, since each further part waits for a thread."""


KEPT_BYTES = 1 << 29
"""Most bytes that are kept for answers to come."""

UNUSED_SHARE = 0.25
"""Most of a kept region that an answer may leave unused."""

_kept: dict[int, list[mmap.mmap]] = {}
"""Wholly mapped regions that nothing refers to, by their size."""


class LargeMemory:
    """`length` bytes, of which the first `ready` are mapped: none before the first `extend`. Their content is undefined."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ready = 0
        self.view: memoryview
        """All `length` bytes, from the first `extend` on. After the last view of them, their memory is kept or freed."""

    def extend(self) -> None:
        """Maps the next `AHEAD_BYTES`, or takes a kept region. Raises `MemoryError` if the system has no room for `length` bytes.

        Blocks for a millisecond for every 20 MB, or longer; without the GIL.
        """
        if not self.ready:
            region = _take_kept(self.length)
            self.ready = 0 if region is None else self.length
            self._region = _reserve(self.length) if region is None else region
            self._array = np.frombuffer(self._region, dtype=np.uint8)  # every view refers to it
            self.view = self._array.data[: self.length]
        ready = min(self.ready + AHEAD_BYTES, self.length)
        self._array[self.ready : ready : mmap.PAGESIZE] = 0
        self.ready = ready
        if ready == self.length:
            weakref.finalize(self._array, _keep, self._region).atexit = False
            del self._array, self._region


def _take_kept(length: int) -> mmap.mmap | None:
    fitting = [size for size in list(_kept) if length <= size <= length / (1 - UNUSED_SHARE)]
    for size in sorted(fitting):
        with contextlib.suppress(KeyError, IndexError):  # another thread was faster
            return _kept[size].pop()
    return None


def _keep(region: mmap.mmap) -> None:
    """Keeps a region whose last view is gone, unless there are enough. Called in the thread that dropped the view."""
    for size in [size for size, regions in list(_kept.items()) if not regions]:
        _kept.pop(size, None)
    if sum(size * len(regions) for size, regions in list(_kept.items())) + len(region) <= KEPT_BYTES:
        _kept.setdefault(len(region), []).append(region)


def _reserve(length: int) -> mmap.mmap:
    # The kernel aligns a multiple of a huge page. The last part of one stays in small pages, so no memory is wasted.
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    reserved = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"this machine has no room for {length} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, 0, whole)
    return memory
